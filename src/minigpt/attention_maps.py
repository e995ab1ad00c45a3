"""Attention made visible: which word looks at which, in every layer and head.

In: a model and ids. Out: the weights (L, H, T, T), row i telling where position i looked, and views
of them: in the terminal, as a picture, as a page, as numbers. The fast path never holds these
weights; `recorded` puts the taught equation in its place for the length of a `with`, so nothing
stays on the model and training pays nothing.

B batch · L layers · H heads · T sequence · S keys, T of them without a cache
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import torch
from torch import Tensor

from minigpt import attention_page, attention_picture
from minigpt.attention_text import heat_map
from minigpt.compilation import uncompiled
from minigpt.errors import UserError
from minigpt.evaluate import evaluating
from minigpt.files import atomic_write
from minigpt.layers.attention import CausalSelfAttention, taught_causal_attention
from minigpt.model import MiniGPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# Weights of one text that are held at once: 256 MB.
MOST_WEIGHTS = 2**26
# Two threads that swapped in turns would leave each other's function behind for good.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def attending(model: MiniGPT, instead: Callable[[int, Attend], Attend]) -> Iterator[None]:
    """Let the blocks attend in another way inside the `with`; afterwards as before, errors or not.

    instead   given the number of a block and how it attends, returns how it is to attend
    That holds for this thread: another that computes with the same model is not disturbed, and one
    that wants to swap too waits. Compiled blocks run as they are written.
    """
    here = threading.get_ident()

    def routed(layer: int, before: Attend) -> Attend:
        other = instead(layer, before)

        def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
            chosen = other if threading.get_ident() == here else before
            return chosen(q, k, v, dropout)

        return attend

    parts = [cast(CausalSelfAttention, block.attention) for block in model.blocks]
    with _ONE_AT_A_TIME, uncompiled():
        before = [part.attend for part in parts]
        try:
            for layer, part in enumerate(parts):
                part.attend = routed(layer, part.attend)
            yield
        finally:
            for part, original in zip(parts, before, strict=True):
                part.attend = original


@contextmanager
def recorded(model: MiniGPT) -> Iterator[list[Tensor]]:
    """Collect the attention weights of every forward pass inside the `with`.

    The list grows by L tensors (B, H, T, S) with each pass, first block first. They are part of the
    graph, so gradients can be asked for; detach them to keep them. Otherwise as `attending`.
    """
    weights: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        mixed, of_block = taught_causal_attention(q, k, v, dropout)
        weights.append(of_block)
        return mixed

    with attending(model, lambda _layer, _before: attend):
        yield weights


def attention_maps(
    model: MiniGPT, ids: Sequence[int], tokens: Sequence[str] | None = None
) -> "AttentionMaps":
    """Return where each position of `ids` looks, in every layer and head.

    tokens   one printable piece per id, for the picture (`Tokenizer.pieces`); None: the ids
    The model reads in evaluation mode and is left in the mode it was in. Raises UserError for no
    ids, ids past the vocabulary, more of them than the model's context, and more weights than
    MOST_WEIGHTS.
    """
    config = model.config
    if not 1 <= len(ids) <= config.context_length:
        raise UserError(
            f"the text has {len(ids)} tokens: give from 1 to {config.context_length}, the context"
        )
    n_maps = config.n_layers * config.n_heads
    if n_maps * len(ids) ** 2 > MOST_WEIGHTS:
        raise UserError(
            f"the text has {len(ids)} tokens, too many for {n_maps} maps at once: give at most "
            f"{math.isqrt(MOST_WEIGHTS // n_maps)}"
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
    return AttentionMaps(finite(torch.cat(weights).float().cpu(), "attention"), labels)


def finite(figures: Tensor, what: str) -> Tensor:
    """Return a model's figures as they are. Raises UserError where one is NaN or infinite."""
    if not figures.isfinite().all():
        raise UserError(
            f"the model's {what} is not finite: its training has diverged, open another run"
        )
    return figures


def entropy(weights: Tensor) -> Tensor:
    """Return how widely each head looks (L, H), from 0 (one position) to 1 (all alike).

    weights   (L, H, T, T), causal
    The entropy of each row over that of an even look at all it can see, averaged over the rows
    that can see more than one position; NaN where the text is a single token and none can.
    """
    n_seen = torch.arange(1, weights.size(-1) + 1)
    nats = -torch.xlogy(weights, weights).sum(dim=-1)  # (L, H, T)
    return (nats[..., 1:] / n_seen[1:].log()).mean(dim=-1)


