"""Temperature: the model's own probabilities, made flatter or sharper by one number τ.

In: a model, ids, and the temperature that `fit_temperature` found on valid. Out: nats of each id.

    p(word) = softmax(logits / τ)

A model can be right about which word is likely and wrong about how sure it is. One number, fitted
on a text it was not trained on, takes much of that back and never changes which word comes first.

The logits are linear in the hidden vector and the bias, so to divide them all these two are
divided: no (N, V) tensor is made. With the adaptive softmax that tempers each of its softmaxes, the
head and the clusters, and what they multiply to is a probability over the whole vocabulary as
before. Beside a pointer it tempers the vocabulary's softmax alone, before the two are mixed: how
sharply the pointer looks, and how much it is listened to, was learned by itself. Only there may
another word come first.

N scored positions · D d_model · V vocabulary
"""

import math

import numpy as np
import torch
from torch import Tensor

from minigpt.errors import require
from minigpt.evaluate import scored_states
from minigpt.model import MiniGPT, States
from minigpt.output import FullSoftmax, linear_cross_entropy

# Distance, as a share, at which slope and curvature are measured: wide enough for float32 nats.
_STEP = 0.05
# Steps of Newton's method: from a model as it comes, two or three are taken.
_MOST_STEPS = 8


@torch.no_grad()
def _nats(model: MiniGPT, states: States, inverse: float) -> tuple[Tensor, Tensor]:
    """Return what `model.output.nats` does, a scalar and (N,), for logits multiplied by 1/τ."""
    output, hidden = model.output, states.hidden * inverse  # (N, D)
    if isinstance(output, FullSoftmax) and output.bias is not None:
        bias = output.bias * inverse  # (V,)
        return linear_cross_entropy(hidden, output.table, states.targets, bias, states.copied)
    return output.nats(hidden, states.targets, states.copied)


def tempered_token_nats(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    temperature: float,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
) -> np.ndarray:
    """Return the nats of each id at that temperature, (len(ids),) float32.

    1 is the model as it is. Raises UserError as `scored_states` does, and for a temperature that is
    not above 0.
    """
    require(0 < temperature < math.inf, f"temperature is {temperature}: it must be greater than 0")
    nats = np.empty(len(ids), dtype=np.float32)
    for begin, end, states in scored_states(
        model, ids, eos_id, context=context, stride=stride, batch_size=batch_size
    ):
        _, row_nats = _nats(model, states, 1 / temperature)
        nats[begin:end] = row_nats.cpu().numpy()
    return nats


def fit_temperature(
    model: MiniGPT,
    ids: np.ndarray,
    eos_id: int,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
) -> float:
    """Return the temperature at which ids cost the fewest nats. Give it valid, never test.

    Guo et al. 2017, section 4.2 ("temperature scaling"). In 1/τ the nats of a softmax are convex,
    so Newton's method finds their one minimum; mixed with a pointer's they need not be. Each of
    its steps reads the text once and scores it at three temperatures. The answer lies between 1/8
    and 8.
    """
    inverse = 1.0
    for _ in range(_MOST_STEPS):
        points = np.array([1 - _STEP, 1, 1 + _STEP]) * inverse
        totals = np.zeros(3)
        for _, _, states in scored_states(
            model, ids, eos_id, context=context, stride=stride, batch_size=batch_size
        ):
            for i, point in enumerate(points):
                total, _ = _nats(model, states, float(point))
                totals[i] += total.item()
        better = float(np.clip(_vertex(points, totals), inverse / 2, inverse * 2).clip(1 / 8, 8))
        converged = abs(better / inverse - 1) < _STEP
        inverse = better
        if converged:
            break
    return 1 / inverse


def _vertex(points: np.ndarray, totals: np.ndarray) -> float:
    """Return where the parabola through three evenly spaced points is lowest."""
    slope = totals[2] - totals[0]
    curvature = totals[2] - 2 * totals[1] + totals[0]
    if curvature <= 0:  # as flat as float32 can tell: downhill, as far as a step may go
        return math.inf if slope < 0 else 0.0 if slope > 0 else float(points[1])
    return float(points[1] - (points[1] - points[0]) * slope / curvature / 2)
