"""Optimizers: how gradients become steps, and how large a step is at which moment.

In: a model and its `OptimConfig`. Out: a list of optimizers, and `rate_factor(progress)`, by which
their rates are multiplied.

The matrices inside the blocks go to Muon, which makes each update orthogonal, so that all
directions of a matrix learn at one speed (Jordan et al. 2024). Tables, norms, biases and whatever
maps from or to the vocabulary go to AdamW, which treats each number alone (Loshchilov and Hutter
2019).

R rows · C columns
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from minigpt.config import OptimConfig, Precision


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, in dtype, a matrix (R, C) with all singular values near 1: U·Vᵀ of its U·S·Vᵀ.

    Newton-Schulz, five rounds of X ← aX + b(XXᵀ)X + c(XXᵀ)²X (Jordan et al. 2024): three products
    of matrices each, where an SVD would take many times as long. The values end between 0.7 and
    1.2, which serves Muon as well as 1 would.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype, copy=True)
    x = x.T if is_tall else x  # the squares below are of the shorter side
    x.div_(x.norm().clamp(min=1e-7))  # no singular value above 1, or it would not converge
    for _ in range(5):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.Muon):
    """PyTorch's Muon, equal to the bit, that makes updates orthogonal in another precision too.

    PyTorch's does so in bfloat16 alone. A processor without instructions for that takes 40 to 60
    times as long as in float32, and most of the time of training with it.
    """

    def __init__(self, matrices: Iterable[Tensor], dtype: torch.dtype, **settings: Any) -> None:
        """Take what PyTorch's takes, and the precision of the products."""
        super().__init__(matrices, **settings)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move each matrix against its orthogonal momentum, looking ahead as Nesterov does."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(momentum, group["momentum"])
                n_rows, n_columns = matrix.shape
                # As large a step for each row of a tall matrix as for one of a square.
                rate = group["lr"] * math.sqrt(max(1, n_rows / n_columns))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(orthogonal(ahead, self._dtype), alpha=-rate)


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the matrices inside the blocks: what Muon is made for.

    Queries, keys and values are matrices of their own, and are made orthogonal each by itself.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and ".blocks." in f".{name}"
    }


def decayed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters that weight decay pulls to 0: all but norms and biases.

    The same grouping as the Trainer of transformers. A norm's weight rests at 1, not at 0.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not (name.endswith("bias") or "norm" in name.split(".")[-2:][0])
    }


def make_optimizers(
    model: nn.Module, config: OptimConfig, precision: Precision = "float32"
) -> list[Optimizer]:
    """Return the optimizers that together train every parameter of model once.

    precision   of Muon's products: that of the model's
    """
    matrices = hidden_matrices(model) if config.matrix_rate > 0 else {}
    decayed = decayed_parameters(model)
    others = {n: p for n, p in model.named_parameters() if n not in matrices}
    groups = [
        {
            "params": [p for n, p in others.items() if n in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for n, p in others.items() if n not in decayed], "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = [
        AdamW(
            [group for group in groups if group["params"]],
            lr=config.rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,  # one pass over memory instead of a dozen
        )
    ]
    if matrices:
        optimizers.append(
            Muon(
                list(matrices.values()),
                torch.bfloat16 if precision == "bfloat16" else torch.float32,
                lr=config.matrix_rate,
                momentum=config.momentum,
                weight_decay=config.matrix_weight_decay,
            )
        )
    return optimizers


def rate_factor(progress: float, config: OptimConfig) -> float:
    """Return what the rates are multiplied by at `progress`, the share of the budget used, 0 to 1.

    Up in a straight line, level, down in a straight line (a trapezoid; Hägele et al. 2024): unlike
    a cosine it says how long the model learns at full rate.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < config.warm_up:
        # The first step comes before any progress, and at rate 0 it would be lost.
        return max(0.1, progress / config.warm_up)
    if progress <= config.hold or config.hold == 1:
        return 1.0
    share_left = (1 - progress) / (1 - config.hold)
    return config.final_rate + (1 - config.final_rate) * share_left


def set_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set each group's rate to `factor` times the one that it began with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
