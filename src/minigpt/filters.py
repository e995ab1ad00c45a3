"""Filters: logits in, logits out, changed so that a draw from them follows one wish of the user.

    logits ──repetition … ──ban──▶ what may come ──temperature, top k … ──▶ what is drawn from

Each is a pure function `(logits, texts, value) -> logits`, and `FILTERS` the table of them, in the
order in which they apply; its names are those of the settings (`sampling.Sampling`). To add one,
write the function, put it into the table, and give `Sampling` a field of that name.

What has no chance has the logit -inf. In the order, and number for number, these are the
processors and warpers of transformers, and the tests hold them to it; presence and frequency are
those of OpenAI's interface.

B batch · V vocabulary
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt.errors import UserError
from minigpt.sampling import Sampling


@dataclass
class Text:
    """A text that is being written."""

    ids: list[int]
    """All of it so far, the prompt first."""
    n_prompt: int
    """How many of them are the prompt's."""
    log_probs: list[float] = field(default_factory=list)
    """log p of each new id, as the model gave it: before any filter."""
    ended: str | None = None
    """Why nothing more will come; None: more may come."""
    sample: int = 0
    """Which of several texts of one prompt it is: each has draws of its own."""

    @classmethod
    def of(cls, prompt_ids: Sequence[int], sample: int = 0) -> "Text":
        """Return a text that is all prompt still."""
        return cls(list(prompt_ids), len(prompt_ids), sample=sample)

    @property
    def new_ids(self) -> list[int]:
        """The ids behind the prompt's."""
        return self.ids[self.n_prompt :]

    @property
    def n_new(self) -> int:
        """How many ids were written."""
        return len(self.ids) - self.n_prompt


@dataclass(frozen=True)
class TokenRules:
    """What a user wants of single tokens, by their ids."""

    banned: Collection[int] = ()
    """Never written."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to their logits."""
    ends: Collection[int] = ()
    """The first of them ends a text, and is no part of it."""


class Least(NamedTuple):
    """How many new ids a text is to have before any of some may end it."""

    n_ids: int
    ends: Collection[int]


NO_RULES = TokenRules()

Texts = Sequence[Text]  # B of them, one for each row of the logits
Filter = Callable[[Tensor, Texts, Any], Tensor]
Wish = tuple[Filter, Any]  # and the value that it is to be applied with


def bias(logits: Tensor, texts: Texts, added: Mapping[int, float]) -> Tensor:
    """Add to the logits of some ids: +1 makes one e times as likely beside all others."""
    ids = torch.tensor(list(added), dtype=torch.int64, device=logits.device)
    return logits.index_add(-1, ids, logits.new_tensor([*added.values()]).expand(len(texts), -1))


def repetition_penalty(logits: Tensor, texts: Texts, penalty: float) -> Tensor:
    """Divide the logits of all that stands in the text; those below 0 are multiplied instead.

    Keskar et al. 2019, section 4.1, with that change of transformers, without which a penalty would
    be a reward below 0. The prompt counts.
    """
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        seen = torch.tensor(text.ids)
        row[seen] = torch.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    return logits


def presence_penalty(logits: Tensor, texts: Texts, penalty: float) -> Tensor:
    """Take the penalty from each id that was written: OpenAI's α_presence. The prompt is free."""
    return logits - penalty * (_times_written(logits, texts) > 0)


def frequency_penalty(logits: Tensor, texts: Texts, penalty: float) -> Tensor:
    """Take the penalty from each id as often as it was written: OpenAI's α_frequency."""
    return logits - penalty * _times_written(logits, texts)


def _times_written(logits: Tensor, texts: Texts) -> Tensor:
    """Return how often each id was written in each text, (B, V); the prompt does not count."""
    size = logits.size(-1)
    return torch.stack(
        [torch.tensor(t.new_ids, dtype=torch.int64).bincount(minlength=size) for t in texts]
    )


def no_repeat_ngram(logits: Tensor, texts: Texts, n: int) -> Tensor:
    """Ban what would write n ids in a row that stand in the text already (Paulus et al. 2018)."""
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        if len(text.ids) >= n:
            grams = torch.tensor(text.ids).unfold(0, n, 1)  # (G, n), all n in a row so far
            newest = torch.tensor(text.ids[len(text.ids) - n + 1 :], dtype=torch.int64)  # (n - 1,)
            begins_alike = (grams[:, :-1] == newest).all(dim=-1)
            row[grams[begins_alike, -1]] = -math.inf
    return logits


def banned(logits: Tensor, texts: Texts, ids: Collection[int]) -> Tensor:  # noqa: ARG001
    """Give some ids no chance at all."""
    columns = torch.tensor(sorted(ids), dtype=torch.int64, device=logits.device)
    return logits.index_fill(-1, columns, -math.inf)


def min_new_tokens(logits: Tensor, texts: Texts, least: Least) -> Tensor:
    """Give what would end a text no chance where it has too few new ids."""
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        if text.n_new < least.n_ids:
            row[sorted(least.ends)] = -math.inf
    return logits


