"""The benchmarks: each word scored once, a clock that is fair, ratios that say what they mean."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from torch._inductor.codecache import CppCodeCache

from minigpt.config import Config, ModelConfig, TokenizerConfig, load_preset
from minigpt.corpus import open_corpus
from minigpt.data import prepare
from minigpt.errors import UserError
from minigpt.evaluate import Score, evaluate
from minigpt.events import Started, Stepped, Validated
from minigpt.train import train
from tiny import MODERN, Recorder, T, make_model, run_config, write_corpus

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import curves  # noqa: E402
import peer_word_model  # noqa: E402
import peers  # noqa: E402
import quality  # noqa: E402
import quality_runs  # noqa: E402
import vocabulary  # noqa: E402
from curves import Point  # noqa: E402
from peer import Words, closed_vocabulary  # noqa: E402

V, EOS = 89, 3
LIKE = Config(batch_size=5, model=ModelConfig(context_length=11, d_model=12, n_heads=2, n_layers=1))

# Checkouts as their owners have them, seen from here: model classes with these names and arguments.
# What they predict depends on the word before alone, so that a text's nats can be added up by hand;
# in training mode it is nonsense.
NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.randn(config.vocab_size, config.vocab_size))

    def forward(self, idx, targets=None):
        assert idx.size(1) <= self.config.block_size
        logits = self.table[idx] * (0.1 if self.training else 1.0)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print("a line of its own")
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""
WORD_MODEL = """
import torch
from torch import nn

class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        assert (rnn_type, ninp, nhid, nlayers) == ("LSTM", 200, 200, 2)
        assert (dropout, tie_weights) == (0.2, True)
        self.table = nn.Parameter(torch.randn(ntoken, ntoken))
        self.read = []

    def forward(self, input, hidden):
        self.read.append(hidden[0].item())
        logits = self.table[input] * (0.1 if self.training else 1.0)
        return logits.log_softmax(-1).flatten(0, 1), (hidden[0] + len(input), hidden[1])

    def init_hidden(self, bsz):
        return torch.zeros(()), torch.zeros(bsz)

class TransformerModel(nn.Module):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout=0.5):
        super().__init__()
        assert (ninp, nhead, nhid, nlayers, dropout) == (200, 2, 200, 2, 0.2)
        self.table = nn.Parameter(torch.randn(ntoken, ntoken))

    def forward(self, src, has_mask=True):
        assert has_mask
        return (self.table[src] * (0.1 if self.training else 1.0)).log_softmax(-1)
"""


def words(n_train: int = 1_523, n_valid: int = 397) -> Words:
    random = np.random.default_rng(5)
    train, valid = (random.integers(V, size=n).astype(np.uint16) for n in (n_train, n_valid))
    return Words(train, valid, EOS, V)


@pytest.fixture
def checkouts(tmp_path: Path) -> dict[str, Path | None]:
    for name, text in (("gpt/model.py", NANOGPT), ("ex/word_language_model/model.py", WORD_MODEL)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, "utf-8")
    return {"nanogpt": tmp_path / "gpt", "pytorch_examples": tmp_path / "ex"}


class Clock:
    """A clock that stands still unless it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


# The peers


@pytest.mark.parametrize("n_words", [1, 10, 11, 12, 349, 397])
@pytest.mark.parametrize("name", ["nanogpt", "lstm", "word-transformer"])
def test_a_peer_scores_each_word_once_and_the_first_after_eos(checkouts, name, n_words):
    text = words()
    peer = peers.make_peer(name, text, LIKE, checkouts)
    ids = text.valid[:n_words].astype(int)
    log_probs = peer.model.table.detach().log_softmax(-1).numpy()
    by_hand = -log_probs[np.array([EOS, *ids[:-1]]), ids].sum()
    assert peer.score(text.valid[:n_words]) == pytest.approx(by_hand, rel=1e-5)
    assert peer.model.training  # it goes on learning


@pytest.mark.parametrize("name", ["nanogpt", "lstm", "word-transformer", "word-transformer-adamw"])
def test_a_peer_learns(checkouts, name):
    text = words()
    peer = peers.make_peer(name, text, LIKE, checkouts)
    before = peer.score(text.train)
    for step in range(40):
        peer.step(step / 40)
    assert peer.score(text.train) < before - 1


