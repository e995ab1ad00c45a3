"""The report of a run: what is shown, what is written, and that training never notices."""

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from minigpt.config import Config, ModelConfig, TokenizerConfig
from minigpt.errors import UserError
from minigpt.evaluate import Score
from minigpt.events import Finished, Noted, Started, Stepped, Validated, counted
from minigpt.generate import Sample
from minigpt.metrics import (
    clock,
    draw_losses,
    read_metrics,
    samples_page,
    smoothed,
    spaced,
    to_json,
)
from minigpt.model import MiniGPT
from minigpt.report import (
    Advice,
    Report,
    _Console,
    cpu_model,
    git_commit,
    perplexity,
    spoken,
    versions,
)
from minigpt.tokenizer import Tokenizer
from minigpt.train import train

LINES = ["The river ran past the old mill , and nobody knew where it went .", ""] * 41
CONFIG = Config(
    data="river.txt",
    steps=11,
    batch_size=3,
    validations=2,
    compile="off",
    precision="float32",  # auto may decide otherwise the second time, on a busy machine
    tokenizer=TokenizerConfig("basic_english", 0),
    model=ModelConfig(context_length=7, d_model=14, n_heads=1, d_ff=23, n_layers=2, dropout=0.3),
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "river.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return dataclasses.replace(CONFIG, data=str(path), threads=1)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "river-1"
    folder.mkdir()
    return folder


@pytest.fixture
def open_report(run_dir):
    """Give a function that opens a report on run_dir; all are closed after the test."""
    with contextlib.ExitStack() as stack:

        def opened(config: Config = CONFIG, *, terminal: bool = False) -> Report:
            return stack.enter_context(Report(run_dir, config, make_console(terminal=terminal)))

        yield opened


def make_console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)


def shown(report: Report) -> str:
    return report.line.console.file.getvalue()


def started(run_dir, config=CONFIG, step: int = 0) -> Started:
    tokenizer = Tokenizer.train(config.tokenizer, lambda: LINES)
    config = dataclasses.replace(config, model=config.model.resolved(tokenizer.vocab_size))
    return Started(config, tokenizer, run_dir, 12_345, "11 steps", 5.5, {"float32": 123.0}, step)


def stepped(step: int, loss: float = 5.0) -> Stepped:
    return Stepped(
        step=step,
        progress=step / 11,
        epoch=step / 5.5,
        loss=loss,
        rate=0.5,
        gradient_norm=1.25,
        tokens_per_second=23_456.7,
        elapsed_seconds=step * 1.5,
        remaining_seconds=(11 - step) * 1.5,
    )


def validated(start: Started, step: int, loss: float = 4.9, train_loss: float = 4.5) -> Validated:
    torch.manual_seed(1)
    score = Score(nats=loss * 97, tokens=97, words=89, bytes=499)
    model = MiniGPT(start.config.model).train()
    return Validated(step, step / 11, score, train_loss, True, step * 1.5, model, start.tokenizer)


def tell(report: Report, run_dir, last: int = 11) -> None:
    """Tell a report the story of a whole run."""
    start = started(run_dir)
    report(start)
    for step in range(1, last + 1):
        report(stepped(step, 6 - step / 10))
        if step % 5 == 0:
            report(validated(start, step))
    score = Score(97 * 4.9, 97, 89, 499)
    report(Finished(last, 16.5, score, "budget", True, {"steps": last, "valid_sha256": "abc"}))


# Console


def test_elsewhere_than_in_a_terminal_plain_lines_tell_the_story(run_dir, open_report):
    report = open_report()
    tell(report, run_dir)
    text = shown(report)
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0].startswith("12,345 parameters")
    assert lines[1] == f"into {run_dir}"
    assert sum("tokens/s" in line for line in lines) <= 11
    assert f"step 5: valid perplexity {math.exp(4.9):.1f} (best so far)" in text
    assert lines[-1].startswith("11 steps in 0:16 (budget): best valid perplexity")


def test_a_terminal_has_one_line_that_lives(run_dir, open_report):
    report = open_report(terminal=True)
    tell(report, run_dir)
    text = shown(report)
    for part in ("loss 5.900", f"perplexity {math.exp(5.9):.1f}", "23,457 tokens/s", "0:15 left"):
        assert part in text
    assert "rate 0.0015" in text  # half of 3e-3
    assert "\x1b[?25h" in text  # the cursor is back
    assert not report.line.progress.live.is_started


def test_the_live_line_goes_when_training_fails(run_dir, open_report):
    report = open_report(terminal=True)
    start = started(run_dir)
    report(start)
    assert report.line.progress.live.is_started
    with contextlib.suppress(RuntimeError), report:
        raise RuntimeError("boom")
    assert not report.line.progress.live.is_started
    report.close()


