"""Evaluation: how well a model predicts a text, each of its tokens scored exactly once.

In: a model and a `TokenStream`. Out: a `Score`, in nats, tokens, words and bytes, from which every
perplexity follows.

The text is read in windows of `context` ids, each `stride` further than the one before. A window
scores only what no window scored before, so a stride below the context gives every token more to
look back at, for more work. The first token is conditioned on <eos>. The figure depends on context
and stride (so name them beside it) but not on the batch size.

B batch · T sequence, T' of it scored · D d_model
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from minigpt.compilation import uncompiled
from minigpt.config import UserError
from minigpt.data import TokenStream
from minigpt.model import MiniGPT


@dataclass(frozen=True)
class Score:
    """What a text cost a model, and over what that may be shared out."""

    nats: float
    """Negative log-likelihood of the whole text."""
    tokens: int
    words: int
    """White-space words and line ends: the unit in which tokenizers can be compared."""
    bytes: int

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
    model.eval()
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

    stride None is the context: disjoint windows. Raises UserError for sizes out of range and an
    empty text.
    """
    stride = context if stride is None else stride
    if not 1 <= context <= model.config.context_length:
        raise UserError(
            f"context is {context}: it must lie between 1 and the model's "
            f"{model.config.context_length}"
        )
    if not 1 <= stride <= context:
        raise UserError(f"stride is {stride}: it must lie between 1 and the context {context}")
    if batch_size < 1:
        raise UserError(f"batch size is {batch_size}: it must be at least 1")
    if len(ids) == 0:
        raise UserError("the text to evaluate is empty: give one with at least one token")
    device = next(model.parameters()).device
    nats = np.empty(len(ids), dtype=np.float32)
    with evaluating(model), uncompiled():
        for batch in _batched(windows(len(ids), context, stride), batch_size):
            targets = np.stack([ids[w.begin : w.end] for w in batch]).astype(np.int64)  # (B, T)
            before = [ids[w.begin - 1] if w.begin else eos_id for w in batch]
            inputs = np.column_stack((np.array(before, dtype=np.int64), targets[:, :-1]))  # (B, T)
            # Positions that are there to look back at only: they need no logits.
            skipped = batch[0].scored_from - batch[0].begin
            hidden = model.hidden(torch.from_numpy(inputs).to(device))[:, skipped:]  # (B, T', D)
            wanted = torch.from_numpy(targets[:, skipped:]).to(device)
            _, row_nats = model.output.nats(hidden.flatten(0, 1), wanted.flatten())
            # Neighbouring windows of a batch score neighbouring ids: one slice holds them all.
            nats[batch[0].scored_from : batch[-1].end] = row_nats.cpu().numpy()
    return nats


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
    return Score(
        # float32 would lose the last digits of a sum over 200,000 tokens.
        nats=float(nats.sum(dtype=np.float64)),
        tokens=len(nats),
        words=stream.n_words,
        bytes=stream.n_bytes,
    )