def test_transformers_gpt2_has_the_sizes_of_the_preset(checkouts):
    peer = peers.make_peer("transformers", words(), LIKE, checkouts)
    sizes = peer.model.config
    assert (sizes.n_embd, sizes.n_layer, sizes.n_head, sizes.n_positions) == (12, 1, 2, 11)
    before = peer.score(words().valid)
    assert before == pytest.approx(397 * math.log(V), rel=0.02)  # as good as a guess
    peer.step(0.0)
    assert peer.score(words().valid) != before


def test_the_rate_of_nanogpt_rises_and_falls_with_the_budget(checkouts):
    peer = peers.make_peer("nanogpt", words(), LIKE, checkouts)
    peer.step(0.0)
    (group,) = peer.optimizer.param_groups
    assert group["lr"] == pytest.approx(1e-3 / 101)
    peer.n_steps = 100
    peer.step(0.5)
    assert group["lr"] == pytest.approx(1e-3 * (0.1 + 0.9 / 2))
    peer.step(1.0)
    assert group["lr"] == pytest.approx(1e-4)


def test_the_lstm_carries_its_state_through_an_epoch_and_no_further(checkouts):
    peer = peers.make_peer("lstm", words(), LIKE, checkouts)
    n_rows = 1_523 // 20
    ended = []
    for _ in range(2 * peer.batches_per_epoch):
        peer.step(0.0)
        ended.append(peer.epoch_ended)
    assert peer.batches_per_epoch == math.ceil((n_rows - 1) / 35)
    assert ended == 2 * [*([False] * (peer.batches_per_epoch - 1)), True]
    # The state counts the rows read: it begins anew with each epoch.
    assert peer.model.read == 2 * [35.0 * i for i in range(peer.batches_per_epoch)]


def test_the_lstm_lowers_its_rate_after_an_epoch_without_gain(checkouts):
    peer = peers.make_peer("lstm", words(), LIKE, checkouts)
    rates = []
    for nats in (7.0, 6.0, 6.0, 5.0, 8.0):
        peer.hear(nats)
        rates.append(peer.rate)
    assert rates == [20.0, 20.0, 5.0, 5.0, 1.25]


@pytest.mark.parametrize("name", ["nanogpt", "transformers"])
def test_the_loss_of_a_peer_is_compiled_with_its_model(checkouts, monkeypatch, name):
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    peer = peers.make_peer(name, words(), LIKE, checkouts, compiled=True)
    (function,) = compiled
    ids = torch.from_numpy(words().train[:12].astype(int))
    assert function(ids[None, :-1], ids[None, 1:]).dim() == 0
    peer.step(0.5)
    assert peer.n_steps == 1


def test_columns_lie_side_by_side():
    columns = peer_word_model._columns(np.arange(13, dtype=np.uint16), 3)
    assert columns.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_faster_takes_the_faster_way_and_a_fresh_peer(monkeypatch):
    clock = Clock(monkeypatch)

    class Slow:
        def __init__(self, compiled: bool, seconds: float) -> None:
            self.compiled, self.seconds, self.n_steps = compiled, seconds, 0

        def step(self, share: float) -> None:
            # The first step compiles: it must not count.
            clock.now += self.seconds + (100 if self.compiled and self.n_steps == 0 else 0)
            self.n_steps += 1

    def maker(eager: float, compiled: float) -> Callable[[bool], Any]:
        return lambda wish: Slow(wish, compiled if wish else eager)

    assert peers.faster(maker(3, 2), "auto").compiled
    assert not peers.faster(maker(2, 3), "auto").compiled
    assert peers.faster(maker(2, 3), "on").compiled
    assert peers.faster(maker(3, 2), "auto").n_steps == 0


# The clock