def test_the_perplexity_shown_is_exp_of_the_loss_shown(run_dir, open_report):
    report = open_report()
    report(started(run_dir))
    for step in range(1, 12):
        report(stepped(step, 3 + step % 2))
    for line in (line for line in shown(report).splitlines() if "tokens/s" in line):
        words = line.split()
        loss = float(words[words.index("loss") + 1])
        shown_perplexity = float(words[words.index("perplexity") + 1])
        assert shown_perplexity == pytest.approx(math.exp(loss), rel=2e-3)


def test_markup_in_a_note_or_in_a_text_is_only_text(run_dir, open_report):
    report = open_report()
    report(Noted("a [bold]note[/bold] about [/x] :smile:"))
    assert shown(report) == "a [bold]note[/bold] about [/x] :smile:\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01"), (math.inf, "?"), (-3, "0:00")],
)
def test_durations_are_spoken(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 step"), (0, "0 steps"), (1_000, "1,000 steps"), (1.0, "1 step"), (0.5, "0.5 steps")],
)
def test_one_is_singular(number, text):
    assert counted(number, "step") == text


def test_perplexity_is_exp_and_never_overflows():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e4) == math.inf
    assert math.isinf(perplexity(math.inf))


def test_figures_per_word_stand_only_where_no_word_is_unknown(run_dir):
    score, words = Score(97 * 4.9, 97, 89, 499), started(run_dir).tokenizer
    pieces = Tokenizer.train(TokenizerConfig("char", 300), lambda: LINES)
    assert spoken(score, words) == f"perplexity {math.exp(4.9):.1f}"
    assert f"{math.exp(97 * 4.9 / 89):.1f} per word" in spoken(score, pieces)


# Advice


def advice(*losses: tuple[float, float]) -> list[str]:
    advisor, found = Advice(), []
    for valid, of_train in losses:
        score = Score(valid * 97, 97, 97, 499)
        found += advisor(Validated(1, 0.5, score, of_train, True, 1.0, None, None))
    return found


# nanoGPT#493, #69, #606: overfitting, and no advice.
def test_overfitting_is_told_once():
    found = advice((5.0, 4.8), (4.8, 4.0), (4.9, 3.5), (5.1, 3.0))
    assert len(found) == 1
    assert "valid rises" in found[0]


@pytest.mark.parametrize(
    "losses",
    [
        [(5.0, 4.8), (4.8, 4.6), (4.7, 4.5)],  # both fall
        [(5.0, 4.8), (5.2, 5.1)],  # both rise: something else is wrong
    ],
)
def test_no_advice_where_nothing_parts(losses):
    assert not advice(*losses)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_once(run_dir, loss, open_report):
    report = open_report()
    report(started(run_dir))
    for step in range(1, 4):
        report(stepped(step, loss))
    report(stepped(4, 5.0))
    assert shown(report).count("is not finite") == 1
    assert "step 1 " in shown(report)
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    assert [r["loss"] for r in records] == [None, None, None, 5.0]
    assert report.line.loss == 5.0


def spikes(*losses: float) -> tuple[list[str], int]:
    """Return what is said of a run with these losses at its end, and how many jumps are counted."""
    advisor, found = Advice(), []
    falling = [3 + 5 * math.exp(-step / 30) + 0.1 * math.sin(5 * step) for step in range(200)]
    for step, loss in enumerate([*falling, *losses], start=1):
        found += advisor(stepped(step, loss))
    return found, advisor.n_spikes


def test_a_jump_of_the_loss_is_told_once_and_counted():
    found, count = spikes(7.0, 3.0, 3.1, 6.5, 3.0)
    assert count == 2
    assert len(found) == 1
    assert "jumped from 3." in found[0]
    assert "to 7.00 at step 201" in found[0]


@pytest.mark.parametrize(
    "losses", [(), (3.4, 3.4, 3.4), (2.0, 1.0), tuple(3 + 0.02 * step for step in range(200))]
)
def test_a_loss_that_only_wanders_is_no_jump(losses):
    assert spikes(*losses) == ([], 0)


def test_the_end_says_how_many_steps_were_skipped(run_dir, open_report):
    report = open_report()
    report(started(run_dir))
    report(Finished(9, 3.0, None, "non-finite", False, {"steps": 9, "skipped_steps": 5}))
    assert "5 steps skipped: the gradient was not finite" in shown(report)


def test_a_sample_cannot_command_the_terminal(run_dir, open_report):
    report = open_report()
    report.line.quote(Sample("Clear", "\x1b[2Jthe\x07 screen\x9b2J\nand\tgo on"))
    assert shown(report).split() == ["Clear␛[2Jthe␇", "screen�2J", "and", "go", "on"]


