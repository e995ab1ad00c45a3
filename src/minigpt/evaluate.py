"""Evaluation: how well a model predicts a text, each of its tokens scored exactly once.

In: a model and a `TokenStream`. Out: a `Score`, in nats, tokens, words and bytes, from which every
perplexity follows.

The text is read in windows of `context` ids, each `stride` further than the one before. A window
scores only what no window scored before, so a stride below the context gives every token more to
look back at, for more work. The first token is conditioned on <eos>. The figure depends on context
and stride (so name them beside it) but not on the batch size.

B batch · T sequence, T' of it scored · N rows, B·T' of them · D d_model
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from minigpt.compilation import uncompiled
from minigpt.data import TokenStream
from minigpt.errors import require
from minigpt.model import MiniGPT, States


@dataclass(frozen=True)
class Score:
    """What a text cost a model, and over what that may be shared out."""

    nats: float
    """Negative log-likelihood of the whole text."""
    tokens: int
    words: int
    """White-space words and line ends: the unit in which tokenizers can be compared."""
    bytes: int

    @classmethod
    def of(cls, stream: TokenStream, nats: np.ndarray) -> "Score":
        """Return the score of a text whose tokens cost nats (n,) float32."""
        return cls(
            # float32 would lose the last digits of a sum over 200,000 tokens.
            nats=float(nats.sum(dtype=np.float64)),
            tokens=len(nats),
            words=stream.n_words,
            bytes=stream.n_bytes,
        )

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def token_perplexity(self) -> float:
        """exp(nats / tokens): what the literature reports where tokens are words."""
        return perplexity(self.nats / self.tokens)

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words), whatever the tokenizer."""
        return perplexity(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model would need for a byte of the text, were it a compressor."""
        return self.nats / math.log(2) / self.bytes


def perplexity(loss: float) -> float:
    """Return exp(loss): among how many equally likely words the model in effect chooses."""
    return math.exp(loss) if loss < 700 else math.inf  # or nan, which is not less than 700


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the `with`; afterwards each part has the mode that it had."""
    training = [part for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class Window(NamedTuple):
    """Ids from `begin` to before `end` are predicted; those from `scored_from` on count."""

    begin: int
    scored_from: int
    end: int


def windows(n_ids: int, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows that score ids 0 … n_ids − 1 once each, from left to right."""
    yield Window(0, 0, min(context, n_ids))
    for scored_from in range(context, n_ids, stride):
        # Every later window looks back the same way, the last and shorter one too.
        begin = scored_from - (context - stride)
        yield Window(begin, scored_from, min(scored_from + stride, n_ids))


def check_windows(model: MiniGPT, ids: np.ndarray, context: int, stride: int) -> None:
    """Raise UserError for sizes that model cannot be evaluated with, and for an empty text."""
    longest = model.config.context_length
    _require_whole(context=context, stride=stride)
    require(
        1 <= context <= longest,
        f"context is {context}: it must lie between 1 and the model's {longest}",
    )
    require(
        1 <= stride <= context,
        f"stride is {stride}: it must lie between 1 and the context {context}",
    )
    require(len(ids) > 0, "the text to evaluate is empty: give one with at least one token")


def _require_whole(**sizes: object) -> None:
    for name, size in sizes.items():
        whole = isinstance(size, Integral) and not isinstance(size, bool)
        require(whole, f"{name} is {size!r}: it must be a whole number")


class ScoredStates(NamedTuple):
    """What the model made of the ids from `begin` to before `end`, all of them to be scored."""

    begin: int
    end: int
    states: States
    """What `model.output.nats` takes"""


@torch.no_grad()
def scored_states(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
) -> Iterator[ScoredStates]:
    """Yield the last hidden vector before each id, in the order of the text, a batch at a time.

    stride None is the context: disjoint windows. The model is in evaluation mode until the last
    batch has been taken. Raises UserError for sizes out of range and an empty text.
    """
    stride = context if stride is None else stride
    check_windows(model, ids, context, stride)
    _require_whole(batch_size=batch_size)
    require(batch_size >= 1, f"batch size is {batch_size}: it must be at least 1")
    device = next(model.parameters()).device
    with evaluating(model), uncompiled():
        for batch in _batched(windows(len(ids), context, stride), batch_size):
            targets = np.stack([ids[w.begin : w.end] for w in batch]).astype(np.int64)  # (B, T)
            before = [ids[w.begin - 1] if w.begin else eos_id for w in batch]
            inputs = np.column_stack((np.array(before, dtype=np.int64), targets[:, :-1]))  # (B, T)
            # Positions that are there to look back at only: they need no logits.
            skipped = batch[0].scored_from - batch[0].begin
            read, wanted = (torch.from_numpy(ids).to(device) for ids in (inputs, targets))
            # Neighbouring windows of a batch score neighbouring ids: one stretch holds them all.
            yield ScoredStates(
                batch[0].scored_from, batch[-1].end, model.states(read, wanted, skipped)
            )


@torch.no_grad()
def token_nats(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
) -> np.ndarray:
    """Return the nats of each id, (len(ids),) float32. Nothing else in memory grows with the text.

    Sizes and their UserErrors are those of `scored_states`.
    """
    nats = np.empty(len(ids), dtype=np.float32)
    for begin, end, states in scored_states(
        model, ids, eos_id, context=context, stride=stride, batch_size=batch_size
    ):
        _, row_nats = model.output.nats(*states)
        nats[begin:end] = row_nats.cpu().numpy()
    return nats


def nats_by_context(
    nats: np.ndarray, *, context: int, stride: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return what the ids cost in sum, and how many they are, by how much each could look back at.

    Both are (context,). Entry p is about position p of a window, from which p + 1 ids are seen; at
    the beginning of the text the first of them is <eos>.
    nats   (n,), as `token_nats` gave it with the same context and stride
    """
    sums, counts = np.zeros(context), np.zeros(context, dtype=np.int64)
    first, later = nats[:context], nats[context:]
    sums[: len(first)] += first
    counts[: len(first)] += 1
    # Every later window scores its last `stride` positions; the last of them may be cut short.
    n_whole = len(later) // stride
    whole, rest = later[: n_whole * stride].reshape(-1, stride), later[n_whole * stride :]
    begin = context - stride
    sums[begin:] += whole.sum(axis=0, dtype=np.float64)
    counts[begin:] += n_whole
    sums[begin : begin + len(rest)] += rest
    counts[begin : begin + len(rest)] += 1
    return sums, counts


def _batched(all_windows: Iterator[Window], batch_size: int) -> Iterator[list[Window]]:
    """Join neighbouring windows of one shape, at most batch_size of them."""
    batch: list[Window] = []
    for window in all_windows:
        if batch and (len(batch) == batch_size or _shape(window) != _shape(batch[0])):
            yield batch
            batch = []
        batch.append(window)
    yield batch


def _shape(window: Window) -> tuple[int, int]:
    return window.end - window.begin, window.scored_from - window.begin


def evaluate(
    model: MiniGPT,
    stream: TokenStream,
    eos_id: int,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 16,
) -> Score:
    """Return the Score of stream under model; context None is the model's own."""
    nats = token_nats(
        model,
        stream.ids,
        eos_id,
        context=model.config.context_length if context is None else context,
        stride=stride,
        batch_size=batch_size,
    )
    return Score.of(stream, nats)
