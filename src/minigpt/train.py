"""Training: a `Config` in, a run folder out.

The loop in `_learn` is the whole of it:

    repeat until the budget is used up
        set the rates for this much progress
        nats of a batch → gradients → one step of each optimizer
        at equal parts of the budget: score all of valid, write a checkpoint

What is learned is to predict: each position of a window is asked for the id that comes next, all of
them at once, since the causal mask hides from each what it is asked for. The loss is the mean over
those positions of −log p(next id), in nats; its exponential is the perplexity, the number of
equally likely words that the model in effect hesitates between. It begins near the size of the
vocabulary, or above it, and falls.

What a user sees of it (console, metrics, samples, pictures) hangs on one callback, which is told
the events of `minigpt.events` and asked nothing back.

The order of the data is a function of seed and step, and a checkpoint holds the optimizers and the
random generators, so that a run that was broken off goes on as if nothing had been.

B batch · T sequence
"""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from minigpt.checkpoint import Run, Which
from minigpt.config import BUDGETS, Config
from minigpt.data import Batch
from minigpt.evaluate import Score, evaluate
from minigpt.events import (
    Callback,
    Finished,
    Noted,
    Started,
    Stepped,
    Validated,
    counted,
    ignore,
)
from minigpt.optim import rate_factor, set_rates
from minigpt.run_folder import locked, read_config
from minigpt.training_state import TrainingState, begin, new_training, resumed_training

# One gradient that is not finite is bad luck, and skipped. So many in a row do not mend themselves.
NON_FINITE_STEPS_BEFORE_STOP = 5


def train(
    config: Config, run_dir: Path, on_event: Callback = ignore, *, overwrite: bool = False
) -> Run:
    """Train what config describes into run_dir and return the run, opened with its best weights.

    overwrite   replace a run that stands in run_dir
    Ctrl-C and SIGTERM end the run after the current step, with a checkpoint; `resume` goes on from
    there, and from any moment at which the machine stopped. Raises UserError for whatever a user
    can mend: an unknown corpus, a text that is too short, a run folder that exists.
    """
    state = new_training(config, run_dir, on_event, overwrite)
    with locked(run_dir):
        begin(state, overwrite=overwrite)
        return _run(state)


def resume(run_dir: Path, on_event: Callback = ignore, config: Config | None = None) -> Run:
    """Go on with the run in run_dir from its last checkpoint, and return it as `train` does.

    config   the run's own with some settings changed, which `changes` must allow; None: its own
    The weights come out as if the run had never been broken off, to the bit on the same machine.
    Raises UserError where the folder or the data is missing, damaged or in use.
    """
    read_config(run_dir)  # is this a run folder at all?
    with locked(run_dir):
        state = resumed_training(run_dir, on_event, config)
        if state.share_used() >= 1:
            budget = next(name for name in BUDGETS if getattr(state.config, name) is not None)
            on_event(Noted(f"the budget of this run is used up: give more --{budget}"))
        return _run(state)


def _run(state: TrainingState) -> Run:
    """Learn until the run ends, save what is not saved yet, and open what came out."""
    state.on_event(_started(state))
    with stop_requests() as stop_requested:
        reason = _learn(state, stop_requested)
        if reason == "interrupted":  # else a validation has saved what there is to keep
            _save(state, ["last"])
    return _finished(state, reason)


def _learn(state: TrainingState, stop_requested: Callable[[], bool]) -> str:
    """Take one step after the other until something ends the run; return what did.

    That is one of the reasons that `Finished` knows: budget, patience, interrupted, non-finite.
    Whatever the budget is counted in, the loop knows only the share of it that is used: rates rise
    and fall with that share, and validations come at equal parts of it.
    """
    config, progress = state.config, state.progress
    # When the run would have begun, had it never been broken off.
    clock = perf_counter() - progress.elapsed_seconds
    non_finite_steps = 0  # in a row
    state.objective.train()  # dropout on; evaluation switches it off for itself and on again
    if 0 < config.patience <= progress.validations_since_best:
        return "patience"  # a run that had ended already is resumed
    while True:
        # Before the step, not after it: a run may have been broken off with this to do.
        if state.n_validations_due() > progress.n_validations:
            _validate(state)
            progress.elapsed_seconds = perf_counter() - clock
            # What fell due meanwhile would score all but the same weights.
            progress.n_validations = state.n_validations_due()
            if 0 < config.patience <= progress.validations_since_best:
                return "patience"
        share = state.share_used()
        if share >= 1:
            return "budget"
        # One factor for all rates: how Muon's and AdamW's compare is a choice of the config.
        factor = rate_factor(share, config.optim)
        set_rates(state.optimizers, factor)
        began_at = perf_counter()
        # The step's number is all that says which windows it sees, also after a resume.
        loss, norm = optimizer_step(state, state.batches[progress.step])
        progress.count_step(loss)
        progress.elapsed_seconds = perf_counter() - clock
        state.on_event(_stepped(state, loss, norm, factor, perf_counter() - began_at))
        non_finite_steps = 0 if math.isfinite(norm) else non_finite_steps + 1
        # Only between steps: weights and optimizers that a checkpoint joins must be of one step.
        if stop_requested():
            return "interrupted"
        if perf_counter() - state.saved_at >= 60 * config.save_minutes:
            _save(state, ["last"])  # so much is lost at most, whatever happens to the machine
        if non_finite_steps == NON_FINITE_STEPS_BEFORE_STOP:
            return "non-finite"


