"""What takes turns in `step`: training steps of ours, of a peer, and the matrix products alone.

Each is a function that `turns` calls in a process of its own. A step of ours is whatever `train`
does between two events: batch, rates, forward, backward, clip, optimizers. Its parts are timed from
outside, where they are called, so that `train` need not know.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from minigpt.config import Config
from minigpt.events import Event, Started, Stepped, Validated
from minigpt.train import train
from peer import closed_vocabulary
from peer_gpt import Checkouts
from peers import faster, make_peer
from products import Bench, Product, ProductCounter
from turns import Figures, Turn

COUNTED_STEP = 2  # the first makes more: what optimizers do once


def budget_of(config: Config, n_steps: int) -> Config:
    """Return config with a budget of so many steps, and one validation after the last."""
    return replace(
        config, minutes=None, epochs=None, steps=n_steps, validations=1, patience=0, log="none"
    )


class InTurns:
    """A callback of `train` that holds it between steps until its turn comes."""

    def __init__(self, turn: Turn, parts: Counter[str]) -> None:
        self.turn, self.parts, self.began_at = turn, parts, 0.0

    def __call__(self, event: Event) -> None:
        """Hand in a step, or the validation, and wait for the next turn."""
        seconds = time.perf_counter() - self.began_at
        match event:
            case Started():
                self.turn.done({})  # ready
            case Stepped():
                self.turn.done({"seconds": seconds, "parts": dict(self.parts), "loss": event.loss})
            case Validated():
                self.turn.done({"validation_seconds": seconds})
            case _:
                return
        self.parts.clear()
        self.turn.wait()
        self.began_at = time.perf_counter()


def ours(turn: Turn, config: Config) -> None:
    """Train, a step each turn and the validation of all of valid in the last."""
    with tempfile.TemporaryDirectory() as folder, parts_timed() as parts:
        train(config, Path(folder) / "run", InTurns(turn, parts))


@contextmanager
def parts_timed() -> Iterator[Counter[str]]:
    """Within it, add up the seconds of the backward pass, of clipping and of each optimizer."""
    parts: Counter[str] = Counter()
    began: dict[int, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began_at = time.perf_counter()
            result = function(*args, **kwargs)
            parts[name] += time.perf_counter() - began_at  # type: ignore[assignment]
            return result

        return call

    def begin(optimizer: Optimizer, *_: Any) -> None:
        began[id(optimizer)] = time.perf_counter()

    def end(optimizer: Optimizer, *_: Any) -> None:
        seconds = time.perf_counter() - began[id(optimizer)]
        parts[type(optimizer).__name__] += seconds  # type: ignore[assignment]

    hooks = [
        optimizers.register_optimizer_step_pre_hook(begin),
        optimizers.register_optimizer_step_post_hook(end),
    ]
    backward = timed("backward", torch.Tensor.backward)
    clip = timed("clip", nn.utils.clip_grad_norm_)
    try:
        with (
            mock.patch.object(torch.Tensor, "backward", backward),
            mock.patch.object(nn.utils, "clip_grad_norm_", clip),
        ):
            yield parts
    finally:
        for hook in hooks:
            hook.remove()


def peer(
    turn: Turn, name: str, like: Config, checkouts: Checkouts, wish: str, dtype: torch.dtype
) -> None:
    """Train a peer of the preset's sizes, a step each turn; compiled if that is faster."""
    words = closed_vocabulary(like.data)
    chosen = faster(
        lambda compiled: make_peer(name, words, like, checkouts, compiled=compiled, dtype=dtype),
        wish,
    )
    turn.done({})
    while True:
        turn.wait()
        began_at = time.perf_counter()
        chosen.step(0.5)
        seconds = time.perf_counter() - began_at
        turn.done({"seconds": seconds, "compiled": chosen.settings["compiled"]})


def alone(turn: Turn, counts: Mapping[Product, int]) -> None:
    """Make every product of a step by itself, all of them each turn."""
    bench = Bench(counts)
    turn.done({})
    while True:
        turn.wait()
        seconds = bench.seconds()
        turn.done({"products": list(seconds.values())})


def count(turn: Turn, config: Config) -> None:
    """Hand in the products of one eager step of training."""
    counter = ProductCounter(config.model.context_length)
    found: list[Figures] = []

    def watch(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == COUNTED_STEP:
            found.append({"counts": dict(counter.counts)})
            raise EOFError  # that was all
        counter.counts.clear()

    turn.done({})
    turn.wait()
    torch.compiler.set_stance("force_eager")
    eager = replace(budget_of(config, COUNTED_STEP + 1), compile="off")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with counter:
                train(eager, Path(folder) / "run", watch)
        except EOFError:
            turn.done(found[0])
