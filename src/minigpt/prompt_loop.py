"""Commands of the prompt loop: a line that begins with / changes how text is written.

In: the settings so far and such a line. Out: the settings from then on, and what to tell the user.
The loop itself stands in `cli_generate`, which reads and prints.
"""

import re
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from minigpt.errors import UserError, closest
from minigpt.sampling import Sampling

NAMES = [field.name for field in fields(Sampling)]
HELP = """Type the beginning of a text, and the model writes on. Ctrl-C breaks a text off.
/NAME shows a setting, /NAME VALUE changes it, /NAME none switches it off:
{settings}
/help this · /quit or Ctrl-D leave"""


def obey(line: str, sampling: Sampling) -> tuple[Sampling, str]:
    """Return the settings after a command, `/temperature 0.7`, and what there is to say.

    Raises UserError for a name or a value that cannot be, naming the nearest name.
    """
    spelt, _, value = line.removeprefix("/").strip().partition(" ")
    name, value = spelt.replace("-", "_").lower(), value.strip()
    if name in ("help", "?", ""):
        return sampling, HELP.format(settings="\n".join(_shown(n, sampling) for n in NAMES))
    if name not in NAMES:
        near = closest(name, [*NAMES, "help", "quit"])
        raise UserError(f"/{spelt} is no command{near}: /help shows them all")
    if value:
        changes: dict[str, Any] = {name: _number(name, value)}
        sampling = replace(sampling, **changes)
    return sampling, _shown(name, sampling)


def _shown(name: str, sampling: Sampling) -> str:
    value = getattr(sampling, name)
    return f"/{name.replace('_', '-')} {'none' if value is None else value}"


def _number(name: str, value: str) -> float | int | None:
    """Return the value of a setting, in the kind of number that the setting has."""
    (kinds,) = (str(field.type) for field in fields(Sampling) if field.name == name)
    if value.lower() == "none" and "None" in kinds:
        return None
    kind, spoken = (float, "a number") if "float" in kinds else (int, "a whole number")
    # Python itself would take "1_000" and "１"; a misprint is likelier.
    if re.fullmatch(r"[-+0-9.eE]+|nan|inf", value, re.ASCII):
        with suppress(ValueError):
            return kind(value)
    raise UserError(f"/{name.replace('_', '-')} is {value}: it must be {spoken}")
