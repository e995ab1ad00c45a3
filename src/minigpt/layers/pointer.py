"""Pointer: say again what the text has said, where it was in a place like this one.

In: the last hidden vectors (B, T, D) and the ids (B, T) that they came from. Out: how much of the
probability is left to the vocabulary, and how much goes to each earlier place, for its word:

    p(word) = g · p_vocabulary(word) + Σ_j [word = x_{j+1}] a_j
    (g, a) = softmax(sentinel, θ cos(h_t, h_0) … θ cos(h_t, h_{t−2}))

A pointer sentinel mixture (Merity et al. 2016, section 2, equations 3 to 7; WikiText-2 comes from
the same paper). To say a name again, a table must know it by heart; a pointer has to find it.
Here place j offers the word after it, x_{j+1}, and is found by the vector from which that word was
to be guessed, as in the neural cache (Grave et al. 2017): what finds and what is found are of one
kind, so there is nothing to project. The last word read, x_t, is offered by place t − 1, which is
much like place t and always close by; but hardly any text says a word twice on end, so it is left
to the vocabulary.

B batch · T positions · S places, of which they are the last · D d_model · V vocabulary
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.layers.attention import KeyValueCache


class Copied(NamedTuple):
    """What a pointer says of some targets: a pair of numbers for each."""

    log_gate: Tensor
    """(…), log g: the share that the vocabulary's probability has in the mixture"""
    chance: Tensor
    """(…), Σ a_j over the places that offer the target; 0 where none does"""


class PointerCache(KeyValueCache):
    """The keys and values of the blocks, and beside them what a pointer needs of each place."""

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], directions: Tensor, ids: Tensor
    ) -> None:
        """Take empty buffers: the first two as the base does, directions (B, T, D), ids (B, T)."""
        super().__init__(keys, values)
        self.directions, self.ids = directions, ids

    def keep_places(self, directions: Tensor, ids: Tensor) -> None:
        """Store directions (B, T, D) and ids (B, T) of the last T places that are counted."""
        newest = slice(self.length - ids.size(1), self.length)
        self.directions[:, newest] = directions
        self.ids[:, newest] = ids

    def select(self, texts: Tensor) -> "PointerCache":
        """Return a cache of some of the texts, as the base does."""
        chosen = super().select(texts)
        assert isinstance(chosen, PointerCache)
        chosen.directions, chosen.ids = self.directions[texts], self.ids[texts]
        return chosen

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the directions (B, S, D) and ids (B, S) of all places so far."""
        return self.directions[:, : self.length], self.ids[:, : self.length]


class Pointer(nn.Module):
    """A last attention, whose weights are probabilities: to places, and so to what they offer."""

    def __init__(self, d_model: int) -> None:
        """Begin with shares that differ little; all places together get about two thirds."""
        super().__init__()
        self.sentinel = nn.Parameter(torch.zeros(d_model))
        self.sentinel_score = nn.Parameter(torch.tensor(7.0))
        self.log_sharpness = nn.Parameter(torch.tensor(10.0).log())  # θ, which stays above 0

    def forward(self, hidden: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log g (B, T) and the weights a (B, T, S) of the places.

        hidden       (B, T, D), of the last T places; each sees those more than one before itself
        directions   (B, S, D), the hidden vectors of all places, made 1 long
        """
        queries = directions[:, -hidden.size(1) :]  # (B, T, D)
        cosines = queries @ directions.transpose(-2, -1)  # (B, T, S)
        scores = at_least_float32(cosines) * self.log_sharpness.exp()
        n_positions, n_places = scores.shape[-2:]
        unseen = torch.ones(n_positions, n_places, dtype=torch.bool, device=hidden.device)
        scores = scores.masked_fill(unseen.triu(n_places - n_positions - 1), -torch.inf)
        # Where there is no place yet there is the sentinel: the first words are the vocabulary's.
        sentinel = at_least_float32(hidden) @ self.sentinel + self.sentinel_score  # (B, T)
        log_shares = torch.cat((sentinel[..., None], scores), dim=-1).log_softmax(dim=-1)
        return log_shares[..., 0], log_shares[..., 1:].exp()

    def keep(self, hidden: Tensor, ids: Tensor, cache: KeyValueCache) -> None:
        """Put into cache, which counts them already, ids (B, T) that made hidden (B, T, D)."""
        assert isinstance(cache, PointerCache)
        cache.keep_places(direction(hidden), ids)

    def copied(self, hidden: Tensor, ids: Tensor, targets: Tensor) -> Copied:
        """Return what the places of a text say of targets (B, T), which follow its ids (B, T)."""
        log_gate, weights = self(hidden, direction(hidden))
        offers_target = _offered(ids)[:, None] == targets[..., None]  # (B, T, S)
        return Copied(log_gate, (weights * offers_target).sum(dim=-1))

    def mixed(
        self, logits: Tensor, hidden: Tensor, ids: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return log p(word) (B, T', V) of what follows the last T' of ids (B, T).

        logits   (B, T', V), the vocabulary's
        hidden   (B, T, D)
        cache    keeps ids and what came before them
        """
        directions, seen = direction(hidden), ids
        if cache is not None:
            assert isinstance(cache, PointerCache)
            directions, seen = cache.places()
        log_gate, weights = self(hidden[:, -logits.size(1) :], directions)
        log_vocabulary = at_least_float32(logits).log_softmax(dim=-1) + log_gate[..., None]
        of_words = chances(weights, seen, logits.size(-1))
        # Most words are offered nowhere. At 0 the logarithm would have no gradient.
        log_pointer = of_words.clamp(min=torch.finfo(of_words.dtype).tiny).log()
        return torch.logaddexp(log_vocabulary, log_pointer)


def chances(weights: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Return what weights (B, T, S) of the places of ids (B, S) give to each word, (B, T, V)."""
    offered = _offered(ids)[:, None].expand_as(weights)  # (B, T, S)
    of_words = weights.new_zeros(*weights.shape[:-1], vocab_size)
    return of_words.scatter_add(-1, offered, weights)


class NoPointer(nn.Module):
    """Leave every word to the vocabulary, for models without a pointer."""

    def keep(self, *_: object) -> None:
        """Keep nothing."""

    def copied(self, *_: object) -> None:
        """Say nothing of the targets."""

    def mixed(self, logits: Tensor, *_: object) -> Tensor:
        """Return the logits (B, T', V) as they came."""
        return logits


def direction(hidden: Tensor) -> Tensor:
    """Return hidden (…, D) made 1 long, so that products are cosines whatever the last norm did."""
    return F.normalize(at_least_float32(hidden), dim=-1)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, which autocast may have made bfloat16: too coarse for chances that add up to 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _offered(ids: Tensor) -> Tensor:
    """Return the word after each place (B, S); after the last, which no one sees, any id."""
    return torch.cat((ids[:, 1:], ids[:, -1:]), dim=1)
