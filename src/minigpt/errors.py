"""Mistakes of the user: one line that says what, which value and what to do."""

import difflib
from collections.abc import Iterable

# Longer than a line with two long paths; a value in it may be a megabyte.
MOST_CHARACTERS = 4_000


class UserError(ValueError):
    """A mistake that its maker can mend: one line that says what, which value and what to do.

    The command line prints it as `error: …` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        # What it quotes, a key or a path, may be a stranger's: with line ends of its own, a
        # megabyte long, or made to control a terminal or to turn the direction of writing.
        line = " ".join(message.splitlines())
        if len(line) > MOST_CHARACTERS:  # what to do stands at the end
            line = f"{line[: MOST_CHARACTERS // 2]} … {line[-MOST_CHARACTERS // 2 :]}"
        plain = (c if c.isprintable() or c.isspace() else ascii(c)[1:-1] for c in line)
        super().__init__("".join(plain))


def require(condition: bool, message: str) -> None:
    """Raise UserError with message unless condition holds."""
    if not condition:
        raise UserError(message)


def closest(name: str, choices: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the choice that looks most like `name`, or nothing."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