def temperature(logits: Tensor, texts: Texts, value: float) -> Tensor:  # noqa: ARG001
    """Divide by the temperature: the probabilities become p^(1/temperature), normalised again."""
    finite = torch.finfo(logits.dtype)
    # Logits matter up to a constant only. With the largest at 0, a quotient by a tiny temperature
    # overflows to -inf, which is the limit wanted, and never to inf, whose softmax is NaN.
    # Clamped, for -inf, where every id is banned, would become NaN too.
    shifted = logits - logits.amax(dim=-1, keepdim=True).clamp(min=finite.min)
    return shifted / min(max(value, finite.tiny), finite.max)


def top_k(logits: Tensor, texts: Texts, k: int) -> Tensor:  # noqa: ARG001
    """Keep the k likeliest, and those that tie with the last of them (Fan et al. 2018)."""
    smallest = logits.topk(min(k, logits.size(-1)), dim=-1).values[..., -1:]  # (B, 1)
    return logits.masked_fill(logits < smallest, -math.inf)


def top_p(logits: Tensor, texts: Texts, p: float) -> Tensor:  # noqa: ARG001
    """Keep the fewest likeliest ids that together reach p (Holtzman et al. 2020, equation 2).

    At least one stays. Summed from the unlikely end, as transformers does, so that equal ids at the
    border are kept or dropped as there.
    """
    ascending, order = logits.sort(dim=-1)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p  # (B, V)
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)


def min_p(logits: Tensor, texts: Texts, p: float) -> Tensor:  # noqa: ARG001
    """Keep what is at least p times as likely as the likeliest (Nguyen et al. 2024, section 3)."""
    probabilities = logits.softmax(dim=-1)
    least = p * probabilities.amax(dim=-1, keepdim=True)  # (B, 1)
    return logits.masked_fill(probabilities < least, -math.inf)


def typical_p(logits: Tensor, texts: Texts, p: float) -> Tensor:  # noqa: ARG001
    """Keep the ids whose surprise is nearest to the expected one, until they reach p together.

    Locally typical sampling (Meister et al. 2023, section 4): people avoid what says nothing as
    much as what says too much at once. The likeliest id may be out.
    """
    log_probs = logits.log_softmax(dim=-1)
    # What is banned has p log p = 0, by its limit, where 0 · -inf would be NaN.
    entropy = -(log_probs.exp() * log_probs).nansum(dim=-1, keepdim=True)  # (B, 1)
    unusual = (-log_probs - entropy).abs()
    nearest_first = unusual.argsort(dim=-1)
    nearest = unusual.gather(-1, nearest_first)
    mass = logits.gather(-1, nearest_first).softmax(dim=-1).cumsum(dim=-1)
    # The one that reaches p stays, and what is as usual as that.
    last = (mass < p).sum(dim=-1, keepdim=True).clamp(max=logits.size(-1) - 1)  # (B, 1)
    return logits.masked_fill(unusual > nearest.gather(-1, last), -math.inf)


FILTERS: dict[str, Filter] = {
    "bias": bias,
    "repetition_penalty": repetition_penalty,
    "presence_penalty": presence_penalty,
    "frequency_penalty": frequency_penalty,
    "no_repeat_ngram": no_repeat_ngram,
    # What is banned must be out before the next ones, or it would fill places among the likeliest.
    "banned": banned,
    "min_new_tokens": min_new_tokens,
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "typical_p": typical_p,
}
# They shape chance only: of no use where the likeliest is taken.
OF_CHANCE = {"temperature", "top_k", "top_p", "min_p", "typical_p"}


def wishes_of(sampling: Sampling, rules: TokenRules = NO_RULES) -> list[Wish]:
    """Return the filters that are asked for, each with its value, in the order of the table."""
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    values |= {"bias": rules.bias or None, "banned": rules.banned or None}
    least = Least(sampling.min_new_tokens, rules.ends)
    values["min_new_tokens"] = least if least.n_ids and least.ends else None
    unused = OF_CHANCE if sampling.greedy else set()
    return [
        (apply, values[name])
        for name, apply in FILTERS.items()
        if values[name] is not None and name not in unused
    ]


def filtered(logits: Tensor, texts: Texts, wishes: Sequence[Wish]) -> Tensor:
    """Return logits (B, V) as the wishes have them.

    Raises UserError where they leave nothing to draw, and where a largest logit is inf or NaN.
    """
    for apply, value in wishes:
        logits = apply(logits, texts, value)
    likeliest = logits.amax(dim=-1)  # (B,), NaN where any logit of the row is
    if (likeliest == -math.inf).any():
        raise UserError(
            "nothing is left to draw: every token is banned, so loosen no_repeat_ngram or the bans"
        )
    if not likeliest.isfinite().all():
        raise UserError(
            "the logits are not finite once penalties and bias are applied: take smaller ones"
        )
    return logits
