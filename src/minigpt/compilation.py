"""Compilation: torch.compile, where a trial on this machine shows that it pays.

In: a model and a function that takes a training step's forward and backward pass. Out: the model,
compiled in place or left as it was, and one line that says which and why.
"""

import copy
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from minigpt.model import MiniGPT, Objective

# The fastest of them counts: whatever else the machine does only makes a pass slower.
TRIAL_ROUNDS = 4

# Runs forward and backward once on a micro-batch of training, with the objective it is given.
Pass = Callable[[Objective], None]


def compile_blocks(model: MiniGPT) -> None:
    """Compile each block in place: they share their code, so it is compiled once. And the pointer.

    Names in the state dict stay. The softmax over the vocabulary is left alone: the adaptive one
    has other shapes in every batch.
    """
    for part in (*model.blocks, model.pointer):
        # PyTorch's own random numbers: compiled ones, made one by one, took twice their time.
        part.compile(options={"fallback_random": True})


def choose_compile(wish: str, model: MiniGPT, run_pass: Pass) -> tuple[bool, str]:
    """Compile model if `wish` is on, or if it is auto and a trial on a copy shows that it pays.

    Returns whether it is compiled now, and one line that says so.
    """
    if wish == "off":
        return False, "running eagerly: compile is off"
    eager, compiled = (Objective(copy.deepcopy(model)).train() for _ in range(2))
    seconds: dict[Objective, float] = {eager: math.inf, compiled: math.inf}
    try:
        # The trial draws dropout masks; the run is to begin as if it had not.
        with _random_numbers_kept(model):
            compile_blocks(compiled.model)
            contestants = (eager, compiled) if wish == "auto" else (compiled,)
            for objective in contestants:
                run_pass(objective)  # warms up, and compiles
            # In turns, so that whatever else the machine does in between troubles both alike.
            for _ in range(TRIAL_ROUNDS):
                for objective in contestants:
                    seconds[objective] = min(seconds[objective], _seconds(run_pass, objective))
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        return False, f"running eagerly: torch.compile failed ({type(error).__name__}: {reason})"
    if seconds[compiled] >= seconds[eager]:
        return False, (
            f"running eagerly: {seconds[eager]:.2f} s a pass, compiled {seconds[compiled]:.2f} s"
        )
    compile_blocks(model)
    beside = f", eager {seconds[eager]:.2f} s" if wish == "auto" else ""
    return True, f"running compiled: {seconds[compiled]:.2f} s a pass{beside}"


def seconds_per_pass(model: MiniGPT, run_pass: Pass) -> float:
    """Return the seconds of an eager pass, on a copy: the second, since the first warms up."""
    objective = Objective(copy.deepcopy(model)).train()
    with _random_numbers_kept(model):
        run_pass(objective)
        return _seconds(run_pass, objective)


def _random_numbers_kept(model: MiniGPT) -> AbstractContextManager[None]:
    """Return a context after which the generators of CPU and model stand where they stood."""
    device = next(model.parameters()).device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _seconds(run_pass: Pass, objective: Objective) -> float:
    began_at = time.perf_counter()
    run_pass(objective)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # it computes in the background
    return time.perf_counter() - began_at


def uncompiled() -> AbstractContextManager[None]:
    """Return a context in which compiled blocks run as they are written.

    They were compiled for the shapes of training, and would be once more for each length of a text.
    """
    # Without its compiler loaded, which takes a second, PyTorch cannot have compiled anything.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
