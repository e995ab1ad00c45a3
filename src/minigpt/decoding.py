"""Decoding: a model and the ids of a text's beginning go in, the ids that follow come out.

    prompt's ids ──▶ window ──model──▶ logits ──filters──▶ choice ──▶ next id ─┐
               ▲                                                               │
               └───────────────────────────────────────────────────────────────┘

`write` is the loop, for any number of texts at once; `generate` is it for one. Nothing here knows
of letters; `minigpt.generate` puts text at both ends.

B batch · T sequence · V vocabulary
"""

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from minigpt.compilation import uncompiled
from minigpt.errors import UserError, require
from minigpt.evaluate import evaluating
from minigpt.filters import NO_RULES, Text, TokenRules, Wish, filtered, wishes_of
from minigpt.model import MiniGPT
from minigpt.one_row import Step, is_usual
from minigpt.sampling import USUAL, Sampling

# Positions read at once: what a long prompt needs beside its cache stays small.
PIECE = 512
# Texts that are written side by side; each has a cache of its own.
MOST_AT_ONCE = 1_024
# Why a text ended.
BY_LENGTH, BY_TOKEN = "length", "end of text"


def choose(logits: Tensor, generator: torch.Generator | None) -> int:
    """Draw an id from logits (V,), or take the likeliest without a generator."""
    if generator is None:
        return int(logits.argmax())
    # The id at which the sum of the probabilities, from the first on, reaches a point between 0,
    # exclusive, and all of it, inclusive: so an id without a chance is never it.
    sums = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    point = (1 - torch.rand((), dtype=torch.float64, generator=generator)) * sums[-1]
    return int(torch.searchsorted(sums, point))


def window_start(n_ids: int, context_length: int) -> int:
    """Return where in a text of n_ids ids the window begins that the model reads.

    While the text fits, at 0. When the window is full, its newest half is kept and read again, so
    the start moves in strides of half a context. Sliding by one instead would give every word
    another position each time, and nothing in a cache would be worth keeping. The rule looks at
    n_ids alone: prompt or generated, cached or not, the model sees the same ids.
    """
    stride = context_length - context_length // 2
    too_many = max(0, n_ids - context_length)
    return math.ceil(too_many / stride) * stride


class Reader:
    """A model behind its window: logits after texts of any length, each position read once."""

    # The mode and inference_mode last for one call. Held open across a yield they would reach into
    # the code of whoever consumes the ids, and stay there if it stopped half-way.

    @torch.inference_mode()  # for the cache: later ones, of chosen texts, are made so too
    def __init__(
        self, model: MiniGPT, n_texts: int, *, use_cache: bool, step: Step | None = None
    ) -> None:
        self.model, self.step = model, step
        self.device = next(model.parameters()).device
        self.cache = model.new_cache(n_texts) if use_cache else None
        self.start = 0

    @torch.inference_mode()
    def split(self, texts: Sequence[int]) -> None:
        """Go on with these of the texts, some of them more than once."""
        if self.cache is not None:
            self.cache = self.cache.select(torch.tensor(texts, device=self.device))

    @torch.inference_mode()
    def next_logits(self, texts: Sequence[Sequence[int]], n_ids: int) -> Tensor:
        """Return the logits (B, V) of what follows n_ids of B texts, in float32 on the CPU.

        Raises UserError where a row has no largest logit: a diverged model gives NaN.
        """
        start = window_start(n_ids, self.model.config.context_length)
        if self.cache is not None and start != self.start:
            self.cache.reset()  # what is kept stands at new positions now: it is read again
        self.start = start
        n_read = self.cache.length if self.cache is not None else 0
        rows = [ids[start + n_read : n_ids] for ids in texts]
        unread = torch.tensor(rows, device=self.device)  # (B, T)
        if self.step is not None and is_usual(unread, self.cache):
            logits = self.step(unread, self.cache)
        else:
            logits = self._read(unread)
        # Filtered and drawn on the CPU, the same seed means the same draws on any device.
        logits = logits.float().cpu()
        if not logits.amax(dim=-1).isfinite().all():
            raise UserError(
                "the model's logits are not finite: its training has diverged, "
                "so take an earlier checkpoint or train with a lower rate"
            )
        return logits

    def _read(self, unread: Tensor) -> Tensor:
        """Return the logits (B, V) behind unread (B, T), which a cache takes in pieces."""
        with evaluating(self.model), uncompiled():
            if self.cache is not None:
                while unread.size(1) > PIECE:
                    self.model.hidden(unread[:, :PIECE], self.cache)
                    unread = unread[:, PIECE:]
            return self.model.next_logits(unread, self.cache)


def require_ids(model: MiniGPT, texts: Sequence[Text], rules: TokenRules) -> None:
    """Raise UserError for a text without ids, and for ids that the model has no row for."""
    vocab_size = model.config.vocab_size
    require(all(text.ids for text in texts), "the prompt has no ids: start from the id of <eos>")
    groups: dict[str, Collection[int]] = {
        "prompt": {i for text in texts for i in text.ids},
        "banned": rules.banned,
        "bias": rules.bias,
        "stop": rules.ends,
    }
    for name, group in groups.items():
        unknown = sorted(i for i in group if not 0 <= i < vocab_size)
        require(
            not unknown,
            f"{name} ids {unknown[:5]} lie outside the model's vocabulary of {vocab_size}: "
            "is this the tokenizer it was trained with?",
        )
    n_banned = len(set(rules.banned))
    require(n_banned < vocab_size, f"all {vocab_size} ids are banned: leave at least one")