@dataclass(frozen=True, eq=False)  # == of tensors is no truth value
class AttentionMaps:
    """The weights (L, H, T, T) of one text, rows summing to 1, and its T tokens.

    Wherever a view takes layer and head, they are counted from 0, None stands for all of them, and
    UserError is raised for one that the model does not have.
    """

    weights: Tensor = field(repr=False)
    tokens: list[str]

    def __post_init__(self) -> None:
        """Take the bare numbers, in float32 on the CPU; refuse what no view could show as it is."""
        object.__setattr__(self, "weights", self.weights.detach().float().cpu())
        shape = tuple(self.weights.shape)
        if len(shape) != 4 or shape[2] != shape[3] or 0 in shape:
            raise UserError(
                f"weights are of shape {shape}: give (layers, heads, T, T), at least one of each"
            )
        if len(self.tokens) != self.weights.size(-1):
            raise UserError(
                f"{len(self.tokens)} tokens for {self.weights.size(-1)} positions: "
                "give one for each id"
            )
        # Rounding may lift a weight of 1 a little, in bfloat16 too. A NaN is within nothing.
        if not ((self.weights >= 0) & (self.weights <= 1.01)).all():
            raise UserError("some weights are not numbers from 0 to 1: give rows that sum to 1")
        if self.weights.triu(1).any():
            raise UserError("some weights look at what comes later: only causal ones are shown")

    def entropy(self) -> Tensor:
        """Return how widely each head looks, (L, H), as the function of this name says."""
        return entropy(self.weights)

    @property
    def undrawable(self) -> str:
        """The characters of the tokens that a picture shows as □, for want of a font, sorted."""
        return attention_picture.undrawable(self.tokens)

    def select(
        self, layer: int | None = None, head: int | None = None
    ) -> attention_picture.Selection:
        """Return the chosen layers and heads, the most focused head (least entropy) to come first.

        Of a single token, where no head can choose what to look at, it is simply the first of them.
        """
        n_layers, n_heads = self.weights.shape[:2]
        layers, heads = _chosen("layer", layer, n_layers), _chosen("head", head, n_heads)
        spread = self.entropy()[layers][:, heads].nan_to_num(1.0)
        return attention_picture.Selection(
            self.weights[layers][:, heads],
            self.tokens,
            layers,
            heads,
            first=divmod(int(spread.argmin()), len(heads)),
            of=(n_layers, n_heads),
        )

    def heat_map(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        width: int = 80,
        color: bool = False,
    ) -> str:
        """Return one head as text for a terminal: of those chosen, the most focused.

        width   columns to fill at most; tokens that find no room are left out, and that is said
        color   with escape sequences for colour, instead of shades made of characters
        """
        chosen = self.select(layer, head)
        n_layers, n_heads = chosen.of
        of = f"{_count(n_layers, 'layer')} with {_count(n_heads, 'head')}"
        title = f"{chosen.first_name} (counted from 0), of {of}"
        if layer is None or head is None:
            title += ": the most focused, by entropy"
        return heat_map(chosen.first_weights, self.tokens, title, width=width, color=color)

    def html(self, layer: int | None = None, head: int | None = None) -> str:
        """Return a page, whole in itself, on which the reader chooses among the chosen heads."""
        return attention_page.page(self.select(layer, head))

    def _repr_html_(self) -> str:
        """Show the page inside a notebook, apart from everything else in it."""
        return attention_page.framed(self.html(), len(self.tokens))

    def save(self, path: str | Path, layer: int | None = None, head: int | None = None) -> None:
        """Write the chosen heads to path: a picture (.png), a page (.html) or numbers (.json).

        Raises UserError for another name, and where nothing can be written.
        """
        kind = kind_of(Path(path))
        if kind == ".png":
            self.save_png(path, layer=layer, head=head)
            return
        chosen = self.select(layer, head)
        if kind == ".html":
            text = attention_page.page(chosen)
        else:
            entropy = self.entropy()[chosen.layers][:, chosen.heads]
            text = json.dumps(attention_page.numbers(chosen, entropy))
        with _writing("file", Path(path)) as file:
            file.write(text.encode("utf-8"))

    def save_png(
        self, path: str | Path, *, layer: int | None = None, head: int | None = None
    ) -> None:
        """Draw all chosen maps small and the most focused one large; write the picture to path."""
        write_figure(attention_picture.draw(self.select(layer, head)), Path(path))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _chosen(name: str, number: int | None, count: int) -> list[int]:
    if number is None:
        return list(range(count))
    if not 0 <= number < count:
        raise UserError(f"{name} is {number}: the model has {name}s 0 to {count - 1}")
    return [number]


def kind_of(path: Path, called: str = "path") -> str:
    """Return .png, .html or .json, which is what path ends in.

    Raises UserError where it does not, naming what the user calls it.
    """
    kind = path.suffix.lower()
    if kind not in (".png", ".html", ".json"):
        raise UserError(f"{called} is {path}: give a name that ends in .png, .html or .json")
    return kind


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG. Raises UserError where nothing can be written."""
    with _writing("picture", path) as file:
        figure.savefig(file, format="png", facecolor=figure.get_facecolor())


@contextmanager
def _writing(what: str, path: Path) -> Iterator[BinaryIO]:
    try:
        with atomic_write(path) as file:
            yield file
    except OSError as error:
        raise UserError(
            f"{what} {path} cannot be written: {error.strerror}, name another place"
        ) from None