def test_a_model_that_diverged_does_not_end_the_run(run_dir, open_report):
    report, start = open_report(), started(run_dir)
    event = validated(start, 5, math.nan)
    with torch.no_grad():
        for parameter in event.model.parameters():
            parameter.fill_(math.nan)
    report(start)
    report(event)
    assert "no text" in shown(report)
    assert (run_dir / "loss.png").is_file()


def test_a_full_disk_is_told_once_and_does_not_end_the_run(run_dir, open_report, monkeypatch):
    report, start = open_report(), started(run_dir)
    report(start)

    def full(record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.metrics, "add", full)
    for step in range(1, 4):
        report(stepped(step))
    report(validated(start, 3))
    assert shown(report).count("No space left on device") == 1
    assert "step 3: valid perplexity" in shown(report)


# Files


def test_each_record_is_on_disk_at_once_and_is_json(run_dir, open_report):
    report, start = open_report(), started(run_dir)
    report(start)
    for step in range(1, 4):
        report(stepped(step))
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == step
        assert json.loads(lines[-1]) == {"kind": "step", **dataclasses.asdict(stepped(step))}
    report(validated(start, 3))
    record = json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert record["kind"] == "validation"
    assert record["valid_loss"] == pytest.approx(4.9)
    assert record["valid_token_perplexity"] == pytest.approx(math.exp(4.9))
    assert [sample["prompt"] for sample in record["samples"]] == ["", "The"]


def test_json_has_no_word_for_nan():
    tree = {"a": [math.nan, -math.inf, 1.5], "b": {"c": True, "d": None, 3: ("x",)}}
    expected = {"a": [None, None, 1.5], "b": {"c": True, "d": None, "3": ["x"]}}
    assert json.loads(to_json(tree)) == expected


def test_a_resumed_run_cuts_back_to_its_checkpoint(run_dir, open_report):
    tell(open_report(), run_dir, last=8)
    path = run_dir / "metrics.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "step", "step": 9, "lo')  # the power went
    before = list(read_metrics(path))
    report = open_report()
    report(started(run_dir, step=5))
    records = list(read_metrics(path))
    assert records == [r for r in before if r["step"] <= 5]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 5]
    report(stepped(6))
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 5, 6]


def test_samples_and_picture_hold_what_came_before_the_resume(run_dir, open_report):
    tell(open_report(), run_dir, last=8)
    report, start = open_report(), started(run_dir, step=5)
    report(start)
    report(validated(start, 7))
    page = (run_dir / "samples.md").read_text(encoding="utf-8")
    assert page.index("## Step 7:") < page.index("## Step 5:")
    assert page.count("## Step") == 2
    assert page.startswith("# What river-1 wrote")


def test_a_sample_is_shown_as_it_is():
    sample = {"prompt": "", "text": "# no title\n```\n> no quote"}
    record = {"kind": "validation", "step": 5, "valid_token_perplexity": 3.0, "samples": [sample]}
    page = samples_page("x", [record, {"kind": "step", "step": 6}])
    assert "    # no title\n    ```\n    > no quote" in page


def step_record(step: int, loss: float | None) -> dict:
    return {"kind": "step", "step": step, "loss": loss, "elapsed_seconds": 2.0 * step}


def valid_record(step: int, loss: float) -> dict:
    return {
        "kind": "validation",
        "step": step,
        "valid_loss": loss,
        "valid_token_perplexity": math.exp(loss),
        "elapsed_seconds": 2.0 * step,
    }


@pytest.mark.parametrize(
    "records",
    [
        [],
        [step_record(1, 5.0)],
        [step_record(1, None), valid_record(1, 5.0)],
        [step_record(i, 9 - i / 50) for i in range(1, 200)] + [valid_record(199, 5.2)],
        [step_record(7, 1e9), step_record(8, 5.0)],
        [valid_record(i, 4.0) for i in range(13)],
    ],
)
def test_the_picture_of_the_losses_is_drawn_whatever_there_is(tmp_path, records):
    figure = draw_losses(records)
    figure.savefig(tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").shape[0] > 500


def test_labels_do_not_stand_on_each_other():
    kept = [r["step"] for r in spaced([valid_record(i, 4.0) for i in (10, 20, 95, 99, 100)])]
    assert kept == [100, 20, 10]
    assert spaced([]) == []


def test_the_running_mean_of_a_line_is_the_line():
    values = [3.0 * i for i in range(211)]
    assert smoothed(values)[20:-20] == pytest.approx(values[20:-20])
    assert smoothed([]) == []
    assert smoothed([5.0]) == [5.0]


def test_report_json_says_what_ran_on_what_and_how_well(run_dir, open_report):
    tell(open_report(), run_dir)
    report = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    assert report["steps"] == 11
    assert report["valid_sha256"] == "abc"
    assert report["valid"]["token_perplexity"] == pytest.approx(math.exp(4.9))
    assert report["valid"]["tokens"] == 97
    assert report["versions"]["torch"] == torch.__version__
    assert report["hardware"]["threads"] == 1
    assert report["hardware"]["cpu"]
    assert report["config"]["model"]["n_layers"] == 2
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "loss.png",
        "metrics.jsonl",
        "report.json",
        "samples.md",
    ]


