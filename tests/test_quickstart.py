"""Quickstart: the whole way from data to a picture, with or without WikiText-2, and once more."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minigpt import cli, quickstart
from minigpt.config import Config, load_preset
from minigpt.corpus import available_offline
from minigpt.errors import UserError


@pytest.fixture(autouse=True)
def small_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train a tiny model in an empty folder."""

    def tiny_preset(name: str) -> Config:
        config = load_preset(name)
        model = dataclasses.replace(
            config.model, context_length=24, d_model=32, n_heads=2, n_layers=1, d_ff=48
        )
        return dataclasses.replace(config, model=model, threads=1, precision="float32")

    monkeypatch.setattr(quickstart, "load_preset", tiny_preset)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_wikitext(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the disk nor on the net."""
    monkeypatch.setattr(quickstart, "available_offline", lambda name: False)

    def no_network(name: str) -> None:
        if name == "wikitext-2":
            raise UserError("wikitext-2 cannot be downloaded: supply it")
        return open_corpus(name)

    open_corpus = quickstart.open_corpus
    monkeypatch.setattr(quickstart, "open_corpus", no_network)


@pytest.mark.usefixtures("without_wikitext")
def test_the_whole_way_without_network_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("quickstart-1", "quickstart-2"):
        run = Path("runs", folder)
        assert cli.main(["quickstart", "--minutes", "0.04"]) == 0
        out, _ = capsys.readouterr()
        lines = out.splitlines()
        assert "python-docs" in lines[0]
        assert "WikiText-2" in lines[0]
        assert "python-docs" in lines[-1]
        assert "per word" in out
        assert "count of words" in out  # the convention of the figure
        told, _, rest = out.partition("words):\n\n")
        assert int(told.split("(")[-1]) >= 60
        text = rest.split("\n\nWhich word looks at which")[0]
        assert len(text.split()) >= 60
        assert "<unk>" not in text
        assert (run / "attention.png").read_bytes().startswith(b"\x89PNG")
        assert f"minigpt generate {run}" in out
        assert (run / "report.json").is_file()


@pytest.mark.usefixtures("without_wikitext")
def test_the_next_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    assert cli.main(["quickstart", "--minutes", "0.02", "--out", "first"]) == 0
    out, _ = capsys.readouterr()
    commands = [line.strip() for line in out.splitlines() if line.startswith("  minigpt ")]
    assert len(commands) >= 4
    for command in commands:
        program, name, *rest = shlex.split(command)
        assert program == "minigpt"
        if name != "train":  # minutes, not seconds; their flags are tried
            assert cli.main([name, *rest]) == 0, command
        else:
            assert cli.main([name, *rest, "--help"]) == 0, command


def test_wikitext_is_taken_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[Config] = []

    def stop(config: Config, out: Path) -> None:
        chosen.append(config)
        raise UserError("far enough: here it would train")

    monkeypatch.setattr(quickstart, "available_offline", lambda name: name == "wikitext-2")
    monkeypatch.setattr(quickstart, "_train", stop)
    assert cli.main(["quickstart", "--minutes", "2.5", "--seed", "7"]) == 2
    assert capsys.readouterr().out.splitlines()[0] == "Data: WikiText-2."
    (config,) = chosen
    assert (config.data, config.minutes, config.seed) == ("wikitext-2", 2.5, 7)
    assert config.tokenizer.kind == "wikitext"


def test_a_slow_download_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "available_offline", lambda name: False)
    monkeypatch.setattr(quickstart, "open_corpus", lambda name: time.sleep(5))
    monkeypatch.setattr(quickstart, "SECONDS_TO_DOWNLOAD", 0.1)
    began_at = time.monotonic()
    assert not quickstart._can_have("wikitext-2")
    assert time.monotonic() - began_at < 4


def test_a_folder_that_exists_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    assert cli.main(["quickstart", "--out", "mine"]) == 2
    assert capsys.readouterr().err.startswith("error: --out mine exists: ")


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_minutes_that_cannot_be(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quickstart", "--minutes", minutes]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "minutes is" in err


def test_text_ends_with_a_sentence() -> None:
    words = [f" w{i}" if i % 7 else " end ." for i in range(1, 200)]
    text = "".join(quickstart._whole_sentences(words))
    assert text.endswith(".")
    assert 60 <= len(text.replace(".", "").split()) < 90
    assert len(list(quickstart._whole_sentences([" w"] * 200))) == 90


@pytest.mark.slow
@pytest.mark.skipif(not available_offline("wikitext-2"), reason="WikiText-2 is not on this disk")
def test_under_five_minutes_on_wikitext(tmp_path: Path) -> None:
    began_at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "minigpt", "quickstart"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MINIGPT_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began_at < 300
    assert "WikiText-2" in done.stdout.splitlines()[0]
    assert "<unk>" not in done.stdout.split("words):")[1]
