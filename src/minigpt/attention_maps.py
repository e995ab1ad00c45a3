"""Attention made visible: which word looks at which, in every layer and head.

In: a model and ids. Out: the weights (L, H, T, T), row i telling where position i looked, and a
picture of them. The fast path never holds these weights; `recorded` puts the taught equation in its
place for the length of a `with`, so nothing stays on the model and training pays nothing.

L layers · H heads · T sequence
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.compilation import uncompiled
from minigpt.config import UserError
from minigpt.evaluate import evaluating
from minigpt.files import atomic_write
from minigpt.layers.attention import CausalSelfAttention, taught_causal_attention
from minigpt.model import MiniGPT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@contextmanager
def recorded(model: MiniGPT) -> Iterator[list[Tensor]]:
    """Collect the attention weights of every forward pass inside the `with`.

    The list grows by L tensors (B, H, T, S) with each pass, first block first. They are part of the
    graph, so gradients can be asked for; detach them to keep them. On leaving, by an error too,
    every block computes as before. Inside, compiled blocks run as they are written.
    """
    weights: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        mixed, of_block = taught_causal_attention(q, k, v, dropout)
        weights.append(of_block)
        return mixed

    parts = [cast(CausalSelfAttention, block.attention) for block in model.blocks]
    before = [part.attend for part in parts]
    try:
        for part in parts:
            part.attend = attend
        with uncompiled():
            yield weights
    finally:
        for part, original in zip(parts, before, strict=True):
            part.attend = original


def attention_maps(
    model: MiniGPT, ids: Sequence[int], tokens: Sequence[str] | None = None
) -> "AttentionMaps":
    """Return where each position of `ids` looks, in every layer and head.

    tokens   one printable piece per id, for the picture (`Tokenizer.pieces`); None: the ids
    The model reads in evaluation mode and is left in the mode it was in. Raises UserError for no
    ids, ids past the vocabulary, and more of them than the model's context.
    """
    config = model.config
    if not 1 <= len(ids) <= config.context_length:
        raise UserError(
            f"the text has {len(ids)} tokens: give from 1 to {config.context_length}, the context"
        )
    unknown = [i for i in ids if not 0 <= i < config.vocab_size]
    if unknown:
        raise UserError(
            f"ids {unknown[:5]} lie outside the model's vocabulary of {config.vocab_size}: "
            "is this the tokenizer it was trained with?"
        )
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model), recorded(model) as weights:
        model.hidden(torch.tensor([list(ids)], device=device))
    labels = [str(i) for i in ids] if tokens is None else list(tokens)
    return AttentionMaps(torch.cat(weights).float().cpu(), labels)


@dataclass(frozen=True)
class AttentionMaps:
    """The weights (L, H, T, T) of one text, rows summing to 1, and its T tokens."""

    weights: Tensor
    tokens: list[str]

    def __post_init__(self) -> None:
        """Refuse labels that do not fit the weights."""
        if len(self.tokens) != self.weights.size(-1):
            raise UserError(
                f"{len(self.tokens)} tokens for {self.weights.size(-1)} positions: "
                "give one for each id"
            )

    def entropy(self) -> Tensor:
        """Return how widely each head looks (L, H), from 0 (one position) to 1 (all alike).

        The entropy of each row over that of an even look at all it can see, averaged over the rows
        that can see more than one position; NaN where the text is a single token and none can.
        """
        n_seen = torch.arange(1, len(self.tokens) + 1)
        nats = -torch.xlogy(self.weights, self.weights).sum(dim=-1)  # (L, H, T)
        return (nats[..., 1:] / n_seen[1:].log()).mean(dim=-1)

    @property
    def undrawable(self) -> str:
        """The characters of the tokens that a picture shows as □, for want of a font, sorted."""
        return "".join(sorted(_without_font("".join(self.tokens), _installed_fonts())))

    def save_png(self, path: Path, *, layer: int | None = None, head: int | None = None) -> None:
        """Draw all maps small and the most decided one large, with its tokens; write it to path.

        layer, head   draw only these, counted from 0
        Raises UserError for a layer or head that the model does not have.
        """
        layers = _chosen("layer", layer, self.weights.size(0))
        heads = _chosen("head", head, self.weights.size(1))
        write_figure(_draw(self, layers, heads), path)


def _chosen(name: str, number: int | None, count: int) -> list[int]:
    if number is None:
        return list(range(count))
    if not 0 <= number < count:
        raise UserError(f"{name} is {number}: the model has {name}s 0 to {count - 1}")
    return [number]


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG. Raises UserError where nothing can be written."""
    try:
        with atomic_write(path) as file:
            figure.savefig(file, format="png", facecolor=figure.get_facecolor())
    except OSError as error:
        raise UserError(f"picture {path} cannot be written: {error.strerror}") from None


# The future, hidden by the mask, is grey; weights go from white to dark blue; orange frames the
# head that is drawn large.
_HIDDEN, _INK, _FRAME = "#ebebef", "#22262e", "#e8710a"
_BLUES = ("#ffffff", "#cfe2f3", "#8abde0", "#3b8ac4", "#145090", "#08203f")
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


