"""Generation: a model and the start of a text go in, the rest comes out, a word at a time.

    prompt ──encode──▶ ids ──▶ window ──model──▶ logits ──filters──▶ choice ──▶ next id ─┐
                        ▲                                                                │
                        └────────────────────────────────────────────────────────────────┘
    next ids ──`decoded`──▶ pieces of text, whole characters only ──`until`──▶ cut at a stop string

`generate` is the loop on ids; `generate_text` puts text at both ends. Nothing here knows of files.

B batch · T sequence · V vocabulary
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minigpt.compilation import uncompiled
from minigpt.config import UserError, require
from minigpt.evaluate import evaluating
from minigpt.model import MiniGPT
from minigpt.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next word is picked from the distribution that the model gives."""

    temperature: float = 0.8
    """Below 1 likely words gain, above 1 unlikely ones; 0 always takes the likeliest."""
    top_k: int | None = 50
    """Pick among this many of the likeliest words; none: among all."""
    top_p: float | None = None
    """Pick among the likeliest words that together have this probability; none: among all."""
    seed: int = 1
    """Seed of the draws: the same seed gives the same text."""
    max_new_tokens: int = 100
    """Stop after this many new tokens."""

    def __post_init__(self) -> None:
        """Refuse values that no draw could follow."""
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}: it must be at least 0 (0: the likeliest word)",
        )
        require(
            self.top_k is None or self.top_k >= 1,
            f"top_k is {self.top_k}: it must be at least 1, or none to pick among all words",
        )
        require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p is {self.top_p}: it must be greater than 0 and at most 1",
        )
        require(0 <= self.seed < 2**32, f"seed is {self.seed}: it must lie between 0 and 2^32 - 1")
        require(
            self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens}: it must be at least 1",
        )

    @property
    def greedy(self) -> bool:
        """Is the likeliest word taken every time, so that nothing is left to chance?"""
        return self.temperature == 0 or self.top_k == 1


USUAL = Sampling()
FOR_REPORTS = Sampling(max_new_tokens=60)


# A filter takes logits (B, V) and returns logits (B, V): a word that is out has -inf.
LogitsFilter = Callable[[Tensor], Tensor]


def ban(logits: Tensor, banned: Collection[int]) -> Tensor:
    """Give the ids in `banned` no chance at all."""
    ids = torch.tensor(sorted(banned), dtype=torch.int64, device=logits.device)
    return logits.index_fill(-1, ids, -math.inf)


