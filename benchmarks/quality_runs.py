"""The runs behind `quality`: a contestant in, its curve or its pace out.

The clock counts training and compilation, of ours and of peers. It stands still while valid is
scored, and while ours writes its checkpoints; a peer's trial of the compiler is not counted either.
All are scored in float32: `train` validates in the precision that it computes in, so the weights of
those moments are kept and scored again when it is done.
"""

import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

from curves import Point, Result
from minigpt.config import Config, to_dict
from minigpt.errors import require
from minigpt.evaluate import perplexity, token_nats
from minigpt.events import Event, Noted, Started, Stepped, Validated
from minigpt.machine import choose_precision, matrix_rates
from minigpt.model import MiniGPT
from minigpt.train import train
from peer import Ids, Peer, Words, closed_vocabulary

# --tied, 40 epochs, as its maintainers report it.
PUBLISHED = {"valid": 105.97, "test": 100.33, "epochs": 40, "source": "pytorch/examples issue 281"}
WARM_UP_BATCHES = 20


@contextlib.contextmanager
def cold_compiler() -> Iterator[None]:
    """Within it, torch.compile finds nothing that was compiled before, in memory or on disk.

    What it has learned of the processor it keeps: some seconds that the first of several in one
    process pays alone.
    """
    torch.compiler.reset()
    # Another folder alone would not do: what a process has loaded it does not compile again.
    with fresh_cache():
        yield


@dataclass(frozen=True)
class Moment:
    """What ours had come to, after how long."""

    minutes: float
    step: int
    weights: dict[str, Tensor]


class OurCurve:
    """A callback of `train` that keeps the moments of a curve and takes validations off the clock.

    Whatever lies between the last step and the end of a validation is off it: scoring, checkpoint.
    """

    def __init__(self) -> None:
        self.moments = list[Moment]()
        self.paused, self.stepped_at = 0.0, time.perf_counter()
        self.last: Stepped | None = None
        self.n_parameters, self.notes = 0, list[str]()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case Started():
                self.n_parameters = event.n_parameters
            case Stepped():
                self.last, self.stepped_at = event, time.perf_counter()
            case Noted():
                self.notes.append(event.text)
                say(event.text)
            case Validated() if self.last is not None:
                minutes = (self.last.elapsed_seconds - self.paused) / 60
                weights = {name: w.clone() for name, w in event.model.state_dict().items()}
                self.moments.append(Moment(minutes, self.last.step, weights))
                say(f"{minutes:6.2f} min  perplexity near {event.score.token_perplexity:.2f}")
                self.paused += time.perf_counter() - self.stepped_at


def run_ours(name: str, config: Config, validations: int) -> Result:
    """Train a preset and return its curve. Raises UserError where its words are not the peers'."""
    kind = config.tokenizer
    closed = kind.kind == "wikitext" and kind.vocab_size == 0
    require(closed, f"{name} cuts its words otherwise than its peers: take one of all wikitext")
    minutes = config.minutes
    require(minutes is not None, f"{name} has no budget in minutes: give --minutes")
    words = closed_vocabulary(config.data)
    curve = OurCurve()
    with tempfile.TemporaryDirectory() as folder:
        run = train(stretched(config, words, validations), Path(folder) / "run", curve)
    return {
        "ours": True,
        "budget_minutes": minutes,
        "n_parameters": curve.n_parameters,
        "curve": [asdict(point) for point in scored(curve.moments, run.config, words)],
        "notes": curve.notes,
        "settings": to_dict(run.config),
    }


def scored(moments: list[Moment], config: Config, words: Words) -> list[Point]:
    """Return the points of a curve: valid under the weights of each moment, as `evaluate` does."""
    model, curve = MiniGPT(config.model), list[Point]()
    for moment in moments:
        model.load_state_dict(moment.weights)
        nats = our_nats(model, words.valid, words.eos_id)
        tokens = moment.step * config.batch_size * config.model.context_length
        figure, epochs = perplexity(nats / len(words.valid)), tokens / len(words.train)
        curve.append(Point(moment.minutes, figure, moment.step, tokens, epochs))
        say(spoken(curve[-1]))
    return curve


