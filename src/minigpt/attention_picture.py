"""Attention as a picture: one head large, with its tokens, beside all of them small.

In: a `Selection` of heads. Out: a matplotlib figure. Nothing is written here; `AttentionMaps` does
that.

L layers · H heads · T sequence
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# The future, hidden by the mask, is grey; weights go from white to dark blue; orange frames the
# head that is drawn large.
HIDDEN, INK, FRAME = "#ebebef", "#22262e", "#e8710a"
_QUIET = "#666a73"  # of text beside the point
BLUES = ("#ffffff", "#cfe2f3", "#8abde0", "#3b8ac4", "#145090", "#08203f")
_SIDE = 6.2  # of the large map, in inches
_SMALLEST = 5.0  # points; nobody can read a label below that
# White space as it is shown.
_VISIBLE = {ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"}
# The first of these that has a character draws it; those that are not installed are left out.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Noto Sans",
)


@dataclass(frozen=True, eq=False)  # == of tensors is no truth value
class Selection:
    """Some heads of a model and what they do in one text: what a picture or a page shows.

    weights          (L, H, T, T), of these layers and heads alone
    layers, heads    the numbers that the model knows them by, counted from 0
    first            row and column, in weights, of the head to show first, or largest
    of               how many layers and heads the model has
    """

    weights: Tensor
    tokens: Sequence[str]
    layers: Sequence[int]
    heads: Sequence[int]
    first: tuple[int, int]
    of: tuple[int, int]

    @property
    def first_weights(self) -> Tensor:
        """The weights (T, T) of the head to show first."""
        row, column = self.first
        return self.weights[row, column]

    @property
    def first_name(self) -> str:
        """The name of the head to show first."""
        row, column = self.first
        return f"Layer {self.layers[row]}, head {self.heads[column]}"


def draw(selection: Selection) -> "Figure":
    """Draw all maps of a selection small, one of them large with its tokens."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    layers, heads = selection.layers, selection.heads
    cell = min(2.0, 6.2 / len(layers), 9.6 / len(heads))  # the side of a small map, in inches
    several = len(layers) * len(heads) > 1
    width, height = 8.3 + several * (1.0 + max(4.2, cell * len(heads))), 8.7
    figure = Figure(figsize=(width, height), dpi=144, facecolor="white")

    def axes(left: float, bottom: float, wide: float, high: float) -> "Axes":
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    def write(left: float, bottom: float, text: str, size: float, color: str = _QUIET) -> None:
        figure.text(left / width, bottom / height, text, fontsize=size, color=color)

    image = _draw_large(axes(1.6, 0.75, _SIDE, _SIDE), selection.first_weights, selection.tokens)
    write(0.3, 8.3, f"{selection.first_name} (counted from 0)", 17, INK)
    write(0.3, 8.04, "Each row is a token that looks; its columns are what it looks at.", 10)
    scale = axes(5.2, 0.42, 2.6, 0.13)
    figure.colorbar(image, cax=scale, orientation="horizontal", ticks=(0, 0.05, 0.25, 0.5, 1))
    scale.tick_params(labelsize=8, length=2, color=INK)
    write(1.6, 0.42, "grey: the future, hidden    weight, rows sum to 1:", 8.5)
    if several:
        row, column = selection.first
        left, high = 8.9, cell * len(layers)
        grid = axes(left, 6.95 - high, cell * len(heads), high)
        _draw_grid(grid, selection.weights, layers, heads)
        grid.add_patch(
            Rectangle(
                (column, row), 1, 1, fill=False, edgecolor=FRAME, linewidth=2.5, clip_on=False
            )
        )
        write(left, 8.3, "All heads", 17, INK)
        write(left, 8.04, "Framed: drawn large, the most focused head (least entropy).", 10)
    return figure


def printable(token: str) -> str:
    """Return token with white space visible and every character that is not printable spelt out."""
    seen = token.translate(_VISIBLE)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in seen)


def undrawable(tokens: Sequence[str]) -> str:
    """Return the characters of tokens that are drawn as □, for want of a font, sorted."""
    return "".join(sorted(_without_font("".join(_labels(tokens).values()), _installed_fonts())))