def test_a_peer_is_scored_with_the_clock_stopped(monkeypatch):
    clock, text = Clock(monkeypatch), words()

    class Steady:
        n_parameters, tokens_per_step = 7, 13

        def __init__(self) -> None:
            self.settings: dict[str, Any] = {}
            self.heard: list[float] = []
            self.epoch_ended, self.n_steps = False, 0

        def step(self, share: float) -> None:
            assert share == pytest.approx(self.n_steps / 60)
            clock.now += 1
            self.n_steps += 1
            self.epoch_ended = self.n_steps == 25

        def score(self, ids: Any) -> float:
            clock.now += 1_000
            return len(ids) * math.log(100 - self.n_steps)

        def hear(self, nats: float) -> None:
            self.heard.append(nats)

    peer = Steady()
    result = quality_runs.run_peer(peer, text, minutes=1, validations=4)
    found = [(p.steps, round(p.minutes * 60), round(p.perplexity)) for p in curves.points(result)]
    # Four equal parts of the budget, and the end of the epoch.
    assert found == [(15, 15, 85), (25, 25, 75), (30, 30, 70), (45, 45, 55), (60, 60, 40)]
    assert peer.heard == [pytest.approx(397 * math.log(75))]
    assert curves.points(result)[-1].tokens == 60 * 13
    assert curves.points(result)[-1].epochs == pytest.approx(60 * 13 / 1_523)


def stepped(step: int, elapsed: float) -> Stepped:
    return Stepped(step, 0.5, step / 10, 3.0, 1.0, 1.0, 100.0, elapsed, 1.0)


def test_our_validations_are_taken_off_the_clock(monkeypatch):
    clock = Clock(monkeypatch)
    none: Any = None
    model = make_model(MODERN)
    curve = quality_runs.OurCurve()
    curve(Started(LIKE, none, ROOT, 17, "", 10.0, {}, 0))
    elapsed = 0.0  # as `train` has it: validations and all
    for step in (1, 2):
        clock.now += 30
        elapsed += 30
        curve(stepped(step, elapsed))
        clock.now += 500  # scoring, and writing a checkpoint
        score = Score(397 * math.log(50.0 / step), 397, 397, 2_003)
        curve(Validated(step, 0.5, score, 3.0, True, elapsed, model, none))
        elapsed += 500
        model.norm.weight.data += 1  # it learns on
    assert [moment.minutes for moment in curve.moments] == [0.5, 1.0]
    assert [moment.step for moment in curve.moments] == [1, 2]
    norms = [moment.weights["norm.weight"] for moment in curve.moments]
    assert torch.equal(norms[0] + 1, norms[1])


def test_our_curve_is_scored_in_float32_whatever_it_was_learned_in(tmp_path):
    data = write_corpus(tmp_path / "text.txt")
    config = run_config(data, steps=7, validations=1, precision="bfloat16")
    curve, seen = quality_runs.OurCurve(), Recorder()

    def both(event: Any) -> None:
        curve(event)
        seen(event)

    run = train(config, tmp_path / "run", both)
    text = closed_vocabulary(config.data)
    (point,) = quality_runs.scored(curve.moments, run.config, text)
    stream = prepare(open_corpus(config.data), "valid", run.tokenizer)
    exact = evaluate(run.model, stream, run.tokenizer.eos_id).token_perplexity
    (validated,) = seen.of(Validated)
    assert point.perplexity == exact
    assert point.perplexity != validated.score.token_perplexity
    assert (point.steps, point.tokens) == (7, 7 * config.batch_size * T)
    assert point.epochs == point.tokens / len(text.train)


def test_a_pace_is_the_median_batch_times_the_batches_of_an_epoch(monkeypatch):
    clock = Clock(monkeypatch)

    class Uneven:
        n_parameters, batches_per_epoch = 7, 300

        def __init__(self) -> None:
            self.settings: dict[str, Any] = {}
            self.n_steps = 0

        def step(self, share: float) -> None:
            self.n_steps += 1
            warm = self.n_steps > quality_runs.WARM_UP_BATCHES
            clock.now += (9.0 if self.n_steps % 5 == 0 else 2.0) if warm else 50.0

    result = quality_runs.run_pace(Uneven(), batches=11)
    assert result["epoch_minutes"] == 300 * 2.0 / 60
    assert result["published_minutes"] == 40 * 300 * 2.0 / 60
    assert result["extrapolated"]
    assert result["mean_seconds_per_batch"] > 2.0