def scale(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature: the probabilities become p^(1/temperature), normalised again."""
    finite = torch.finfo(logits.dtype)
    # Logits matter up to a constant only. With the largest at 0, a quotient by a tiny temperature
    # overflows to -inf, which is the limit wanted, and never to inf, whose softmax is NaN.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / min(max(temperature, finite.tiny), finite.max)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the top_k likeliest, and those that tie with the last of them, as transformers does."""
    smallest = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[..., -1:]  # (B, 1)
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest words that together reach top_p (Holtzman et al. 2020, eq. 2).

    At least one stays. Summed from the unlikely end, as transformers does, so that equal words at
    the border are kept or dropped as there.
    """
    ascending, order = logits.sort(dim=-1)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p  # (B, V)
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)


def filters_of(sampling: Sampling, banned: Collection[int] = ()) -> list[LogitsFilter]:
    """Return the filters in the order in which they apply.

    What is banned goes first, or it would fill places among the top_k; the temperature comes before
    top_p, which works on probabilities, as in transformers.
    """
    filters: list[LogitsFilter] = []
    if banned:
        filters.append(partial(ban, banned=banned))
    if sampling.greedy:
        return filters
    filters.append(partial(scale, temperature=sampling.temperature))
    if sampling.top_k is not None:
        filters.append(partial(keep_top_k, top_k=sampling.top_k))
    if sampling.top_p is not None:
        filters.append(partial(keep_top_p, top_p=sampling.top_p))
    return filters


def choose(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw an id (B,) from each row of logits (B, V), or take the likeliest without a generator.

    Raises UserError where a row has no largest logit: a diverged model gives NaN.
    """
    if not logits.amax(dim=-1).isfinite().all():
        raise UserError(
            "the model's logits are not finite: its training has diverged, "
            "so take an earlier checkpoint or train with a lower rate"
        )
    if generator is None:
        return logits.argmax(dim=-1)
    return logits.softmax(dim=-1).multinomial(1, generator=generator).squeeze(-1)


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


class _Reader:
    """A model behind its window: logits after a text of any length, each position read once."""

    def __init__(self, model: MiniGPT, use_cache: bool) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.cache = model.new_cache(1) if use_cache else None
        self.start = 0

    # The mode and inference_mode last for one call. Held open across a yield they would reach into
    # the code of whoever consumes the ids, and stay there if it stopped half-way.
    @torch.inference_mode()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits (1, V) of the id that follows `ids`, in float32 on the CPU."""
        start = window_start(len(ids), self.model.config.context_length)
        if self.cache is not None and start != self.start:
            self.cache.reset()  # what is kept stands at new positions now: it is read again
        self.start = start
        n_read = self.cache.length if self.cache is not None else 0
        unread = torch.tensor([ids[start + n_read :]], device=self.device)  # (1, T)
        with evaluating(self.model), uncompiled():
            logits = self.model.next_logits(unread, self.cache)
        # Filtered and drawn on the CPU, the same seed means the same draws on any device.
        return logits.float().cpu()


def generate(
    model: MiniGPT,
    prompt_ids: Sequence[int],
    sampling: Sampling = USUAL,
    *,
    banned: Collection[int] = (),
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
) -> Iterator[int]:
    """Return the ids that follow prompt_ids, each as soon as it is drawn.

    banned ids are never drawn; the first of the stop_ids ends the text and is not part of it. The
    cache changes no id, as far as rounding goes; without it each costs a whole window. The model is
    left in the mode it was in, and the global random generator is not touched.
    Raises UserError, before anything is drawn, for an empty prompt and for ids that the model has
    no row for.
    """
    ids, vocab_size = list(prompt_ids), model.config.vocab_size
    require(bool(ids), "the prompt has no ids: start from the id of <eos>")
    for name, group in (("prompt", ids), ("banned", banned), ("stop", stop_ids)):
        unknown = [i for i in group if not 0 <= i < vocab_size]
        require(
            not unknown,
            f"{name} ids {unknown[:5]} lie outside the model's vocabulary of {vocab_size}: "
            "is this the tokenizer it was trained with?",
        )
    require(len(set(banned)) < vocab_size, f"all {vocab_size} ids are banned: leave at least one")
    return _draw(_Reader(model, use_cache), ids, sampling, banned, stop_ids)


def _draw(
    reader: _Reader,
    ids: list[int],
    sampling: Sampling,
    banned: Collection[int],
    stop_ids: Collection[int],
) -> Iterator[int]:
    """Yield one id after the other, appending each to `ids`."""
    generator = None if sampling.greedy else torch.Generator().manual_seed(sampling.seed)
    filters = filters_of(sampling, banned)
    for _ in range(sampling.max_new_tokens):
        logits = reader.next_logits(ids)  # (1, V)
        for apply in filters:
            logits = apply(logits)
        next_id = int(choose(logits, generator))
        if next_id in stop_ids:
            return
        ids.append(next_id)
        yield next_id


def decoded(
    decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], new_ids: Iterable[int]
) -> Iterator[str]:
    """Yield the text that new_ids add to the prompt's, in pieces of whole characters.

    Joined, decode(prompt_ids) and the pieces are decode(all ids). That is why all ids are decoded
    each time: alone, a word knows nothing of the blank before it, nor a byte of its character.
    """
    ids = list(prompt_ids)
    n_shown = len(decode(ids))
    text = ""
    for new_id in new_ids:
        ids.append(new_id)
        text = decode(ids)
        # U+FFFD at the end stands for the first bytes of a character that is still to come.
        n_whole = len(text.rstrip("\ufffd"))
        if n_whole > n_shown:
            yield text[n_shown:n_whole]
            n_shown = n_whole
    if len(text) > n_shown:
        yield text[n_shown:]


def until(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """Yield the pieces up to the stop string that is complete first, which is cut off.

    Text that may be the beginning of a stop string is held back until it is known not to be, so
    the result does not depend on where one piece ends and the next begins.
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [(held.index(s) + len(s), held.index(s)) for s in stop if s in held]
        if found:
            _, cut = min(found)
            if cut:
                yield held[:cut]
            return
        beginnings = (n for s in stop for n in range(1, len(s)) if held.endswith(s[:n]))
        n_free = len(held) - max(beginnings, default=0)
        if n_free:
            yield held[:n_free]
            held = held[n_free:]
    if held:
        yield held


def generate_text(
    model: MiniGPT,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling = USUAL,
    *,
    stop: Sequence[str] = (),
    raw: bool = False,
    banned: Collection[int] | None = None,
    stop_at_eos: bool | None = None,
) -> Iterator[str]:
    """Return the text that follows `prompt`, piece by piece; the prompt itself is not in it.

    stop         strings that end the text and are cut off
    raw          show <eos> and other specials as they are, and let them be drawn
    banned       ids never drawn; None: the tokenizer's specials apart from <eos>, or none if raw
    stop_at_eos  end at <eos>? None: yes where it ends a text (bpe, char), no for the word kinds,
                 where it is a line end like any other and shows as a line break
    An empty prompt starts from <eos>. Raises UserError for an empty stop string.
    """
    require(all(stop), "a stop string is empty: it would end the text before it begins")
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    if banned is None:
        banned = () if raw else tokenizer.special_ids
    if stop_at_eos is None:
        stop_at_eos = tokenizer.kind in ("bpe", "char")
    new_ids = generate(
        model,
        prompt_ids,
        sampling,
        banned=banned,
        stop_ids=(tokenizer.eos_id,) if stop_at_eos else (),
    )
    return until(decoded(partial(tokenizer.decode, raw=raw), prompt_ids, new_ids), stop)


@dataclass(frozen=True)
class Sample:
    """A text as the model goes on from a prompt, for people to judge it by."""

    prompt: str
    text: str


def samples(
    model: MiniGPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str] = ("", "The"),
    sampling: Sampling = FOR_REPORTS,
) -> list[Sample]:
    """Return what the model writes after each prompt, always with the same seed, unselected."""
    return [
        Sample(prompt, "".join(generate_text(model, tokenizer, prompt, sampling)))
        for prompt in prompts
    ]
