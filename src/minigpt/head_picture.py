"""The picture of what each head does: a row a head, a column a score, its role and its worth.

In: numbers and names. Out: a matplotlib figure. What the numbers mean, `head_scores` says.

R rows, one a head · C columns, one a score
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Orange frames what gave a head its role; red is a head without which the loss is lower.
_INK, _FAINT, _BAR_COLOR, _FRAME, _HARM = "#22262e", "#666a73", "#3b8ac4", "#e8710a", "#b3261e"
# In inches: a row, a column, and what stands around the table.
_ROW, _COLUMN, _LEFT, _ROLE, _BAR, _TOP, _BOTTOM = 0.24, 0.74, 0.75, 1.75, 2.6, 1.55, 0.95


def draw(
    title: str,
    labels: Sequence[str],
    columns: Sequence[str],
    shares: Tensor,
    roles: Sequence[str],
    change: Tensor,
    interval: Tensor,
) -> "Figure":
    """Draw all heads.

    labels, roles      R each, beside a row; where a role is the name of a column, that is framed
    columns            C names
    shares             (R, C) numbers from 0 to 1, or NaN where there is none
    change, interval   (R,) nats per token and how far to each side; NaN draws no bar
    """
    from matplotlib.figure import Figure

    n_rows, n_columns = shares.shape
    width = _LEFT + n_columns * _COLUMN + _ROLE + _BAR + 0.3
    height = _TOP + n_rows * _ROW + _BOTTOM
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")

    def axes(left: float, wide: float) -> "Axes":
        where = (left / width, _BOTTOM / height, wide / width, n_rows * _ROW / height)
        return figure.add_axes(where)

    _draw_shares(axes(_LEFT, n_columns * _COLUMN), labels, columns, shares, roles)
    bars = axes(_LEFT + n_columns * _COLUMN + _ROLE, _BAR)
    _draw_change(bars, change, interval)
    for i, role in enumerate(roles):
        left, middle = _LEFT + n_columns * _COLUMN + 0.12, _BOTTOM + (n_rows - i - 0.5) * _ROW
        figure.text(
            left / width, middle / height, role, fontsize=8.5, color=_INK, va="center_baseline"
        )
    for up, text, size, color in (
        (height - 0.36, title, 14, _INK),
        (height - 0.62, "Percent. Framed: what gave a head its role.", 9, _FAINT),
        (0.2, "even: an even look; for sentences (→), the best fixed place.", 9, _FAINT),
    ):
        figure.text(0.15 / width, up / height, text, fontsize=size, color=color)
    return figure


def _draw_shares(
    axes: "Axes",
    labels: Sequence[str],
    columns: Sequence[str],
    shares: Tensor,
    roles: Sequence[str],
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    n_rows, n_columns = shares.shape
    blues = colormaps["Blues"].with_extremes(bad="white")
    extent = (0, n_columns, n_rows, 0)
    axes.imshow(shares.numpy(), cmap=blues, vmin=0, vmax=1, extent=extent, aspect="auto")
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row, column in shares.isfinite().nonzero().tolist():
        share = float(shares[row, column])
        color = "white" if share > 0.55 else _INK
        where = (column + 0.5, row + 0.5)
        axes.text(
            *where, f"{100 * share:.0f}", color=color, fontsize=8, ha="center", va="center_baseline"
        )
    for row in (i for i, role in enumerate(roles) if role in columns):
        corner = (columns.index(roles[row]), row)
        frame = Rectangle(corner, 1, 1, fill=False, edgecolor=_FRAME, linewidth=2)
        axes.add_patch(frame)
    axes.set_xticks(
        [i + 0.5 for i in range(n_columns)], columns, rotation=35, ha="left", fontsize=9, color=_INK
    )
    axes.set_yticks([i + 0.5 for i in range(n_rows)], labels, fontsize=8.5, color=_INK)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)


def _draw_change(axes: "Axes", change: Tensor, interval: Tensor) -> None:
    """Draw a bar a head, with its interval to each side."""
    rows = [i for i in range(len(change)) if bool(change[i].isfinite())]
    colors = [_HARM if change[i] < 0 else _BAR_COLOR for i in rows]
    axes.barh(
        [i + 0.5 for i in rows],
        [float(change[i]) for i in rows],
        xerr=[float(interval[i]) for i in rows],
        height=0.62,
        color=colors,
        error_kw={"elinewidth": 1, "ecolor": _INK},
    )
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.set_ylim(len(change), 0)
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="x", labelsize=8, colors=_INK)
    axes.set_xlabel(
        "loss without the head: nats per token more\n(red: less), with 95 % intervals",
        fontsize=8.5,
        color=_FAINT,
    )
