"""Events: what a run tells while it learns.

`train` passes each to its one callback. They are all that reports, progress lines and logs see.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt.config import Config
from minigpt.evaluate import Score
from minigpt.model import MiniGPT
from minigpt.tokenizer import Tokenizer


@dataclass(frozen=True)
class Started:
    """A run is about to learn."""

    config: Config
    tokenizer: Tokenizer
    run_dir: Path
    n_parameters: int
    budget: str
    steps_per_epoch: float
    matrix_rates: dict[str, float]
    step: int
    """0, or where a resumed run goes on."""
    validation_due: bool = False
    """Does it go on with a validation at this very step? One told of before was not saved."""


@dataclass(frozen=True)
class Stepped:
    """One optimizer step is done."""

    step: int
    progress: float
    """Share of the budget used, 0 to 1."""
    epoch: float
    loss: float
    """Nats per token of this step's batch."""
    rate: float
    """What the learning rates were multiplied by."""
    gradient_norm: float
    tokens_per_second: float
    elapsed_seconds: float
    remaining_seconds: float


@dataclass(frozen=True)
class Validated:
    """All of valid has been scored and, if the disk had room, a checkpoint written."""

    step: int
    progress: float
    score: Score
    train_loss: float
    """Mean nats per token of the steps since the last validation, dropout and all."""
    is_best: bool
    elapsed_seconds: float
    model: MiniGPT
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Noted:
    """Something that the user should know, in one line."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The run has ended."""

    step: int
    elapsed_seconds: float
    valid: Score | None
    """Of the best checkpoint; None when the run ended before any validation."""
    reason: str
    """budget, patience, interrupted or non-finite."""
    is_saved: bool
    """Has the last checkpoint all that was learned? Not where the disk was full at the end."""
    report: dict[str, Any]


Event = Started | Stepped | Validated | Noted | Finished
Callback = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Take note of nothing."""


def counted(number: float, noun: str) -> str:
    """Return number and noun as they are read: `1 step`, `1,000 steps`, `0.5 minutes`."""
    spoken = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{spoken} {noun}" if number == 1 else f"{spoken} {noun}s"