# The curves


def curve_of(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [asdict(Point(minutes, figure, 1, 1, 1.0)) for minutes, figure in pairs]


def result_of(name: str, ours: bool, *pairs: tuple[float, float]) -> dict[str, Any]:
    contestant = name.partition("@")[0]
    return {
        "name": name,
        "contestant": contestant,
        "ours": ours,
        "kind": "curve",
        "budget_minutes": 10.0,
        "curve": curve_of(*pairs),
    }


def test_minutes_are_exact_where_perplexity_is_a_power_of_time():
    curve = [Point(m, 900 * m**-0.7, 1, 1, 1.0) for m in (2.0, 5.0, 11.0)]
    for minutes in (2.0, 3.1, 5.0, 7.3, 11.0):
        assert curves.minutes_to(curve, 900 * minutes**-0.7) == pytest.approx(minutes)
    assert curves.minutes_to(curve, 5_000) == 2.0  # of the time before nothing is known
    assert curves.minutes_to(curve, 1.0) is None


def test_minutes_are_those_of_the_first_time():
    curve = [Point(m, figure, 1, 1, 1.0) for m, figure in ((1, 90), (2, 50), (3, 70), (4, 40))]
    assert curves.minutes_to(curve, 50) == 2


def test_ratios_join_seeds_and_leave_out_what_only_some_reached():
    results = [
        result_of("a@1", True, (1, 300), (2, 100)),
        result_of("a@2", True, (1, 300), (4, 100)),
        result_of("a@3", True, (1, 300), (8, 100)),
        result_of("lucky@1", True, (1, 100)),
        result_of("lucky@2", True, (1, 101)),
        result_of("peer@1", False, (10, 200), (20, 100), (30, 120)),
        result_of("better@1", False, (5, 50)),
    ]
    for result in results:
        if result["contestant"] in ("peer", "better"):
            result["name"] = result["contestant"]
    found = {ratio.goal.peer: ratio for ratio in curves.ratios(results)}
    peer = found["peer"]
    assert (peer.goal.perplexity, peer.goal.minutes) == (100, 20)  # its best, not its last
    assert (peer.ours, peer.minutes, peer.ratio, peer.n_seeds) == ("a, 10 min", 4, 5, 3)
    assert peer.n_presets == 2
    assert found["better"].ours is None
    assert math.isnan(found["better"].ratio)


def test_of_several_runs_of_a_peer_the_best_counts():
    results = [
        result_of("peer@1", False, (10, 200), (20, 90)),
        result_of("peer@2", False, (10, 80), (20, 85)),
        result_of("a@1", True, (1, 300), (5, 80)),
    ]
    (ratio,) = curves.ratios(results)
    assert (ratio.goal.perplexity, ratio.goal.minutes, ratio.goal.n_runs) == (80, 10, 2)
    assert ratio.ratio == 2
    assert "(measured, peer@2, the best of 2 runs)" in quality.spoken_ratio(ratio)


def test_results_of_other_texts_or_threads_are_not_mixed():
    rates = {"float32": 190, "bfloat16": 400}
    machine = {"threads": 2, "cores": 4}
    one = {"data": "wikitext-2", "hardware": machine, "matrix_gflops": rates}
    assert curves.require_alike([one, one, {"kind": "curve"}]) == []
    with pytest.raises(UserError, match="results differ in data"):
        curves.require_alike([one, {**one, "data": "python-docs"}])
    for name in machine:
        with pytest.raises(UserError, match=f"results differ in {name}"):
            curves.require_alike([one, {**one, "hardware": {**machine, name: 1}}])
    slower = {**one, "matrix_gflops": {"float32": 189, "bfloat16": 360}}
    (warning,) = curves.require_alike([one, slower])
    assert "bfloat16 ran at 360 to 400 GFLOP/s" in warning


def test_a_compiler_that_is_cold_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setitem(CppCodeCache.cache, "loaded", None)
    with quality_runs.cold_compiler():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder.is_dir()
        assert not list(folder.iterdir())
        assert not CppCodeCache.cache
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_a_pace_becomes_a_goal_that_is_marked_as_extrapolated():
    pace = {
        "kind": "pace",
        "name": "lstm-pace",
        "contestant": "lstm",
        "ours": False,
        "epoch_minutes": 13.0,
        "published": {"valid": 106.0, "epochs": 40},
    }
    (ratio,) = curves.ratios([pace, result_of("a@1", True, (1, 212), (10, 106))])
    assert ratio.goal.extrapolated
    assert (ratio.goal.minutes, ratio.ratio) == (520, pytest.approx(52))
    assert "extrapolated" in quality.spoken_ratio(ratio)


# The whole


def toml_of(tmp_path: Path, kind: str = "wikitext") -> Path:
    path = tmp_path / "small.toml"
    path.write_text(
        f"""
data = "{write_corpus(tmp_path / "text.txt")}"
minutes = 0.02
batch_size = 5
validations = 2
compile = "off"
precision = "float32"
[tokenizer]
kind = "{kind}"
vocab_size = 0
[model]
context_length = 11
d_model = 12
n_heads = 2
n_layers = 1
""",
        "utf-8",
    )
    return path


def test_quality_from_the_runs_to_the_picture(tmp_path, checkouts, capsys):
    config = toml_of(tmp_path)
    out, drawn = tmp_path / "results", tmp_path / "quality.svg"
    shared = ["--data", str(tmp_path / "text.txt"), "--out", str(out), "--threads", "1"]
    named = [f"--nanogpt={checkouts['nanogpt']}"]
    named += [f"--pytorch-examples={checkouts['pytorch_examples']}"]
    # Two seconds, so that our few parameters learn more than nothing.
    quality.main(["run", str(config), "--validations", "3", "--minutes", "0.03", *shared])
    peer = ["run", "nanogpt", "lstm", "--minutes", "0.005", "--validations", "2"]
    peer += ["--rate", "3e-3", "--seed", "7"]
    quality.main([*peer, "--like", str(config), "--compile", "off", *named, *shared])
    quality.main(["pace", "lstm", "--batches", "3", *named, *shared])
    capsys.readouterr()
    quality.main(["report", "--draw", "--picture", str(drawn), "--out", str(out)])

    nanogpt, lstm = "nanogpt-0.005min-rate0.003-seed7", "lstm-0.005min-seed7"
    names = {"small-0.03min-seed1", nanogpt, lstm, "lstm-pace"}
    assert {path.stem for path in out.glob("*.json")} == names
    ours = json.loads((out / "small-0.03min-seed1.json").read_text("utf-8"))
    assert len(ours["curve"]) == 3
    # It learned as long as its preset lets it, though it was scored once more.
    assert ours["budget_minutes"] == 0.03
    assert ours["curve"][-1]["minutes"] < 0.045
    assert not any("/" in word for word in ours["command"].split()[2:])
    settings = json.loads((out / f"{nanogpt}.json").read_text("utf-8"))["settings"]
    assert (settings["rate"], settings["seed"]) == (3e-3, 7)
    assert ours["data"] == f"text.txt: {360 * 6:,} words, valid 120"  # five and <eos> a line
    told = capsys.readouterr().out
    assert "lstm, 40 epochs: 105.97" in told
    root = ET.parse(drawn).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"small-0.03min-seed1", nanogpt, lstm} <= texts
    assert "lstm, 40 epochs (extrapolated)" in texts
    assert "prefers-color-scheme:dark" in drawn.read_text("utf-8")


