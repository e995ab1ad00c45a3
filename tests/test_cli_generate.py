"""The command `generate`: what is drawn, where prompts come from, and what a mistake is told."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import minigpt
from commands import failed, succeeded
from minigpt import cli, one_row
from minigpt.errors import UserError
from minigpt.model import MiniGPT
from minigpt.one_row import Int8Linear
from minigpt.prompt_loop import NAMES, obey
from minigpt.sampling import USUAL, Sampling

LINES = ["The old mill 's wheel , built in 1889 , was well @-@ known to the city ."] * 40
TINY = "--threads 1 --compile off --precision float32 --model.context-length 8 --model.d-model 16"
TINY += " --model.n-heads 2 --model.n-layers 1 --model.d-ff 24 --batch-size 3 --validations 1"
TINY += " --tokenizer.kind wikitext --tokenizer.vocab-size 0"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGPT_CACHE", str(folder / "cache"))
        argv = f"train mini --data {folder / 'text.txt'} --steps 3 --out {folder / 'run'} {TINY}"
        assert cli.main(argv.split()) == 0
        yield folder / "run"


class Terminal(io.StringIO):
    """An input that somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def objects(text: str) -> list[Any]:
    """Return the JSON objects that stand behind each other in a text."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        one, end = decoder.raw_decode(text, at)
        found.append(one)
        at = end + 1
    return found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temperature nan", "temperature is nan"),
        ("--temperature -1", "temperature is -1"),
        ("--top-k 0", "top_k is 0"),
        ("--top-p 0", "top_p is 0"),
        ("--top-p 1.5", "top_p is 1.5"),
        ("--min-p 2", "min_p is 2"),
        ("--typical-p 0", "typical_p is 0"),
        ("--repetition-penalty 0", "repetition_penalty is 0"),
        ("--presence-penalty inf", "presence_penalty is inf"),
        ("--no-repeat-ngram 0", "no_repeat_ngram is 0"),
        ("--max-new-tokens 0", "max_new_tokens is 0"),
        ("--min-new-tokens 200", "min_new_tokens is 200"),
        ("--num-samples 0", "num_samples is 0"),
        ("--num-samples 1000000000", "n_samples is 1000000000"),
        ("--num-beams 0", "num_beams is 0"),
        ("--num-beams 3 --num-samples 4", "num_samples is 4: a search among 3 beams"),
        ("--seed -1", "seed is -1"),
        ("--device gpu", "device gpu is not known"),
        ("--threads -1", "threads is -1"),
        ("--stop=", "stop string is empty"),
        ("--ban quokka", "token 'quokka' is not in the vocabulary"),
        ("--bias quokka=1", "token 'quokka' is not in the vocabulary"),
        ("--bias city", "--bias is city: it must be TOKEN=NUMBER"),
        ("--bias city=much", "--bias is city=much"),
        ("--bias city=nan", "--bias is city=nan"),
        ("--no-repeat-ngram 1 --max-new-tokens 60", "nothing is left to draw"),
    ],
)
def test_what_cannot_be(
    run_dir: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--prompt", "", "--json", *flags.split()]
    assert message in failed(argv, capsys)


def test_a_prompt_is_continued(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(run_dir), "--prompt", "the old city's", "--max-new-tokens", "20"]
    out = succeeded(argv, capsys)
    assert out.startswith("the old city's")
    for mark in ("<unk>", "@-@", " ,", " ."):
        assert mark not in out
    (told,) = objects(succeeded([*argv, "--json"], capsys))
    assert told["prompt"] + told["text"] + "\n" == out
    assert len(told["ids"]) == len(told["tokens"]) == len(told["log_probs"]) == 20
    assert all(log_prob < 0 for log_prob in told["log_probs"])
    assert told["ended"] == "length"
    assert succeeded([*argv, "--seed", "2"], capsys) != out
    (raw,) = objects(succeeded([*argv, "--raw", "--json"], capsys))
    assert raw["text"] == "".join(f" {token}" for token in raw["tokens"])


def test_several_texts_are_those_of_the_next_seeds(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--prompt", "The mill", "--max-new-tokens", "9"]
    alone = [succeeded([*argv, "--seed", str(seed)], capsys) for seed in (1, 2, 3)]
    assert succeeded([*argv, "--num-samples", "3"], capsys) == "---\n".join(alone)
    told = objects(succeeded([*argv, "--num-samples", "3", "--json"], capsys))
    assert [one["prompt"] + one["text"] + "\n" for one in told] == alone


def test_beams_come_with_their_scores(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(run_dir), "--prompt", "The mill", "--max-new-tokens", "5"]
    argv += ["--num-beams", "4", "--json"]
    (best,) = objects(succeeded(argv, capsys))
    three = objects(succeeded([*argv, "--num-samples", "3"], capsys))
    assert three[0] == best
    assert [one["score"] for one in three] == sorted((o["score"] for o in three), reverse=True)


def test_tokens_can_be_banned_and_favoured(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--prompt", "The", "--max-new-tokens", "60"]
    assert "mill" in succeeded([*argv, "--bias", "mill=3.5"], capsys)
    assert "mill" not in succeeded([*argv, "--bias", "mill=3.5", "--ban", "mill"], capsys)


def test_each_line_of_a_pipe_is_a_prompt(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", str(run_dir), "--max-new-tokens", "6"]
    expected = [succeeded([*argv, "--prompt", prompt], capsys) for prompt in ("The mill", "city")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("The mill\r\n\n  \ncity"))
    assert succeeded(argv, capsys) == "---\n".join(expected)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The mill\ncity\n"))
    told = objects(succeeded([*argv, "--json"], capsys))
    assert [one["prompt"] + one["text"] + "\n" for one in told] == expected
    bad = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", bad)
    assert "the input is not UTF-8" in failed(argv, capsys)


def test_without_any_input_a_text_begins_from_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", str(run_dir), "--max-new-tokens", "6"]
    expected = succeeded([*argv, "--prompt", ""], capsys)
    assert expected.strip()
    assert succeeded(argv, capsys) == expected
    monkeypatch.setattr(sys, "stdin", None)  # closed
    assert succeeded(argv, capsys) == expected


def test_at_a_terminal_prompts_are_asked_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", str(run_dir), "--max-new-tokens", "9"]
    first = succeeded([*argv, "--prompt", "The mill"], capsys)
    second = succeeded([*argv, "--prompt", "The mill", "--seed", "7"], capsys)
    typed = ["The mill", "/seed 7", "The mill", "/sed 3", "/top-p 9", "/seed", "quokka", "/help"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(typed) + "\n"))
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert out.count(first) == 1
    assert out.count(second) == 1
    assert out.count("> ") == len(typed) + 1
    assert "/sed is no command (did you mean seed?)" in err
    assert "top_p is 9.0: it must be" in err
    assert err.count("/seed 7\n") == 3
    assert "note: 1 of 1 tokens are not in the vocabulary" in err
    monkeypatch.setattr(sys, "stdin", Terminal("/quit\nThe mill\n"))
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == "> "


def test_ctrl_c_breaks_off_a_text_and_nothing_else(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["The mill", KeyboardInterrupt, "city", EOFError])

    def read(_: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    def broken_off(*_: object, **__: object) -> Iterator[str]:
        yield " and"
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    # By its full name the module hides behind the function of that name.
    monkeypatch.setattr(sys.modules["minigpt.generate"], "generate_text", broken_off)
    assert cli.main(["generate", str(run_dir)]) == 0
    assert capsys.readouterr().out == "The mill and\n\ncity and\n\n"


@pytest.mark.parametrize("name", NAMES)
def test_each_setting_can_be_shown_set_and_switched_off(name: str) -> None:
    flag = f"/{name.replace('_', '-')}"
    sampling, said = obey(flag, USUAL)
    assert sampling == USUAL
    assert said.startswith(f"{flag} ")
    changed, said = obey(f"{flag} 1", USUAL)
    assert getattr(changed, name) == 1
    assert said.removeprefix(f"{flag} ") in ("1", "1.0")
    if getattr(Sampling(), name) is None:
        assert obey(f"{flag} none", changed)[0] == USUAL


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temperature hot", "/temperature is hot: it must be a number"),
        ("/temperature none", "/temperature is none: it must be a number"),
        ("/top-k 1.5", "/top-k is 1.5: it must be a whole number"),
        ("/seed 1_0", "/seed is 1_0: it must be a whole number"),
        ("/temprature 1", "did you mean temperature"),
        ("/temperature -1", "temperature is -1.0: it must be at least 0"),
    ],
)
def test_a_command_that_cannot_be_obeyed(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        obey(line, USUAL)


def test_help_names_every_setting() -> None:
    _, said = obey("/help", USUAL)
    assert all(f"/{name.replace('_', '-')} " in said for name in NAMES)


def test_a_run_writes_as_its_settings_have_it_until_a_flag_says_otherwise(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, out = run_dir.parent / "text.txt", tmp_path / "own"
    flags = "--sampling.temperature 0 --sampling.max-new-tokens 7 --sampling.top-k none"
    argv = f"train mini --data {text} --steps 3 --out {out} {TINY} {flags}"
    assert cli.main(argv.split()) == 0
    (told,) = objects(succeeded(["generate", str(out), "--prompt", "The", "--json"], capsys))
    assert len(told["ids"]) == 7
    argv = ["generate", str(out), "--prompt", "The", "--json", "--seed", "2"]
    assert objects(succeeded(argv, capsys)) == [told]  # greedy: no seed changes it
    argv = ["generate", str(out), "--prompt", "The", "--json", "--max-new-tokens", "3"]
    (short,) = objects(succeeded(argv, capsys))
    assert short["ids"] == told["ids"][:3]
    assert minigpt.generate(minigpt.load(out), "The") == told["text"]
    assert minigpt.generate(minigpt.load(out), "The", max_new_tokens=3) == short["text"]


def test_int8_and_compiled_steps_write_too(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--prompt", "The", "--max-new-tokens", "9"]
    usual = succeeded(argv, capsys)
    wishes = []

    def compiled(model: MiniGPT) -> Any:
        wishes.append(any(isinstance(part, Int8Linear) for part in model.modules()))
        return model.next_logits

    monkeypatch.setattr(one_row, "compiled_step", compiled)
    assert cli.main([*argv, "--compile", "on"]) == 0
    out, err = capsys.readouterr()
    assert out == usual
    assert err == "compiling, which takes ten seconds and more; --compile off begins at once\n"
    assert wishes == [False]
    assert succeeded([*argv, "--int8"], capsys).startswith("The")
    assert wishes == [False]
    assert cli.main([*argv, "--int8", "--compile", "on"]) == 0
    assert wishes == [False, True]


@pytest.mark.parametrize("flag", ["--num-samples", "--num-beams"])
def test_a_compiled_step_is_for_one_text(
    run_dir: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--prompt", "The", "--compile", "on", flag, "2"]
    line = failed(argv, capsys)
    assert "--compile on is for one text at a time" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-samples", "0"], "num_samples is 0"),
        (["--num-beams", "0"], "num_beams is 0"),
        (["--num-beams", "2", "--num-samples", "3"], "finds as many texts at most"),
        (["--length-penalty", "nan"], "length_penalty is nan"),
        (["--frequency-penalty", "1e40"], "frequency_penalty is 1e+40"),
        (["--presence-penalty=-1e40"], "presence_penalty is -1e+40"),
        (["--repetition-penalty", "1e-40"], "repetition_penalty is 1e-40"),
        (["--bias", "the=1e40"], "--bias is the=1e40"),
        (["--compile", "on", "--stop", ""], "a stop string is empty"),
        (["--compile", "on", "--ban", "Nosuchword"], "Nosuchword"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_said_or_compiled(
    run_dir: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--prompt", "Nosuchword", "--max-new-tokens", "5000"]
    assert message in failed([*argv, *flags], capsys)


def test_a_mark_before_a_piped_text_is_no_part_of_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(run_dir), "--max-new-tokens", "3"]
    texts = []
    for mark in ("", "\ufeff"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{mark}The mill\n"))
        texts.append(succeeded(argv, capsys))
    assert texts[0] == texts[1]


def test_a_text_is_exact_in_a_pipe_and_harmless_at_a_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [
        "generate",
        str(run_dir),
        "--prompt",
        "the\x1b[2J\tmill\x9b\x07",
        "--max-new-tokens",
        "1",
    ]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("the\x1b[2J\tmill\x9b\x07")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(argv) == 0
    assert screen.getvalue().startswith("the␛[2J\tmill�␇")
