"""Attention in the terminal: one head as a map of characters, its tokens around it.

In: the weights (T, T) of a head and its tokens. Out: text with no line wider than asked for, and in
which nothing but colours of our own steers the terminal.

         the
     the ██↓city     The future is hidden, so row i ends at its own column. Right behind it
    city ░░▓▓↓was    stands the token of the column that begins below.

T sequence
"""

import math
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from torch import Tensor

from minigpt.attention_picture import printable

# A weight is one of six levels, evenly spaced in √weight; the root lifts small weights, for among
# 50 words an even look is 0.02 each, and should be seen. The colours are those of the picture, the
# nearest of the 256 that almost every terminal knows, each with one that can be read on it.
_SHADES = " ·░▒▓█"
_COLORS = ((231, 16), (153, 16), (110, 16), (67, 16), (25, 231), (17, 231))
_NARROWEST = 24  # columns; a terminal with fewer has no room for a map
_LABEL = 12  # columns that the token of a row takes at most
_LAST = 7  # columns kept free for the token on top of the last column


def heat_map(
    weights: Tensor, tokens: Sequence[str], title: str, *, width: int = 80, color: bool = False
) -> str:
    """Return a map of weights (T, T) with its title, its tokens and what its shades mean.

    width   columns to fill at most, 24 or more: what finds no room is left out, and told
    color   colour with escape sequences, for a terminal; otherwise shade with characters
    """
    width = max(width, _NARROWEST)
    labels = [printable(token) for token in tokens]
    beside = min(max(map(cell_len, labels)), _LABEL, width // 4)
    room = width - beside - 1 - _LAST
    side = next((side for side in (5, 2) if side * len(labels) <= room), 1)
    shown = labels[:room]  # each token takes a column at least
    lines = textwrap.wrap(title, width)
    lines += textwrap.wrap(
        "Each row is a token that looks; ↓ names the column below it, a token looked at.",
        width,
    )
    lines += ["", " " * (beside + 1) + _cut(f"↓{shown[0]}", width - beside - 1)]
    for i, label in enumerate(shown):
        cells = "".join(_cell(float(w), side, color) for w in weights[i, : i + 1])
        following = f"↓{shown[i + 1]}" if i + 1 < len(shown) else ""
        free = width - beside - 1 - side * (i + 1)
        row = _cut(label, beside)
        row = " " * (beside - cell_len(row)) + row
        lines.append(f"{row} {cells}{_cut(following, free)}".rstrip())
    if len(shown) < len(labels):
        left_out = (
            f"Left out: tokens {len(shown)} to {len(labels) - 1} of 0 to {len(labels) - 1}, "
            f"for which {width} columns have no room."
        )
        lines += ["", *textwrap.wrap(left_out, width)]
    return "\n".join([*lines, "", *_legend(width, color)])


def _cell(weight: float, side: int, color: bool) -> str:
    """Draw one weight `side` columns wide, with its figure where there is room for it."""
    level = _level(weight)
    figure = f"{weight:.2f}".removeprefix("0")[:3]
    if color:
        text = f" {figure} " if side == 5 else " " * side
        return _colored(text, level)
    return f"{_SHADES[level]}{figure} " if side == 5 else _SHADES[level] * side


def _level(weight: float) -> int:
    return round(math.sqrt(weight) * (len(_SHADES) - 1))


def _colored(text: str, level: int) -> str:
    background, foreground = _COLORS[level]
    return f"\x1b[48;5;{background};38;5;{foreground}m{text}\x1b[0m"


def _legend(width: int, color: bool) -> list[str]:
    """Say from which weight on each shade is drawn, in one line where that has room."""
    entries = []
    for level in range(1, len(_SHADES)):
        least = ((level - 0.5) / (len(_SHADES) - 1)) ** 2
        swatch = _colored("  ", level) if color else _SHADES[level]
        entries.append(f"{swatch} from {least:.2f}".replace("0.", "."))
    return [f"weight  {'  '.join(entries)}"] if width >= 71 else ["weight", *entries]


def _cut(text: str, width: int) -> str:
    """Return text in at most `width` columns; wide characters take two."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
