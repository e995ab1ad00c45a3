"""Training state: everything that the loop of `train` works with, built anew or from a checkpoint.

In: a `Config`, or the folder of a run that was broken off. Out: a `TrainingState`: data, model,
optimizers, and the `Progress` that checkpoints keep.

Sizes left at 0, and `auto` in precision and compile, are decided here, once, and written into the
run's config.json: a resumed run must compute as it began. Device and threads stay as they were
asked for: a run whose device is `auto` may go on elsewhere. What else may change when a run goes on
stands in `changes`.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.optim import Optimizer

from minigpt.changes import changed_settings
from minigpt.checkpoint import (
    Which,
    checkpoint_folder,
    load_trainer,
    load_weights,
    save_checkpoint,
)
from minigpt.compilation import choose_compile, compile_blocks, seconds_per_pass
from minigpt.config import LARGEST, Config, from_dict, to_dict
from minigpt.corpus import open_corpus
from minigpt.data import TokenStream, TrainingBatches, fit_tokenizer, prepare
from minigpt.errors import UserError, require
from minigpt.evaluate import Score, token_nats
from minigpt.events import Callback, Noted
from minigpt.first_weights import begin_from_counts
from minigpt.machine import choose_device, choose_precision, matrix_rates, set_threads
from minigpt.model import MiniGPT, Objective
from minigpt.optim import make_optimizers
from minigpt.run_folder import (
    check_run_folder,
    new_run_folder,
    read_config,
    read_tokenizer,
    write_json,
)
from minigpt.tensor_files import check_context
from minigpt.tokenizer import Tokenizer

# Compiling and its trial take tens of seconds, which a shorter run would not earn back.
COMPILE_PAYS_FROM_SECONDS = 300
# A share of the budget that is nearer to 1 is 1: sums of seconds and shares are not exact.
ROUNDING = 1e-9
# What the time of a validation is reckoned from before there was one.
WINDOWS_OF_TRIAL_VALIDATION = 64
# From this share of <unk> on, a perplexity says little about the text: the user is told what helps.
MANY_UNKNOWN = 0.2


@dataclass
class Progress:
    """What changes while a run learns, and goes into its checkpoints as it stands."""

    step: int = 0
    elapsed_seconds: float = 0.0
    n_validations: int = 0
    validation_seconds: float = 0.0
    """How long the latest validation took, or is reckoned to take: the last one's share is kept."""
    best: dict[str, Any] | None = None
    validations_since_best: int = 0
    skipped_steps: int = 0
    """Steps not taken, since their gradient was not finite."""
    loss_sum: float = 0.0
    """Over the steps since the last validation, as many of them as loss_steps says."""
    loss_steps: int = 0

    @classmethod
    def restored(cls, tree: Any) -> "Progress":
        """Return what a checkpoint holds. Raises UserError for what no run can have noted."""
        require(isinstance(tree, dict), "progress is not a table")
        tree = dict(tree)
        best = tree.pop("best", None)
        figures = {figure.name for figure in fields(Score)}
        whole = best is None or (isinstance(best, dict) and set(best) == figures)
        require(whole, "best is not a score")
        require("step" in tree, "step is missing")
        progress = from_dict(cls, tree)
        for name in ("step", "n_validations", "validations_since_best", "loss_steps"):
            value = getattr(progress, name)
            require(0 <= value <= LARGEST, f"{name} is {value}")
        for name in ("elapsed_seconds", "validation_seconds", "loss_sum"):
            value = getattr(progress, name)
            require(math.isfinite(value), f"{name} is {value}")
        if best is not None:
            progress.best = asdict(from_dict(Score, best))
        return progress

    def count_step(self, loss: float) -> None:
        """Count a step, and its loss where it is finite: one bad batch must not spoil the mean."""
        self.step += 1
        if math.isfinite(loss):
            self.loss_sum += loss
            self.loss_steps += 1

    def take_mean_loss(self) -> float:
        """Return the mean of the losses counted since this was last called, 0 if there are none."""
        mean = self.loss_sum / max(1, self.loss_steps)
        self.loss_sum, self.loss_steps = 0.0, 0
        return mean