def our_nats(model: MiniGPT, ids: Ids, eos_id: int) -> float:
    """Return the nats of ids under ours, in disjoint windows of its context."""
    nats = token_nats(model, ids, eos_id, context=model.config.context_length)
    return float(nats.sum(dtype=np.float64))


def stretched(config: Config, words: Words, validations: int) -> Config:
    """Return config with that many validations, and the time of those that it did not have.

    How long one takes is measured on a fresh model and an eighth of valid, in the precision that
    `train` will validate in.
    """
    model = MiniGPT(config.model.resolved(words.vocab_size))
    part = words.valid[: max(1, len(words.valid) // 8)]
    precision = choose_precision(config.precision, matrix_rates(torch.device("cpu")))
    began_at = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        our_nats(model, part, words.eos_id)
    seconds = (time.perf_counter() - began_at) * len(words.valid) / len(part)
    more = max(0, validations - config.validations)
    minutes = (config.minutes or 0.0) + more * seconds / 60
    return replace(config, validations=config.validations + more, minutes=minutes)


def run_peer(peer: Peer, words: Words, minutes: float, validations: int) -> Result:
    """Train a peer for minutes and return its curve; valid is scored with the clock stopped."""
    seconds, n_steps, n_scored = 0.0, 0, 0
    curve: list[Point] = []
    share = 0.0
    while share < 1:
        began_at = time.perf_counter()
        peer.step(share)
        seconds += time.perf_counter() - began_at
        n_steps += 1
        share = seconds / (60 * minutes)
        due = min(int(share * validations), validations)
        if due > n_scored or peer.epoch_ended:
            n_scored = due
            nats = peer.score(words.valid)
            if peer.epoch_ended:
                peer.hear(nats)
            tokens = n_steps * peer.tokens_per_step
            figure = perplexity(nats / len(words.valid))
            curve.append(Point(seconds / 60, figure, n_steps, tokens, tokens / len(words.train)))
            say(spoken(curve[-1]))
    return {
        "ours": False,
        "budget_minutes": minutes,
        "n_parameters": peer.n_parameters,
        "curve": [asdict(point) for point in curve],
        "settings": peer.settings,
    }


def run_pace(peer: Any, batches: int) -> Result:
    """Time batches of a peer, after some that warm up, and reckon an epoch of its own from it."""
    seconds = []
    for turn in range(WARM_UP_BATCHES + batches):
        began_at = time.perf_counter()
        peer.step(0.0)
        if turn >= WARM_UP_BATCHES:
            seconds.append(time.perf_counter() - began_at)
    epoch_minutes = peer.batches_per_epoch * statistics.median(seconds) / 60
    return {
        "kind": "pace",
        "ours": False,
        "extrapolated": True,
        "batches": batches,
        "warm_up_batches": WARM_UP_BATCHES,
        "seconds_per_batch": statistics.median(seconds),
        "mean_seconds_per_batch": statistics.fmean(seconds),
        "batches_per_epoch": peer.batches_per_epoch,
        "epoch_minutes": epoch_minutes,
        "published": PUBLISHED,
        "published_minutes": PUBLISHED["epochs"] * epoch_minutes,
        "n_parameters": peer.n_parameters,
        "settings": peer.settings,
    }


def spoken(point: Point) -> str:
    """Return a point in words."""
    speed = point.tokens / point.minutes / 60 if point.minutes else math.nan
    return (
        f"{point.minutes:6.2f} min  perplexity {point.perplexity:8.2f}  "
        f"{point.epochs:5.2f} epochs  {speed:,.0f} tokens/s"
    )


def say(text: str) -> None:
    """Tell how it goes, on stderr: what is printed is the result."""
    print(text, file=sys.stderr, flush=True)