def test_names_of_curves_that_end_alike_do_not_lie_upon_one_another():
    from quality_picture import LINE_HEIGHT, picture

    alike = [result_of(f"{name}@1", True, (1, 300), (9, 99 + i)) for i, name in enumerate("abc")]
    svg = picture(alike)
    places = [float(y) for y in re.findall(r'class="ours-name" x="[\d.]+" y="([\d.]+)"', svg)]
    assert len(places) == 3
    assert all(b - a >= LINE_HEIGHT for a, b in pairwise(places))
    assert picture(alike) == svg  # the same bytes every time


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["run", "nanogpt", "--minutes", "1", "--like", "mini"], "--nanogpt DIR"),
        (["run", "nanogpt", "--minutes", "1", "--like", "mini", "--nanogpt", "no"], "no/model.py"),
        (["run", "lstm"], "give --minutes"),
        (["run", "lstm", "--minutes", "1"], "--pytorch-examples DIR"),
        (["run", "nanogtp", "--minutes", "1"], "did you mean nanogpt?"),
        (["run", "mini", "--minutes", "1"], "cuts its words otherwise"),
        (["report", "--out", "nowhere"], "holds no result"),
    ],
)
def test_mistakes_are_one_line(tmp_path, argv, what):
    given = [] if argv[0] == "report" else ["--data", str(write_corpus(tmp_path / "text.txt"))]
    with pytest.raises(SystemExit) as raised:
        quality.main([*argv, *given])
    message = str(raised.value)
    assert message.startswith("error: ")
    assert what in message
    assert "\n" not in message