def write(
    model: MiniGPT,
    texts: Sequence[Text],
    sampling: Sampling = USUAL,
    rules: TokenRules = NO_RULES,
    *,
    use_cache: bool = True,
    step: Step | None = None,
) -> Iterator[list[int]]:
    """Let texts grow by a token each at a time, until all have ended; yield which have, if any.

    Each is drawn with a generator of its own, so that it is the same alone as among others, as far
    as rounding goes. Texts that begin alike up to the end of the shortest prompt share the reading
    of that. Whoever looks on may end a text by giving it a reason. The cache changes no id either;
    without it each costs a whole window. The model is left in the mode it was in, and the global
    random generator is not touched.
    Raises UserError, before anything is drawn, for a text without ids and for ids that the model
    has no row for.

    step   reads what a lone text goes on with, in place of the model: `one_row.compiled_step`
    """
    require_ids(model, texts, rules)
    return _written(model, texts, sampling, rules, use_cache=use_cache, step=step)


def _written(
    model: MiniGPT,
    texts: Sequence[Text],
    sampling: Sampling,
    rules: TokenRules,
    *,
    use_cache: bool,
    step: Step | None,
) -> Iterator[list[int]]:
    """Do what `write` describes.

    All texts are read in step, position by position: while one still reads its prompt another, with
    a shorter one, writes already. So no row of a batch is ever padded, and none has a mask.
    """
    wishes = wishes_of(sampling, rules)
    generators = [_generator(sampling, text) for text in texts]
    n_ids = min(len(text.ids) for text in texts)  # so many were read of each
    begin_alike = len({tuple(text.ids[:n_ids]) for text in texts}) == 1
    reader = Reader(model, 1 if begin_alike else len(texts), use_cache=use_cache, step=step)
    active = list(range(len(texts)))  # what rows of logits are about
    if begin_alike:
        logits = reader.next_logits([texts[0].ids], n_ids).expand(len(texts), -1)  # (B, V)
        reader.split([0] * len(texts))
    else:
        logits = reader.next_logits([text.ids for text in texts], n_ids)
    while True:
        # The others have read a part of their prompts only.
        rows = [row for row, b in enumerate(active) if len(texts[b].ids) == n_ids]
        growing = [active[row] for row in rows]
        have_grown = _grow(
            [texts[b] for b in growing],
            logits if len(rows) == len(active) else logits[rows],
            [generators[b] for b in growing],
            sampling,
            wishes,
            rules,
        )
        grown = [b for b, has_grown in zip(growing, have_grown, strict=True) if has_grown]
        yield grown
        going = [row for row, b in enumerate(active) if texts[b].ended is None]
        if not going:
            return
        if len(going) < len(active):
            reader.split(going)
            active = [active[row] for row in going]
        n_ids += 1
        logits = reader.next_logits([texts[b].ids for b in active], n_ids)


def _grow(
    texts: Sequence[Text],
    logits: Tensor,
    generators: Sequence[torch.Generator | None],
    sampling: Sampling,
    wishes: Sequence[Wish],
    rules: TokenRules,
) -> list[bool]:
    """Let texts grow by an id each, drawn from logits (B, V), or end; return which have grown."""
    if not texts:
        return []
    for text, row, allowed, total, generator in zip(
        texts,
        logits,
        filtered(logits, texts, wishes),
        logits.logsumexp(dim=-1),
        generators,
        strict=True,
    ):
        next_id = choose(allowed, generator)
        if next_id in rules.ends:
            text.ended = BY_TOKEN
            continue
        text.ids.append(next_id)
        text.log_probs.append(float(row[next_id] - total))
        if text.n_new == sampling.max_new_tokens:
            text.ended = BY_LENGTH
    return [text.ended != BY_TOKEN for text in texts]


def _generator(sampling: Sampling, text: Text) -> torch.Generator | None:
    """Return what draws the ids of text, or None where nothing is drawn."""
    if sampling.greedy:
        return None
    return torch.Generator().manual_seed((sampling.seed + text.sample) % 2**32)


def generate(
    model: MiniGPT,
    prompt_ids: Sequence[int],
    sampling: Sampling = USUAL,
    *,
    banned: Collection[int] = (),
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
    step: Step | None = None,
) -> Iterator[int]:
    """Return the ids that follow prompt_ids, each as soon as it is drawn.

    banned ids are never drawn; the first of the stop_ids ends the text and is not part of it. All
    else is as `write` has it, which this is, for one text.
    """
    text = Text.of(prompt_ids)
    rules = TokenRules(banned, {}, stop_ids)
    grown = write(model, [text], sampling, rules, use_cache=use_cache, step=step)
    return (text.ids[-1] for rows in grown for _ in rows)
