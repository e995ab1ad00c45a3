"""Mistakes of the user: one line that says what, which value and what to do."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that its maker can mend: one line that says what, which value and what to do.

    The command line prints it as `error: …` and exits with status 2.
    """


def require(condition: bool, message: str) -> None:
    """Raise UserError with message unless condition holds."""
    if not condition:
        raise UserError(message)


def closest(name: str, choices: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the choice that looks most like `name`, or nothing."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
