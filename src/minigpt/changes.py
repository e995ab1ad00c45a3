"""What may change when a run goes on: settings that leave what it has learned as it was.

In: the config of a run and the one wished for. Out: the lines to tell of the changes, or one
`UserError` for those that would make it another run.
"""

from typing import Any

from minigpt.config import BUDGETS, Config, to_dict
from minigpt.errors import UserError

# The others decide how weights come about: a run that changed them half way would be no run that
# anybody can repeat.
_HARMLESS = {
    *BUDGETS,
    "data",  # the same text at another place: its hash is compared
    "device",
    "threads",
    "validations",
    "patience",
    "save_minutes",
    "keep_checkpoints",
    "log",
}
# The numbers stay right, but a sum may be rounded otherwise.
_ROUNDING = {"device", "threads"}


def changed_settings(was: Config, wished: Config) -> list[str]:
    """Return a line for each setting that a resumed run is to change.

    Raises UserError, naming the setting, for one that may not change, and for a budget that is
    counted otherwise or is smaller than it was.
    """
    old, new = _flat(to_dict(was)), _flat(to_dict(wished))
    changed = [name for name in old if old[name] != new[name]]
    for name in changed:
        if name not in _HARMLESS and not name.startswith("sampling."):
            raise UserError(
                f"{name} is {new[name]} but the run was begun with {old[name]}: leave it out, or "
                "train a new run"
            )
    for name in BUDGETS:
        if name in changed and (old[name] is None or new[name] is None):
            counted = next(budget for budget in BUDGETS if old[budget] is not None)
            raise UserError(
                f"{name} is {new[name]} but the run counts its budget in {counted} "
                f"({old[counted]:g}): give more {counted}"
            )
        if name in changed and new[name] < old[name]:
            raise UserError(
                f"{name} is {new[name]:g}, less than the {old[name]:g} that the run has: give "
                "more, or leave it out"
            )
    return [_line(name, old[name], new[name]) for name in changed]


def _line(name: str, old: Any, new: Any) -> str:
    line = f"{name} is {new} now and was {old}"
    if name in BUDGETS:
        return f"{line}: the rates follow the longer budget from here on"
    if name in _ROUNDING:
        return f"{line}: sums may be rounded otherwise from here on"
    return line


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree under their whole names, such as model.d_ff."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= _flat(value, f"{path}{name}.")
        else:
            leaves[f"{path}{name}"] = value
    return leaves