def test_a_budget_is_stretched_by_the_validations_that_a_preset_does_not_have(
    tmp_path, monkeypatch
):
    clock, n_scored = Clock(monkeypatch), []

    def scored(model: Any, ids: Any, eos_id: int) -> None:
        assert torch.is_autocast_enabled("cpu")  # as `train` will, where bfloat16 is faster
        n_scored.append(len(ids))
        clock.now += 3.0 * len(ids)

    monkeypatch.setattr(quality_runs, "our_nats", scored)
    rates = {"float32": 1.0, "bfloat16": 2.0}
    monkeypatch.setattr(quality_runs, "matrix_rates", lambda device: rates)
    config = replace(
        load_preset("mini"),
        data=str(write_corpus(tmp_path / "text.txt")),
        tokenizer=TokenizerConfig("wikitext", 0),
        model=LIKE.model,
        minutes=3.0,
        validations=4,
    )
    text = closed_vocabulary(config.data)
    assert quality_runs.stretched(config, text, 2) == config
    more = quality_runs.stretched(config, text, 9)
    n_valid = 20 * 6  # 5 % of 400 lines, five words and <eos> each
    assert n_scored[-1] == n_valid // 8
    assert more.validations == 9
    assert more.minutes == pytest.approx(3.0 + 5 * 3.0 * n_valid / 60)


def test_peers_are_refused_by_name():
    with pytest.raises(UserError, match=r"lstn .*did you mean lstm"):
        peers.make_peer("lstn", words(), LIKE, {})


# Vocabularies


def test_pieces_and_words_are_compared_by_what_a_word_costs(tmp_path):
    data = write_corpus(tmp_path / "text.txt")
    rows = {}
    for kind, size in (("wikitext", 61), ("bpe", 300)):
        config = run_config(data, steps=1, validations=1, tokenizer=TokenizerConfig(kind, size))
        rows[kind] = vocabulary.measured(train(config, tmp_path / kind))
    n_words = 20 * 6  # valid: 5 % of 400 lines, five words and a line end each
    for row in rows.values():
        nats = row["nats"] + row["naming_nats"]
        assert row["comparable_perplexity"] == pytest.approx(math.exp(nats / n_words))
    assert rows["wikitext"]["naming_nats"] > 0  # a cut vocabulary pays for what it leaves out
    assert (rows["bpe"]["naming_nats"], rows["bpe"]["n_hidden_words"]) == (0, 0)
    assert rows["bpe"]["tokens"] > n_words

    config = run_config(data)
    assert vocabulary.words_per_token(config, "wikitext", 61) == 1
    pieces = vocabulary.words_per_token(config, "bpe", 300)
    assert pieces == pytest.approx(n_words / rows["bpe"]["tokens"], rel=0.1)


def test_pieces_get_the_full_softmax_since_they_are_not_numbered_by_frequency():
    config = replace(LIKE, model=replace(LIKE.model, output="adaptive"))
    assert vocabulary.model_for(config, "bpe").model == replace(config.model, output="full")
    assert vocabulary.model_for(config, "wikitext") == config