@dataclass
class TrainingState:
    """A run in memory: everything that the loop works with."""

    config: Config
    run_dir: Path
    tokenizer: Tokenizer
    model: MiniGPT
    objective: Objective
    optimizers: list[Optimizer]
    batches: TrainingBatches
    train: TokenStream
    valid: TokenStream
    device: torch.device
    rates: dict[str, float]
    on_event: Callback
    progress: Progress = field(default_factory=Progress)
    saved_at: float = field(default_factory=perf_counter)
    """When a checkpoint was last written, or tried to be, by the clock of `perf_counter`."""
    saved_step: int = 0
    """The step of the last checkpoint."""

    def share_used(self) -> float:
        """Return the share of the budget that is used up, 0 to 1: rates and validations obey it."""
        config, progress = self.config, self.progress
        if config.minutes is not None:
            # The last validation begins when the share is 1: its time is kept back.
            reserve = min(progress.validation_seconds, 30 * config.minutes)
            share = progress.elapsed_seconds / (60 * config.minutes - reserve)
        else:
            share = progress.step / self.total_steps()
        return share if share < 1 - ROUNDING else 1.0

    def total_steps(self) -> int:
        """Return how many steps the budget is, where it is counted in steps or epochs."""
        if self.config.steps is not None:
            return self.config.steps
        return math.ceil((self.config.epochs or 1.0) * self.batches.steps_per_epoch)

    def n_validations_due(self) -> int:
        """Return how many of the equal parts of the budget are used up."""
        # 1 / 49 · 49 is a little less than 1.
        return int(self.share_used() * self.config.validations + ROUNDING)

    def save(self, names: list[Which], when_whole: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint, call when_whole, and let `names` point to it.

        Raises OSError where it cannot be written.
        """
        save_checkpoint(
            self.run_dir,
            self.progress.step,
            self.model,
            self.optimizers,
            {
                "progress": asdict(self.progress),
                "data": {"train": self.train.sha256, "valid": self.valid.sha256},
            },
            names,
            self.config.keep_checkpoints,
            when_whole,
        )
        self.saved_step = self.progress.step

    @property
    def is_saved(self) -> bool:
        """Has the last checkpoint all that was learned?"""
        return self.saved_step == self.progress.step

    def autocast(self) -> torch.autocast:
        """Return the context in which matrix products have the precision of the config."""
        on = self.config.precision == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)


def new_training(
    config: Config, run_dir: Path, on_event: Callback, overwrite: bool
) -> TrainingState:
    """Build a run from its config: data, tokenizer, model, and what `auto` leaves open.

    Raises UserError for whatever a user can mend. Nothing is written: whatever goes wrong costs
    nothing. `begin` makes the run folder.
    """
    # Before any work is done for nothing.
    if config.minutes is None and config.epochs is None and config.steps is None:
        raise UserError("no budget is given: set minutes, epochs or steps")
    check_run_folder(run_dir, overwrite=overwrite)
    device = choose_device(config.device)
    set_threads(config.threads)
    rates = matrix_rates(device)
    corpus = open_corpus(config.data)
    tokenizer = fit_tokenizer(corpus, config.tokenizer)
    config = _decided(replace(config, data=corpus.name), tokenizer, rates)
    check_context(config.model)
    train_stream = prepare(corpus, "train", tokenizer)
    valid_stream = prepare(corpus, "valid", tokenizer)
    batches = TrainingBatches(
        train_stream, config.model.context_length, config.batch_size, config.seed
    )
    _note_unknown(train_stream, valid_stream, on_event)
    began_at = perf_counter()
    torch.manual_seed(config.seed)
    model = MiniGPT(config.model)
    if config.first_weights == "counted":
        begin_from_counts(model, train_stream.ids)
    model.to(device)
    state = TrainingState(
        config=config,
        run_dir=run_dir,
        tokenizer=tokenizer,
        model=model,
        objective=Objective(model),
        optimizers=make_optimizers(model, config.optim, config.precision),
        batches=batches,
        train=train_stream,
        valid=valid_stream,
        device=device,
        rates=rates,
        on_event=on_event,
    )
    compiled = _compiled(state)
    if config.minutes is not None:
        state.progress.validation_seconds = _reckoned_validation_seconds(state)
    # Counting and both trials are the user's time too.
    state.progress.elapsed_seconds = perf_counter() - began_at
    state.config = replace(config, compile="on" if compiled else "off")
    return state


def begin(state: TrainingState, *, overwrite: bool) -> None:
    """Make the folder of a new run, from which it can be resumed from the first moment on.

    Raises UserError where the folder exists or may not be written to.
    """
    with new_run_folder(state.run_dir, state.config, state.tokenizer, overwrite=overwrite):
        state.save(["last"])


def _decided(config: Config, tokenizer: Tokenizer, rates: dict[str, float]) -> Config:
    """Return config with its sizes and its precision decided."""
    return replace(
        config,
        model=config.model.resolved(tokenizer.vocab_size),
        precision=choose_precision(config.precision, rates),
    )


def _compiled(state: TrainingState) -> bool:
    """Compile the model where that is wished for or pays, say so, and return whether it was done.

    auto asks for a trial only where the budget is long enough to earn it back. A budget in steps or
    epochs is not known in seconds: one eager pass is timed, and multiplied.
    """
    config = state.config
    size = config.batch_size // config.accumulation
    inputs, targets = (ids[:size].to(state.device) for ids in state.batches[0])  # a micro-batch

    def run_pass(objective: Objective) -> None:
        with state.autocast():
            nats, count = objective(inputs, targets)
        (nats / count).backward()

    if config.compile == "auto":
        if config.minutes is not None:
            seconds = 60 * config.minutes
        else:
            n_passes = state.total_steps() * config.accumulation
            seconds = n_passes * seconds_per_pass(state.model, run_pass)
        if seconds < COMPILE_PAYS_FROM_SECONDS:
            state.on_event(Noted("running eagerly: compiling does not pay in under five minutes"))
            return False
    compiled, line = choose_compile(config.compile, state.model, run_pass)
    state.on_event(Noted(line))
    return compiled


def _reckoned_validation_seconds(state: TrainingState) -> float:
    """Return how long a validation will take, from one of a few windows.

    It cannot be had from a step's seconds: a validation runs uncompiled and scores every word.
    """
    context = state.config.model.context_length
    few = state.valid.ids[: WINDOWS_OF_TRIAL_VALIDATION * context]
    began_at = perf_counter()
    with state.autocast():
        token_nats(state.model, few, state.tokenizer.eos_id, context=context)
    return (perf_counter() - began_at) * len(state.valid.ids) / len(few)


def resumed_training(run_dir: Path, on_event: Callback, wished: Config | None) -> TrainingState:
    """Build a run from its folder, as it stood at its last checkpoint.

    wished   the run's config with what is to change, None for no change
    Raises UserError where the folder, or the data that its config names, is missing or damaged, and
    for a change that would make it another run.
    """
    was = read_config(run_dir)
    config = wished or was
    changes = changed_settings(was, config)
    folder = checkpoint_folder(run_dir, "last")
    if (run_dir / "best.json").exists():
        checkpoint_folder(run_dir, "best")  # damaged, it would end the run at its next validation
    device = choose_device(config.device)
    set_threads(config.threads)
    corpus = open_corpus(config.data)
    tokenizer = read_tokenizer(run_dir, config)
    model = load_weights(folder, config).to(device)
    if config.compile == "on":
        compile_blocks(model)
    optimizers = make_optimizers(model, config.optim, config.precision)
    train_stream = prepare(corpus, "train", tokenizer)
    valid_stream = prepare(corpus, "valid", tokenizer)
    rates = matrix_rates(device)
    # Last, since it puts the random generators back: the model above drew its weights from them.
    trainer = load_trainer(folder, optimizers)
    _check_data(trainer.get("data", {}), config, {"train": train_stream, "valid": valid_stream})
    try:
        progress = Progress.restored(trainer.get("progress"))
    except UserError as error:
        raise UserError(
            f"{folder / 'trainer.json'} does not say how far the run was ({error}): "
            "restore it from a copy"
        ) from None
    state = TrainingState(
        config=config,
        run_dir=run_dir,
        tokenizer=tokenizer,
        model=model,
        objective=Objective(model),
        optimizers=optimizers,
        batches=TrainingBatches(
            train_stream, config.model.context_length, config.batch_size, config.seed
        ),
        train=train_stream,
        valid=valid_stream,
        device=device,
        rates=rates,
        on_event=on_event,
        progress=progress,
        saved_step=progress.step,
    )
    # Of a larger budget, fewer parts lie behind than did of the smaller one.
    progress.n_validations = min(progress.n_validations, state.n_validations_due())
    if changes:
        for line in changes:
            on_event(Noted(line))
        write_json(run_dir / "config.json", to_dict(config))
    return state


def _check_data(noted: Any, config: Config, streams: dict[str, TokenStream]) -> None:
    """Raise UserError where a text is not the one that the run has learned from so far."""
    for split, stream in streams.items():
        if isinstance(noted, dict) and noted.get(split, stream.sha256) != stream.sha256:
            raise UserError(
                f"data {config.data} has another {split} text than the run began with (its sha256 "
                "differs): bring the old one back, or train a new run"
            )


def _note_unknown(train: TokenStream, valid: TokenStream, on_event: Callback) -> None:
    """Say what share of the text the vocabulary cannot name, and what helps where it is large."""
    if train.n_unknown or valid.n_unknown:
        many = max(train.unknown_share, valid.unknown_share) > MANY_UNKNOWN
        advice = "; --tokenizer.kind bpe or char knows every word" if many else ""
        on_event(
            Noted(
                f"the vocabulary of {train.vocab_size:,} entries turns {train.unknown_share:.2%} "
                f"of train and {valid.unknown_share:.2%} of valid into <unk>{advice}"
            )
        )
