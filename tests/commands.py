"""Commands run in this process, as those tests do that ask what a user reads."""

import pytest

from minigpt import cli


def succeeded(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must succeed and has nothing to note; return what it prints."""
    capsys.readouterr()
    status = cli.main(argv)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def failed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail as a user's mistake does; return its one line."""
    capsys.readouterr()
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert ": " in err.removeprefix("error: ")  # what and which value: what to do
    return err
