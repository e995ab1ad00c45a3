"""The machine: which device computes, on how many threads, in which precision.

In: what the config asks for. Out: a device, and the rates of its matrix products, by which `auto`
decides and beside which every speed is reported.
"""

import math
import os
import time

import torch

from minigpt.config import Precision
from minigpt.errors import UserError

# bfloat16 must be clearly faster, or its rounding is not worth it. Processors without instructions
# for it are many times slower than in float32.
WORTH_ROUNDING = 1.3
# A processor of which a precision asks so much is slow enough in it for one product to tell.
TRIAL_SECONDS = 0.25


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; auto takes cuda, then mps, then cpu.

    Raises UserError for a device that this machine or this PyTorch does not have.
    """
    present = ["cuda"] if torch.cuda.is_available() else []
    present += ["mps"] if torch.backends.mps.is_available() else []
    present += ["cpu"]
    if name == "auto":
        return torch.device(present[0])
    missing = UserError(f"device {name} is not available here: take auto or cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # a number that is none
        raise missing from None
    if device.type not in present or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        raise missing
    return device


def set_threads(threads: int) -> int:
    """Compute on `threads` CPU threads, 0 for one on each usable core; return how many."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(threads or usable)
    return torch.get_num_threads()


def matrix_rates(device: torch.device, size: int = 768) -> dict[str, float]:
    """Measure the rate of square matrix products in GFLOP/s, by precision: the best of a few."""
    rates = {}
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        a = torch.ones(size, size, device=device, dtype=dtype)
        seconds: list[float] = []
        while len(seconds) < 6 and sum(seconds) < TRIAL_SECONDS:
            started_at = time.perf_counter()
            # Reading one number waits for the product, on devices that compute in the background.
            (a @ a)[0, 0].item()
            seconds.append(time.perf_counter() - started_at)
        rates[precision] = round(2 * size**3 / min(seconds) / 1e9, 1)
    return rates


def choose_precision(wish: Precision, rates: dict[str, float]) -> Precision:
    """Return float32 or bfloat16: what is wished for, or under `auto` what the rates speak for."""
    if wish != "auto":
        return wish
    faster = rates["bfloat16"] >= WORTH_ROUNDING * rates["float32"]
    return "bfloat16" if faster else "float32"


def memory_bytes() -> float:
    """Return how much memory this machine has; infinity where it does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # Windows has no such question
        return math.inf
