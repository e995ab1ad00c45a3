"""The run that comes with the package: small, whole, with its card, and every command takes it."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import minigpt
from commands import failed, succeeded
from minigpt import cli
from minigpt.checkpoint import Run
from minigpt.errors import UserError
from minigpt.measurement import measure
from minigpt.run_folder import DEMO

MOST_BYTES = 12_000_000
TEXT = "The river flows into the sea ."


@pytest.fixture(scope="module")
def run() -> Run:
    return minigpt.load("demo")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files() -> list[Path]:
    return [path for path in DEMO.rglob("*") if path.is_file()]


def test_the_demo_is_small_and_in_half_precision() -> None:
    assert sum(path.stat().st_size for path in files()) <= MOST_BYTES
    (weights,) = (path for path in files() if path.suffix == ".safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.float16}


def test_the_package_takes_all_of_it_along() -> None:
    import tomllib

    root = Path(__file__).resolve().parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["minigpt"]
    taken = {path for pattern in patterns for path in DEMO.parent.glob(pattern)}
    assert set(files()) <= taken


def test_the_card_says_what_it_is_and_under_which_licence(run: Run) -> None:
    card = (DEMO / "README.md").read_text("utf-8")
    n_weights = sum(weight.numel() for weight in run.model.parameters())
    assert f"{n_weights:,} weights" in card
    assert f"{run.tokenizer.vocab_size:,} most frequent" in card
    assert "`minigpt train demo" in card
    assert "CC BY-SA" in card
    assert "CC BY-SA 4.0" in (DEMO / "LICENSE").read_text("utf-8")


def test_it_was_made_by_the_preset_of_its_name(run: Run) -> None:
    from minigpt.config import load_preset

    preset = load_preset("demo")
    assert run.config.model == preset.model.resolved(run.tokenizer.vocab_size)
    assert run.config.sampling == preset.sampling


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "demo", "--prompt", "The river", "--max-new-tokens", "9"],
        ["generate", "demo", "--prompt", "The river", "--json", "--num-samples", "2"],
        ["generate", "demo", "--prompt", "The river", "--num-beams", "2"],
        ["generate", "demo", "--prompt", "The river", "--int8"],
        ["tokenize", "demo", TEXT],
        ["info", "demo"],
        ["check", "demo"],
    ],
)
def test_commands_take_it_by_its_name(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert succeeded(argv, capsys).strip()
    assert list(tmp_path.iterdir()) == []


def test_attention_and_evaluation_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text(f"{TEXT}\n" * 9, "utf-8")
    assert cli.main(["attention", "demo", TEXT, "--out", "map.html"]) == 0
    assert Path("map.html").stat().st_size > 1000
    assert cli.main(["evaluate", "demo", "--text", "text.txt", "--json"]) == 0
    assert "nats" in capsys.readouterr().out


def test_it_cannot_be_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be resumed" in failed(["train", "--resume", "demo"], capsys)


def test_a_run_of_that_name_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    Path("demo").mkdir()  # no run yet
    assert "10,000" in succeeded(["info", "demo"], capsys)
    Path("demo/config.json").write_text("{}", "utf-8")
    assert "demo" in failed(["info", "demo"], capsys)


@pytest.mark.parametrize("out", ["demo/map.html", "demo/config.html", str(DEMO / "map.html")])
def test_nothing_is_written_where_it_would_hide_or_change_it(
    out: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "write elsewhere" in failed(["attention", "demo", TEXT, "--out", out], capsys)
    assert list(tmp_path.iterdir()) == []
    assert not (DEMO / "map.html").exists()


@pytest.mark.parametrize("prompt", ["qqzzx xxyyq", "Привет мир", "😊 hi", "<unk>"])
def test_a_blank_stands_behind_a_prompt_of_unknown_words(run: Run, prompt: str) -> None:
    assert minigpt.generate(run, prompt, max_new_tokens=3, seed=3)[:1] in " .,;\n"


def test_a_prompt_that_ends_in_a_blank_gets_no_second(run: Run) -> None:
    plain = minigpt.generate(run, "The river", max_new_tokens=9)
    assert plain.startswith(" ")
    assert minigpt.generate(run, "The river ", max_new_tokens=9) == plain[1:]
    assert "".join(["The river ", plain[1:]]) == f"The river{plain}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": float("inf")}, "max_new_tokens is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": True}, "top_k is True"),
        ({"tempratur": 1}, "did you mean sampling.temperature"),
        ({"prompt": 5}, "the prompt is 5"),
        ({"prompt": "a\ud800b"}, "the prompt is"),
    ],
)
def test_wrong_settings_from_python_are_told_in_one_line(
    run: Run, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        minigpt.generate(run, **settings)


def test_what_it_writes_reads_like_a_text(run: Run) -> None:
    from minigpt.generate import continuations

    written = continuations(run.model, run.tokenizer, ["The", "In 1990,", ""], run.config.sampling)
    for one in written:
        assert re.search(r"<unk>|@.@| [,.;:!?)]", one.text) is None, one.text
        assert len(one.text.split()) > 40


@pytest.mark.usefixtures("wikitext2")
@pytest.mark.slow
def test_its_card_has_its_perplexity(run: Run) -> None:
    card = (DEMO / "README.md").read_text("utf-8")
    torch.set_num_threads(2)
    for split in ("valid", "test"):
        found = measure(run, split).to_json()
        assert f"{found['comparable_perplexity']:.1f} on {split}" in card


@pytest.mark.slow
def test_the_first_word_comes_within_two_and_a_half_seconds() -> None:
    argv = [sys.executable, "-m", "minigpt", "generate", "demo", "--prompt", "The river"]
    seconds = []
    for _ in range(3):
        began_at = time.perf_counter()
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            read = b""
            while len(read.split()) < 4:  # the prompt, a word, and what tells that it is whole
                read += process.stdout.read(1)
            seconds.append(time.perf_counter() - began_at)
            process.kill()
    assert min(seconds) < 2.5, seconds
