"""Neural cache: what came up lately, in a place like this one, is likely to come up again.

In: a model, ids, and settings that `fit_cache` found on valid. Out: the nats of each id.

    hidden ──model.output──▶ p_model(word) ─────────────────────┐
       │                                                        ├─▶ (1 − λ) p_model + λ p_cache
       └──▶ the last S (hidden vector, id that followed) ─▶ p_cache(word)

Nothing is trained: the hidden vector before a word is an address, and the word is what is kept
there (Grave, Joulin and Usunier 2017). The cache holds ids that were scored before, no others, and
what each of them cost does not depend on the batch size.

N scored positions · S pairs in the cache · D d_model · F flatnesses tried at once
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.errors import require
from minigpt.evaluate import ScoredStates, scored_states
from minigpt.model import MiniGPT

# With S = 4,000 the similarities of so many rows are 4 MB: they stay in a processor's cache.
_ROWS = 256
# Twice as many pairs gained 0.4 % more on WikiText-2 for twice the time; four times as many lost.
_SIZE = 4_000
_FLATNESSES = (6.0, 9.0, 12.0, 14.0, 16.0, 20.0, 26.0, 34.0)
_WEIGHTS = tuple(round(0.02 * i, 2) for i in range(31))


@dataclass(frozen=True)
class CacheSettings:
    """How far back the cache looks, and how much it is listened to."""

    size: int
    """S: the last so many (hidden vector, id that followed) pairs are kept."""
    flatness: float
    """θ: the higher, the more a similar place counts than any other; 0 counts all alike."""
    weight: float
    """λ: the share of the probability that the cache hands out."""

    def __post_init__(self) -> None:
        """Refuse what is no cache, or no probability."""
        require(self.size >= 1, f"cache size is {self.size}: it must be at least 1")
        require(
            0 <= self.flatness < math.inf,
            f"cache flatness is {self.flatness}: it must be at least 0",
        )
        require(
            0 <= self.weight < 1,
            f"cache weight is {self.weight}: it must be at least 0 and less than 1",
        )


class NeuralCache:
    """The last S pairs of a hidden vector and the id that followed it, and what they foretell.

    It runs on over the ends of articles: what an article said is forgotten S ids later, no sooner.
    """

    def __init__(self, size: int, flatnesses: Sequence[float]) -> None:
        """Begin with nothing kept, to be read at each of the flatnesses."""
        self._size = size
        self._flatnesses = flatnesses
        self._keys: Tensor | None = None  # (S, D)
        self._values: Tensor | None = None  # (S,)

    def read_and_keep(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return log p_cache (F, N) of each target, given what came before it; then keep them.

        hidden (N, D), targets (N,), which follow those of the call before. A target that is not
        there has −inf. Where nothing was kept yet, at the first position of all, it is nan.
        """
        # Equation 2 takes the product of the vectors themselves. The last norm makes them all
        # about as long; without their length, a θ means the same in every model.
        keys = F.normalize(hidden.float(), dim=-1)
        parts = [
            self._read_and_keep_some(keys[start : start + _ROWS], targets[start : start + _ROWS])
            for start in range(0, len(targets), _ROWS)
        ]
        return torch.cat(parts, dim=1)

    def _read_and_keep_some(self, queries: Tensor, targets: Tensor) -> Tensor:
        """Do that for no more than _ROWS rows: here alone a tensor is (N, S + N)."""
        if self._keys is None or self._values is None:
            self._keys, self._values = queries[:0], targets[:0]
        keys = torch.cat((self._keys, queries))  # (S + N, D)
        values = torch.cat((self._values, targets))  # (S + N,)
        place = torch.arange(len(values), device=values.device)
        own_place = place[len(self._values) :, None]  # (N, 1)
        visible = (place < own_place) & (place >= own_place - self._size)  # (N, S + N)
        similarities = (queries @ keys.T).masked_fill(~visible, -math.inf)
        is_target = values == targets[:, None]  # (N, S + N)
        # p_cache(w) ∝ Σ_i [w = x_i] exp(θ h·h_i)   — equation 2
        shares = [
            ((theta * similarities).softmax(dim=-1) * is_target).sum(dim=-1)
            if theta
            else (visible & is_target).sum(dim=-1) / visible.sum(dim=-1)  # for 0 · inf is nan
            for theta in self._flatnesses
        ]
        self._keys, self._values = keys[-self._size :], values[-self._size :]
        return torch.stack(shares).log()  # (F, N)