def _draw(maps: AttentionMaps, layers: list[int], heads: list[int]) -> "Figure":
    """Lay out the picture, in inches: one map large on the left, all chosen ones on the right."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    spread = maps.entropy()[layers][:, heads]
    row, column = divmod(int(spread.argmin()), len(heads))
    cell = min(2.0, 6.2 / len(layers), 9.6 / len(heads))  # the side of a small map
    several = spread.numel() > 1
    width, height = 8.3 + several * (1.0 + max(4.2, cell * len(heads))), 8.7
    figure = Figure(figsize=(width, height), dpi=144, facecolor="white")

    def axes(left: float, bottom: float, wide: float, high: float) -> "Axes":
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    def write(left: float, bottom: float, text: str, size: float, color: str = _INK) -> None:
        figure.text(left / width, bottom / height, text, fontsize=size, color=color)

    image = _draw_large(axes(1.6, 0.75, 6.2, 6.2), maps, layers[row], heads[column])
    write(0.3, 8.3, f"Layer {layers[row]}, head {heads[column]}", 17)
    write(
        0.3,
        8.04,
        "Each row is a token that looks; its columns are what it looks at.",
        10,
        "#666a73",
    )
    scale = axes(5.2, 0.42, 2.6, 0.13)
    figure.colorbar(image, cax=scale, orientation="horizontal", ticks=(0, 0.05, 0.25, 0.5, 1))
    scale.tick_params(labelsize=8, length=2, color=_INK)
    write(1.6, 0.42, "grey: the future, hidden    weight, rows sum to 1:", 8.5, "#666a73")
    if several:
        left, high = 8.9, cell * len(layers)
        grid = axes(left, 6.95 - high, cell * len(heads), high)
        _draw_grid(grid, maps, layers, heads)
        grid.add_patch(
            Rectangle(
                (column, row), 1, 1, fill=False, edgecolor=_FRAME, linewidth=2.5, clip_on=False
            )
        )
        write(left, 8.3, "All heads", 17)
        write(left, 8.04, "Framed: drawn large, the one that looks most decidedly.", 10, "#666a73")
    return figure


def _draw_large(axes: "Axes", maps: AttentionMaps, layer: int, head: int) -> "AxesImage":
    """Draw one map with its tokens: those that look on the left, those looked at on top."""
    n_tokens = len(maps.tokens)
    side_points = 6.2 * 72 / n_tokens  # of one cell
    image = _show(axes, _with_future_hidden(maps.weights[layer, head]), n_tokens, n_tokens)
    size = min(11.0, 0.72 * side_points)
    # Below five points nobody can read a label: then only each n-th token gets one.
    every = math.ceil(5 / size)
    shown = range(0, n_tokens, every)
    family = _installed_fonts()
    labels = [_label(maps.tokens[i], family) for i in shown]
    style: dict[str, Any] = {"fontsize": max(size, 5.0), "family": family, "color": _INK}
    # Tokens are data: a `$` in one must not start a formula.
    centres = [i + 0.5 for i in shown]
    axes.set_xticks(centres, labels, rotation=90, parse_math=False, **style)
    axes.set_yticks(centres, labels, parse_math=False, **style)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=3)
    if side_points > 26:  # room for the figures themselves
        for i in range(n_tokens):
            for j in range(i + 1):
                weight = float(maps.weights[layer, head, i, j])
                color = "white" if weight > 0.3 else _INK
                text = f"{weight:.2f}".removeprefix("0")
                axes.text(j + 0.5, i + 0.5, text, color=color, fontsize=8, ha="center", va="center")
    return image


def _draw_grid(axes: "Axes", maps: AttentionMaps, layers: list[int], heads: list[int]) -> None:
    """Draw the maps of all heads as one mosaic, a layer to a row, a unit square to each map."""
    chosen = _with_future_hidden(maps.weights[layers][:, heads])  # (L, H, T, T)
    if chosen.size(-1) > 64:
        # Taking the largest of each patch keeps a lone bright cell; a mean would wash it out.
        chosen = F.adaptive_max_pool2d(chosen, 64)
    fine = math.ceil(64 / chosen.size(-1))
    chosen = chosen.repeat_interleave(fine, -1).repeat_interleave(fine, -2)
    # NaN is drawn white. With a margin on each side, every map has its unit square.
    padded = F.pad(chosen, (round(0.04 * chosen.size(-1)),) * 4, value=math.nan)
    mosaic = padded.transpose(1, 2).flatten(0, 1).flatten(1)  # (L·T, H·T)
    _show(axes, mosaic, len(heads), len(layers))
    size = min(9.5, 260 / max(len(layers), len(heads)))
    axes.set_xticks(
        [i + 0.5 for i in range(len(heads))], map(str, heads), fontsize=size, color=_INK
    )
    axes.set_yticks(
        [i + 0.5 for i in range(len(layers))], map(str, layers), fontsize=size, color=_INK
    )
    axes.set_xlabel("head", fontsize=10, color="#666a73")
    axes.set_ylabel("layer", fontsize=10, color="#666a73")
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

    blues = LinearSegmentedColormap.from_list("weights", _BLUES)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes.imshow(
        values.numpy(),
        cmap=blues.with_extremes(under=_HIDDEN, bad="white"),
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


def _label(token: str, family: list[str]) -> str:
    """Return a token as it can be drawn: white space visible, cut short, □ for what no font has."""
    seen = token.translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})
    seen = seen if len(seen) <= 12 else seen[:11] + "…"
    # matplotlib would draw a box too, but warn for each, and a warning may be an error.
    missing = _without_font(seen, family)
    return "".join("□" if c in missing else c for c in seen)


def _without_font(text: str, family: list[str]) -> set[str]:
    from matplotlib import font_manager

    fonts = [font_manager.get_font(font_manager.findfont(name)) for name in family]
    return {c for c in text if not any(font.get_char_index(ord(c)) for font in fonts)}
