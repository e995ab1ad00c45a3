"""Who takes turns in `generate`: each writes the same number of tokens after the same prompt.

In: the sizes of a model and what is to be written. Out: for each turn, the seconds until the first
token and until the last, and the most memory that the process has held so far.

Every contestant builds its own model, from the same seed: all have the same weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from as_transformers import as_transformers
from minigpt.config import ModelConfig
from minigpt.decoding import generate
from minigpt.model import MiniGPT
from minigpt.one_row import compiled_step, int8_weights
from minigpt.sampling import Sampling
from setting import peak_bytes
from turns import Turn

SEED = 1
Writer = Callable[[Sampling], list[int]]


@dataclass(frozen=True)
class Task:
    """What is to be written, and by what model."""

    config: ModelConfig
    n_prompt: int
    sampling: Sampling

    def prompt(self) -> list[int]:
        """Return ids drawn evenly, always the same."""
        generator = torch.Generator().manual_seed(SEED)
        size = (self.n_prompt,)
        ids: list[int] = torch.randint(self.config.vocab_size, size, generator=generator).tolist()
        return ids

    def model(self) -> MiniGPT:
        """Return the model, with fresh weights, always the same."""
        torch.manual_seed(SEED)
        return MiniGPT(self.config).eval()


def ours(task: Task, *how: str) -> Writer:
    """Return what writes with our own decoder: "compiled", "int8", "uncached", or both of two."""
    model, prompt = task.model(), task.prompt()
    if "int8" in how:
        model = int8_weights(model)
    step = compiled_step(model) if "compiled" in how else None
    use_cache = "uncached" not in how
    return lambda sampling: list(generate(model, prompt, sampling, use_cache=use_cache, step=step))


def theirs(task: Task) -> Writer:
    """Return what writes with transformers' `generate`, with its cache and the same settings."""
    model, prompt = as_transformers(task.model()), torch.tensor([task.prompt()])

    def write(sampling: Sampling) -> list[int]:
        n_new = sampling.max_new_tokens
        settings: dict[str, Any] = {"min_new_tokens": n_new, "max_new_tokens": n_new}
        if sampling.greedy:
            settings |= {"do_sample": False}
        else:
            drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
            settings |= {"do_sample": True, **drawn}
        torch.manual_seed(sampling.seed)
        seen = torch.ones_like(prompt)
        written = model.generate(prompt, attention_mask=seen, use_cache=True, **settings)
        ids: list[int] = written[0, prompt.size(1) :].tolist()
        return ids

    return write


def writes(turn: Turn, make: Callable[..., Writer], task: Task, *given: Any) -> None:
    """Write the first token, then the whole text, in each turn."""
    one = replace(task.sampling, max_new_tokens=1)
    # What is done once for all texts, compilation above all, is told apart.
    began_at = time.perf_counter()
    write = make(task, *given)
    for sampling in (one, task.sampling):
        write(sampling)
    warm_up = time.perf_counter() - began_at
    turn.done({})
    while True:
        turn.wait()
        times = [time.perf_counter()]
        for sampling in (one, task.sampling):
            ids = write(sampling)
            times.append(time.perf_counter())
        first, seconds = times[1] - times[0], times[2] - times[1]
        turn.done(
            {
                "seconds": seconds,
                "first_seconds": first,
                # The prompt is no part of the pace at which a text goes on.
                "seconds_a_token": (seconds - first) / (task.sampling.max_new_tokens - 1),
                "peak_bytes": peak_bytes(),
                "warm_up_seconds": warm_up,
                "ids": ids,
            }
        )


def reads(turn: Turn, n_bytes: int) -> None:
    """Read a buffer of n_bytes once in each turn: the least that a token of such a model takes."""
    buffer = torch.ones(n_bytes // 4)
    buffer.sum()
    turn.done({})
    while True:
        turn.wait()
        began_at = time.perf_counter()
        for _ in range(5):
            buffer.sum()
        turn.done({"seconds": (time.perf_counter() - began_at) / 5})