def _draw_large(axes: "Axes", weights: Tensor, tokens: Sequence[str]) -> "AxesImage":
    """Draw one map (T, T): the tokens that look on the left, those looked at on top."""
    n_tokens = len(tokens)
    side_points = _SIDE * 72 / n_tokens  # of one cell
    image = _show(axes, _with_future_hidden(weights), n_tokens, n_tokens)
    family, shown = _installed_fonts(), _labels(tokens)
    # matplotlib would draw a box too, but warn for each, and a warning may be an error.
    missing = _without_font("".join(shown.values()), family)
    labels = ["".join("□" if c in missing else c for c in label) for label in shown.values()]
    size = max(_label_points(n_tokens), _SMALLEST)
    style: dict[str, Any] = {"fontsize": size, "family": family, "color": INK}
    # Tokens are data: a `$` in one must not start a formula.
    centres = [i + 0.5 for i in shown]
    axes.set_xticks(centres, labels, rotation=90, parse_math=False, **style)
    axes.set_yticks(centres, labels, parse_math=False, **style)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=3)
    if side_points > 26:  # room for the figures themselves
        for i in range(n_tokens):
            for j in range(i + 1):
                weight = float(weights[i, j])
                color = "white" if weight > 0.3 else INK
                text = f"{weight:.2f}".removeprefix("0")
                axes.text(j + 0.5, i + 0.5, text, color=color, fontsize=8, ha="center", va="center")
    return image


def _draw_grid(axes: "Axes", weights: Tensor, layers: Sequence[int], heads: Sequence[int]) -> None:
    """Draw all maps (L, H, T, T) as one mosaic, a layer to a row, a unit square to each map."""
    drawn = _with_future_hidden(weights)
    if drawn.size(-1) > 64:
        # Taking the largest of each patch keeps a lone bright cell; a mean would wash it out.
        drawn = F.adaptive_max_pool2d(drawn, 64)
    fine = math.ceil(64 / drawn.size(-1))
    drawn = drawn.repeat_interleave(fine, -1).repeat_interleave(fine, -2)
    # NaN is drawn white. With a margin on each side, every map has its unit square.
    padded = F.pad(drawn, (round(0.04 * drawn.size(-1)),) * 4, value=math.nan)
    mosaic = padded.transpose(1, 2).flatten(0, 1).flatten(1)  # (L·T, H·T)
    _show(axes, mosaic, len(heads), len(layers))
    size = min(9.5, 260 / max(len(layers), len(heads)))
    axes.set_xticks([i + 0.5 for i in range(len(heads))], map(str, heads), fontsize=size, color=INK)
    axes.set_yticks(
        [i + 0.5 for i in range(len(layers))], map(str, layers), fontsize=size, color=INK
    )
    axes.set_xlabel("head", fontsize=10, color=_QUIET)
    axes.set_ylabel("layer", fontsize=10, color=_QUIET)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0)


def _with_future_hidden(weights: Tensor) -> Tensor:
    """Mark what no row may see (…, T, T) with -1, which has a colour of its own."""
    size = weights.size(-1)
    return weights.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -1.0)


def _show(axes: "Axes", values: Tensor, width: int, height: int) -> "AxesImage":
    """Draw a matrix over the area (0, 0) … (width, height), row 0 on top."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    blues = LinearSegmentedColormap.from_list("weights", BLUES)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes.imshow(
        values.numpy(),
        cmap=blues.with_extremes(under=HIDDEN, bad="white"),
        # A root lifts small weights: among 50 words an even look is 0.02 each, and should be seen.
        norm=PowerNorm(0.5, vmin=0, vmax=1),
        extent=(0, width, height, 0),
        interpolation="nearest",
        aspect="auto",
    )


def _installed_fonts() -> list[str]:
    """Return those of _FONTS that matplotlib finds: a name it does not find would be a warning."""
    from matplotlib import font_manager

    installed = set(font_manager.fontManager.get_font_names())
    return [name for name in _FONTS if name in installed]


def _label_points(n_tokens: int) -> float:
    """Return the size of a label that fits beside its cell of the large map."""
    return min(11.0, 0.72 * _SIDE * 72 / n_tokens)


def _labels(tokens: Sequence[str]) -> dict[int, str]:
    """Return the label of each token that has room for one: white space visible, cut short."""
    every = math.ceil(_SMALLEST / _label_points(len(tokens)))
    seen = {i: tokens[i].translate(_VISIBLE) for i in range(0, len(tokens), every)}
    return {i: label if len(label) <= 12 else label[:11] + "…" for i, label in seen.items()}


def _without_font(text: str, family: list[str]) -> set[str]:
    from matplotlib import font_manager

    fonts = [font_manager.get_font(font_manager.findfont(name)) for name in family]
    return {c for c in text if not any(font.get_char_index(ord(c)) for font in fonts)}