def test_a_run_that_ended_before_a_validation_has_a_report_too(run_dir, open_report):
    report = open_report()
    report(started(run_dir))
    report(Finished(1, 3.0, None, "interrupted", True, {"steps": 1}))
    assert json.loads((run_dir / "report.json").read_text(encoding="utf-8"))["valid"] is None
    assert shown(report).splitlines()[-1] == "1 step in 0:03 (interrupted)"


def test_the_commit_is_that_of_the_checkout_or_none(tmp_path):
    (tmp_path / "package").mkdir()
    assert git_commit(tmp_path) is None
    (tmp_path / ".git").mkdir()  # not a repository at all
    assert git_commit(tmp_path) is None
    assert set(versions()) == {"minigpt", "torch", "python", "git"}
    assert cpu_model()


# Other logs


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_log_is_told_before_anything_is_trained(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    config = dataclasses.replace(CONFIG, log=kind)
    with pytest.raises(UserError, match=rf"log is {kind} but {kind} is not installed.*\[{kind}\]"):
        Report(tmp_path / "new", config, make_console())
    assert not (tmp_path / "new").exists()


FAKE_WANDB = """
calls = []

class Run:
    def log(self, figures, step):
        calls.append((step, figures))
    def finish(self):
        calls.append("finished")

def init(**options):
    calls.append(options)
    return Run()
"""


def test_wandb_gets_every_number(tmp_path, monkeypatch, run_dir, open_report):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    config = dataclasses.replace(CONFIG, log="wandb")
    report = open_report(config)
    start = started(run_dir, config)
    report(start)
    report(stepped(1))
    report(validated(start, 2))
    report.close()
    report.close()
    import wandb

    options, (step, figures), (_, of_valid), end = wandb.calls
    sys.modules.pop("wandb")
    assert options["name"] == "river-1"
    assert options["config"]["steps"] == 11
    assert step == 1
    assert figures["step/loss"] == 5.0
    assert of_valid["validation/valid_word_perplexity"] > 0
    assert end == "finished"


# tensorboard 2.21 reads the numpy and protobuf of its own time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(run_dir):
    config = dataclasses.replace(CONFIG, log="tensorboard")
    with Report(run_dir, config, make_console()) as report:
        report(started(run_dir, config))
        for step in range(1, 6):
            report(stepped(step))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert "step/loss" in events.Tags()["scalars"]
    assert [e.step for e in events.Scalars("step/loss")] == [1, 2, 3, 4, 5]


# Training never notices


def test_no_random_number_of_training_is_used_up(run_dir, open_report):
    report, start = open_report(), started(run_dir)
    event = validated(start, 5)
    event.model.blocks[1].eval()
    modes = [part.training for part in event.model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    report(start)
    report(stepped(4))
    report(event)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert [part.training for part in event.model.modules()] == modes
    assert all(parameter.grad is None for parameter in event.model.parameters())


def test_a_reported_run_is_the_unreported_one_to_the_bit(tmp_path, config):
    with Report(tmp_path / "a", config, make_console()) as report:
        told = train(config, tmp_path / "a", report)
    silent = train(config, tmp_path / "b")
    assert told.step == silent.step
    for name, weight in told.model.state_dict().items():
        assert torch.equal(weight, silent.model.state_dict()[name]), name
    records = list(read_metrics(tmp_path / "a" / "metrics.jsonl"))
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, 12))
    assert sum(r["kind"] == "validation" for r in records) == 2
    assert told.report["valid"]["token_perplexity"] == pytest.approx(
        min(r["valid_token_perplexity"] for r in records if r["kind"] == "validation")
    )


def test_a_run_goes_on_when_its_reader_has_left(run_dir):
    """As `minigpt train … 2>&1 | head` does it: what was to be lost is the lines, not the run."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as pipe:
        console = _Console(file=pipe)
        with Report(run_dir, CONFIG, console) as report:
            start = started(run_dir)
            report(start)
            report(stepped(1, 5.0))
            report(validated(start, 5, 4.0))
        assert console.quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # so that closing it can flush
    assert [r["kind"] for r in read_metrics(run_dir / "metrics.jsonl")] == ["step", "validation"]
