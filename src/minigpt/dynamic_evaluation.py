"""Dynamic evaluation: the model goes on learning from the text, from what it was scored on.

In: a model, ids, and settings that `fit_dynamic` found on valid. Out: the nats of each id.

    score a segment ─▶ step down its gradient ─▶ score the next segment ─▶ …

An article that has said "Galveston" once will say it again, and a model that has just learnt the
word is less surprised. No id is ever scored by weights that have seen it, so every figure is that
of an honest prediction; but it is that of another model at each segment, and belongs beside static
figures, never among them (Krause, Kahembwe, Murray and Renals 2018).

Each segment is the last part of a window, whose first part is there to look back at: the windows of
static evaluation with a stride of one segment.

T window · S segment, its last part · D d_model
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minigpt.compilation import uncompiled
from minigpt.errors import require
from minigpt.evaluate import Window, check_windows, windows
from minigpt.model import MiniGPT

# Ids of valid that settings are tried on. A try costs as much as to train on them once.
FITTED_ON_AT_MOST = 20_000
# 0 is among them: a model that learning on would harm is left alone.
_RATES = (0.0, 0.01, 0.02, 0.05, 0.1)
_DECAY = 0.003


@dataclass(frozen=True)
class DynamicSettings:
    """How fast the model learns from the text that it is scored on, and how fast it forgets."""

    rate: float
    """η, the length of a step; 0 is static evaluation with a stride of `segment`."""
    decay: float
    """λ, the share of the way back to the trained weights that every step takes."""
    segment: int
    """S: so many ids are scored, and then learnt from, at a time."""

    def __post_init__(self) -> None:
        """Refuse what is no step."""
        require(0 <= self.rate < math.inf, f"rate is {self.rate}: it must be at least 0")
        require(
            0 <= self.decay < 1, f"decay is {self.decay}: it must be at least 0 and less than 1"
        )
        require(self.segment >= 1, f"segment is {self.segment}: it must be at least 1")


def dynamic_token_nats(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    settings: DynamicSettings,
    *,
    context: int,
) -> np.ndarray:
    """Return the nats of each id, (len(ids),) float32. What learns is a copy of model.

    Beside the copy and the trained weights, nothing in memory grows with the text. There are no
    batches, for every segment waits for the step before it. Raises UserError as `scored_states`
    does, the segment being the stride.
    """
    check_windows(model, ids, context, settings.segment)
    # Dropout stays off: what is learnt here is used at once, and only here.
    learner = copy.deepcopy(model).eval().requires_grad_(True)
    weights = list(learner.parameters())
    trained = [weight.detach().clone() for weight in weights]
    nats = np.empty(len(ids), dtype=np.float32)
    with torch.enable_grad(), uncompiled():
        for window in windows(len(ids), context, settings.segment):
            total, row_nats = _window_nats(learner, ids, eos_id, window)
            # Written down before the step: from here on the weights have seen these ids.
            nats[window.scored_from : window.end] = row_nats.detach().cpu().numpy()
            gradients = torch.autograd.grad(total / len(row_nats), weights, materialize_grads=True)
            _step(weights, gradients, trained, settings)
    return nats


def _window_nats(
    model: MiniGPT, ids: np.ndarray, eos_id: int, window: Window
) -> tuple[Tensor, Tensor]:
    """Return the nats of the window's segment, with a gradient, and of each of its ids (S,)."""
    device = next(model.parameters()).device
    before = ids[window.begin - 1] if window.begin else eos_id
    seen = np.array([before, *ids[window.begin : window.end]], dtype=np.int64)  # (T + 1,)
    row = torch.from_numpy(seen).to(device)
    skipped = window.scored_from - window.begin
    states = model.states(row[None, :-1], row[None, 1:], skipped)
    result: tuple[Tensor, Tensor] = model.output.nats(*states)
    return result


@torch.no_grad()
def _step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    trained: Sequence[Tensor],
    settings: DynamicSettings,
) -> None:
    """Let each weight take a step: W ← W − η ∇ + λ (W₀ − W)   — section 5.

    Plain gradient descent with their decay towards the trained weights, but one after the other:
    decay starts where the step has led, W ← (1 − λ) (W − η ∇) + λ W₀. Their other step divides by
    the root mean square of each weight's gradients on train. On 20,000 ids of WikiText-2 it took
    the perplexity from 113 to 93, this one to 96: not enough for the train text and as much memory
    again. Mean squares gathered on the way, without train, gave 106.
    """
    for weight, gradient, start in zip(weights, gradients, trained, strict=True):
        weight.sub_(gradient, alpha=settings.rate)
        weight.lerp_(start, settings.decay)


def fit_dynamic(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    *,
    context: int,
) -> DynamicSettings:
    """Return the settings with the best of the rates tried: ids cost the fewest nats under it.

    Give it valid, never test. The rates, 0 among them, are tried on the first FITTED_ON_AT_MOST
    ids, for each try reads them as slowly as training does. Decay is given, and segments are half
    the context. Raises UserError as `dynamic_token_nats` does.
    """
    tried = ids[:FITTED_ON_AT_MOST]
    choices = [DynamicSettings(rate, _DECAY, max(1, context // 2)) for rate in _RATES]
    costs = [
        # A rate that is too high may end in nan: that is no choice.
        np.nan_to_num(
            dynamic_token_nats(model, tried, eos_id, choice, context=context), nan=math.inf
        ).sum(dtype=np.float64)
        for choice in choices
    ]
    return choices[int(np.argmin(costs))]


def dynamic_at_ends(settings: DynamicSettings) -> dict[str, str]:
    """Return `rate` as the lowest or highest where it is, of those that `fit_dynamic` tries.

    Beyond the highest there may be a better one. The lowest is 0: learning on does not help.
    """
    ends = {min(_RATES): "lowest", max(_RATES): "highest"}
    return {"rate": ends[settings.rate]} if settings.rate in ends else {}