def optimizer_step(state: TrainingState, batch: Batch) -> tuple[float, float]:
    """Take one step on batch; return its loss in nats per token and the norm of its gradient.

    batch   inputs and targets (B, T), on the CPU
    It is worked off in micro-batches (B / accumulation, T), so that memory holds the activations of
    one alone. A gradient that is not finite is thrown away, and no step taken.
    """
    config = state.config
    nats_sum = 0.0
    size = config.batch_size // config.accumulation
    micro_batches = zip(
        torch.split(batch.inputs, size), torch.split(batch.targets, size), strict=True
    )
    for inputs, targets in micro_batches:
        # Matrix products may be in bfloat16; weights, sums and the loss stay float32, so the
        # backward pass, which mirrors what was done, needs no context of its own.
        with state.autocast():
            nats, _ = state.objective(inputs.to(state.device), targets.to(state.device))
        # Over the targets of the whole batch, not of this part: so the gradients, which add up, are
        # those of the batch's mean, whatever number of parts it came in.
        (nats / batch.targets.numel()).backward()
        nats_sum += nats.item()
    parameters = list(state.model.parameters())
    # All gradients, as one long vector, get no longer than the limit (Pascanu et al. 2013), or one
    # strange batch would fill the optimizers' running means. The norm is that from before.
    limit = config.optim.clip if config.optim.clip > 0 else math.inf
    norm = nn.utils.clip_grad_norm_(parameters, limit).item()
    # A single inf or NaN in a gradient would be in every weight after the step, and in the
    # optimizers' running means for good.
    if math.isfinite(norm):
        for optimizer in state.optimizers:
            optimizer.step()
    else:
        state.progress.skipped_steps += 1
    # None, not 0: the next backward pass then stores its gradients and need not add them.
    for parameter in parameters:
        parameter.grad = None
    return nats_sum / batch.targets.numel(), norm


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C, SIGTERM and SIGHUP only ask the run to stop; a second stops it at once.

    Yields the function that says whether the run was asked. Outside the main thread it never is,
    and signals go where they went before.
    """
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:  # noqa: ARG001 - the signature of a signal handler
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # signals reach the main thread alone
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # a closed terminal; Windows has no such signal
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:  # as under nohup
        numbers.append(hang_up)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _started(state: TrainingState) -> Started:
    """Return what there is to tell before the first step."""
    config = state.config
    budget = (
        counted(config.minutes, "minute")
        if config.minutes is not None
        else counted(state.total_steps(), "step")
    )
    return Started(
        config=config,
        tokenizer=state.tokenizer,
        run_dir=state.run_dir,
        n_parameters=sum(parameter.numel() for parameter in state.model.parameters()),
        budget=budget,
        steps_per_epoch=state.batches.steps_per_epoch,
        matrix_rates=state.rates,
        step=state.progress.step,
        validation_due=state.n_validations_due() > state.progress.n_validations,
    )


def _stepped(
    state: TrainingState, loss: float, norm: float, factor: float, step_seconds: float
) -> Stepped:
    """Return what there is to tell of the step just taken, which took step_seconds."""
    config, progress, share = state.config, state.progress, state.share_used()
    n_tokens = config.batch_size * config.model.context_length
    elapsed = progress.elapsed_seconds
    if config.minutes is not None:
        remaining = max(0.0, 60 * config.minutes - elapsed)
    else:
        # As fast as so far, validations included.
        remaining = elapsed / share * (1 - share)
    return Stepped(
        step=progress.step,
        progress=share,
        epoch=progress.step / state.batches.steps_per_epoch,
        loss=loss,
        rate=factor,
        gradient_norm=norm,
        tokens_per_second=n_tokens / step_seconds,
        elapsed_seconds=elapsed,
        remaining_seconds=remaining,
    )


def _validate(state: TrainingState) -> None:
    """Score all of valid, write a checkpoint, tell what came out."""
    began_at, before = perf_counter(), state.progress.best
    validated = _scored(state)
    # Told when the checkpoint is whole and not yet named: whoever is killed just then goes on from
    # the one before, validates again and tells it again, and nothing is told twice or never.
    told: list[Validated] = []

    def tell(event: Validated) -> None:
        if not told:
            told.append(event)
            state.on_event(event)

    names: list[Which] = ["best", "last"] if validated.is_best else ["last"]
    if not _save(state, names, lambda: tell(validated)):
        state.progress.best = before  # there is nothing to open that scored so
        tell(replace(validated, is_best=False))
    # The callback's work (samples, pictures) counts: it will be there the last time too.
    state.progress.validation_seconds = perf_counter() - began_at


def _scored(state: TrainingState) -> Validated:
    """Score all of valid and note the result in the progress.

    All of it, each token once: random windows of valid would be cheaper, and noisier than the
    differences that early stopping and the choice of the best checkpoint have to see.
    Noted before it is saved, so that a run that goes on from there neither validates again nor
    forgets what was best.
    """
    progress = state.progress
    # In the precision of training; `minigpt evaluate` computes in float32 always.
    with state.autocast():
        score = evaluate(state.model, state.valid, state.tokenizer.eos_id)
    best = progress.best
    # A score that is not a number is beaten by any other, and beats none.
    is_best = best is None or math.isnan(best["nats"]) or score.nats < best["nats"]
    progress.n_validations = state.n_validations_due()
    progress.validations_since_best = 0 if is_best else progress.validations_since_best + 1
    if is_best:
        progress.best = asdict(score)
    return Validated(
        step=progress.step,
        progress=state.share_used(),
        score=score,
        train_loss=progress.take_mean_loss(),
        is_best=is_best,
        elapsed_seconds=progress.elapsed_seconds,
        model=state.model,
        tokenizer=state.tokenizer,
    )


def _save(
    state: TrainingState, names: list[Which], when_whole: Callable[[], None] = lambda: None
) -> bool:
    """Write a checkpoint and return whether it is there: a full disk does not end the run.

    when_whole   called once its files are there, before names point to it
    Weights that are not numbers never take the place of those that were.
    """
    state.saved_at = perf_counter()  # or tried: a full disk is not asked again at every step
    try:
        if not all(weights.isfinite().all() for weights in state.model.parameters()):
            raise OSError("weights are not finite")
        state.save(names, when_whole)
    except OSError as error:
        state.on_event(Noted(f"no checkpoint at step {state.progress.step}: {error}"))
        return False
    return True


def _finished(state: TrainingState, reason: str) -> Run:
    """Tell how the run ended, and open what came out: the best weights, or the last if none are."""
    progress = state.progress
    valid = Score(**progress.best) if progress.best else None
    if not state.is_saved and reason != "non-finite":
        state.on_event(
            Noted(
                f"the last checkpoint is that of step {state.saved_step}: free some space, then "
                f"minigpt train --resume {state.run_dir} takes the other steps again"
            )
        )
    if reason == "non-finite":
        state.on_event(
            Noted(
                f"stopped: the gradient was not finite {NON_FINITE_STEPS_BEFORE_STOP} times in a "
                f"row; the {'best' if valid else 'last'} checkpoint is kept: try lower rates"
            )
        )
    state.on_event(
        Finished(
            step=progress.step,
            elapsed_seconds=progress.elapsed_seconds,
            valid=valid,
            reason=reason,
            is_saved=state.is_saved,
            report={
                "steps": progress.step,
                "epochs": progress.step / state.batches.steps_per_epoch,
                "elapsed_seconds": progress.elapsed_seconds,
                "skipped_steps": progress.skipped_steps,
                "reason": reason,
                "valid": progress.best,
                "matrix_gflops": state.rates,
                "valid_sha256": state.valid.sha256,
            },
        )
    )
    return Run.open(state.run_dir, str(state.device), "best" if valid else "last")