def _mixed(log_model: Tensor, log_cache: Tensor, weight: float) -> Tensor:
    """Return log ((1 − λ) p_model + λ p_cache)   — equation 3, the linear interpolation."""
    if weight == 0:
        return log_model
    return torch.logaddexp(log_model + math.log1p(-weight), log_cache + math.log(weight))


class _Read(NamedTuple):
    begin: int
    end: int
    log_model: Tensor  # (N,)
    log_cache: Tensor  # (F, N)


@torch.no_grad()
def _read(
    model: MiniGPT, all_states: Iterator[ScoredStates], size: int, flatnesses: Sequence[float]
) -> Iterator[_Read]:
    """Yield what model and cache give each target, a batch at a time."""
    cache = NeuralCache(size, flatnesses)
    for begin, end, states in all_states:
        _, row_nats = model.output.nats(*states)
        log_cache = cache.read_and_keep(states.hidden, states.targets)
        if begin == 0:
            log_cache[:, 0] = -row_nats[0]  # an empty cache has nothing to say: the model speaks
        yield _Read(begin, end, -row_nats, log_cache)


def cached_token_nats(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    settings: CacheSettings,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
) -> np.ndarray:
    """Return the nats of each id under model and cache together, (len(ids),) float32.

    Raises UserError as `scored_states` does.
    """
    nats = np.empty(len(ids), dtype=np.float32)
    all_states = scored_states(
        model, ids, eos_id, context=context, stride=stride, batch_size=batch_size
    )
    for read in _read(model, all_states, settings.size, [settings.flatness]):
        log_mixed = _mixed(read.log_model, read.log_cache[0], settings.weight)
        nats[read.begin : read.end] = -log_mixed.cpu().numpy()
    return nats


def fit_cache(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
) -> CacheSettings:
    """Return the best of the settings tried: under which ids cost the fewest nats.

    Give it valid, never test. The text is read once; every pair of a θ and a λ is tried on all of
    it, and S is given. Raises UserError as `scored_states` does.
    """
    totals = np.zeros((len(_FLATNESSES), len(_WEIGHTS)))
    all_states = scored_states(
        model, ids, eos_id, context=context, stride=stride, batch_size=batch_size
    )
    for read in _read(model, all_states, _SIZE, _FLATNESSES):
        for j, weight in enumerate(_WEIGHTS):
            log_mixed = _mixed(read.log_model, read.log_cache, weight)  # (F, N), or (N,) at 0
            # First to the CPU: the graphics chip of a Mac has no float64.
            totals[:, j] -= log_mixed.cpu().double().sum(dim=-1).numpy()
    best = int(totals.argmin())
    return CacheSettings(_SIZE, _FLATNESSES[best // len(_WEIGHTS)], _WEIGHTS[best % len(_WEIGHTS)])


def cache_at_ends(settings: CacheSettings) -> dict[str, str]:
    """Return which of the settings that `fit_cache` chose are the lowest or highest it tries.

    Beyond such a one there may be a better. A weight of 0 is different: the cache does not help,
    and no flatness is better than another.
    """
    tried: dict[str, tuple[float, tuple[float, ...]]] = {"weight": (settings.weight, _WEIGHTS)}
    if settings.weight:
        tried = {"flatness": (settings.flatness, _FLATNESSES), **tried}
    return {
        name: "lowest" if chosen == min(choices) else "highest"
        for name, (chosen, choices) in tried.items()
        if chosen in (min(choices), max(choices))
    }
