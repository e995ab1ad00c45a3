"""Optimizers: how gradients become steps, and how large a step is at which moment.

In: a model and its `OptimConfig`. Out: a list of optimizers, and `rate_factor(progress)`, by which
their rates are multiplied.

The matrices inside the blocks go to Muon, which makes each update orthogonal, so that all
directions of a matrix learn at one speed (Jordan et al. 2024). Tables, norms, biases and whatever
maps from or to the vocabulary go to AdamW, which treats each number alone (Loshchilov and Hutter
2019).
"""

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from minigpt.config import OptimConfig


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


def make_optimizers(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """Return the optimizers that together train every parameter of model once."""
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
