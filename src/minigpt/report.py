"""The report of a run: what training tells goes to the console and into the run folder.

In: the events of `train`, one at a time, by calling a `Report`. Out:

| on the console       | a live line: loss, perplexity, speed, time left, rate; validations |
| metrics.jsonl        | a record for each step and each validation (`metrics`)             |
| samples.md, loss.png | made anew from metrics.jsonl at each validation                    |
| report.json          | at the end: what ran, on what, how well                            |

Nothing here reaches back into training: text is sampled with a generator of its own, the model is
left in its mode, and no random number of training's is used up.
"""

import dataclasses
import math
import platform
import subprocess
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from minigpt.attention_maps import write_figure
from minigpt.config import Config, to_dict
from minigpt.errors import UserError
from minigpt.evaluate import Score, perplexity
from minigpt.events import Event, Finished, Noted, Started, Stepped, Validated, counted
from minigpt.files import atomic_write
from minigpt.generate import Sample, samples
from minigpt.metrics import (
    Metrics,
    Record,
    clock,
    draw_losses,
    read_metrics,
    require_log,
    samples_page,
    to_json,
)
from minigpt.sampling import Sampling
from minigpt.spelling import harmless
from minigpt.tokenizer import Tokenizer


class Report:
    """Everything that a run shows and writes while it learns; pass it to `train` as on_event.

        with Report(run_dir, config) as report:
            train(config, run_dir, report)

    The `with` takes the live line off the console even where training ends with an error. Raises
    UserError, before anything is trained, when config.log names a package that is not installed.
    """

    def __init__(self, run_dir: Path, config: Config, console: Console | None = None) -> None:
        """Write to run_dir, which need not exist yet, and to console (default: stderr)."""
        require_log(config.log)
        self.run_dir, self.sampling = run_dir, config.sampling
        self.line = ProgressLine(console or _Console(stderr=True))
        self.advice = Advice()
        self.started: Started | None = None
        self.finished: Finished | None = None  # how the run ended, once it has
        self.metrics: Metrics | None = None

    def __call__(self, event: Event) -> None:
        """Take note of one event. A full disk is told of once, and training goes on."""
        if isinstance(event, Finished):
            self.finished = event
        if isinstance(event, Started):
            self.started = event
            self.metrics = Metrics(
                self.run_dir, event.config, event.step, validation_due=event.validation_due
            )
            self.line.start(event)
            return
        try:
            self._take(event)
        except (OSError, UserError) as error:
            if self.advice.is_first("not written"):
                self.line.say(f"the report is incomplete: {error}")
        for text in self.advice(event):
            self.line.say(text)

    def _take(self, event: Event) -> None:
        match event:
            case Stepped():
                self.line.step(event)
                self._record({"kind": "step", **dataclasses.asdict(event)})
            case Validated():
                self._validated(event)
            case Noted():
                self.line.say(event.text)
            case Finished():
                self._finished(event)

    def __enter__(self) -> Self:
        """Return the report itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close everything."""
        self.close()

    def close(self) -> None:
        """Take the live line away and close the files. Calling it twice does no harm."""
        self.line.stop()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    def _record(self, record: Record) -> None:
        if self.metrics is not None:
            self.metrics.add(record)

    def _validated(self, event: Validated) -> None:
        texts = sampled(event, self.sampling)
        best = " (best so far)" if event.is_best else ""
        self.line.say(f"step {event.step:,}: valid {spoken(event.score, event.tokenizer)}{best}")
        self.line.quote(texts[0])
        record = {
            "kind": "validation",
            "step": event.step,
            "progress": event.progress,
            "elapsed_seconds": event.elapsed_seconds,
            "train_loss": event.train_loss,
            **{f"valid_{name}": value for name, value in figures(event.score).items()},
            "is_best": event.is_best,
            "samples": [dataclasses.asdict(text) for text in texts],
        }
        self._record(record)
        records = list(read_metrics(self.run_dir / "metrics.jsonl"))
        _write(self.run_dir / "samples.md", samples_page(self.run_dir.name, records))
        write_figure(draw_losses(records), self.run_dir / "loss.png")

    def _finished(self, event: Finished) -> None:
        started, valid = self.started, event.valid
        report = {
            **event.report,
            "loss_spikes": self.advice.n_spikes,
            "valid": None if valid is None else dataclasses.asdict(valid) | figures(valid),
            "versions": versions(),
            "hardware": hardware(),
            "config": None if started is None else to_dict(started.config),
        }
        self.close()
        text = f"{counted(event.step, 'step')} in {clock(event.elapsed_seconds)} ({event.reason})"
        if valid is not None and started is not None:
            text += f": best valid {spoken(valid, started.tokenizer)}"
        self.line.say(text)
        if skipped := event.report.get("skipped_steps"):
            self.line.say(f"{counted(skipped, 'step')} skipped: the gradient was not finite")
        if self.advice.n_spikes > 1:
            self.line.say(f"the loss jumped {counted(self.advice.n_spikes, 'time')}")
        _write(self.run_dir / "report.json", to_json(report, indent=2) + "\n")


def figures(score: Score) -> Record:
    """Return what a score says: per token, per word and per byte."""
    return {
        "loss": score.loss,
        "token_perplexity": score.token_perplexity,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def spoken(score: Score, tokenizer: Tokenizer) -> str:
    """Return a score in words, per word and byte too where the tokenizer knows every word.

    With <unk> for all rare words, a figure per word would flatter: it counts them as one.
    """
    per_token = f"perplexity {score.token_perplexity:,.1f}"
    if tokenizer.unk_id is not None:
        return per_token
    per_byte = f"{score.bits_per_byte:.3f} bits per byte"
    return f"{per_token} per token, {score.word_perplexity:,.1f} per word, {per_byte}"


def sampled(event: Validated, sampling: Sampling) -> list[Sample]:
    """Return the samples of a validation, or why there are none: a report never ends a run."""
    try:
        return samples(event.model, event.tokenizer, sampling=sampling)
    except UserError as error:
        return [Sample("", f"(no text: {error})")]


class _Console(Console):
    """A console whose reader may leave, as `2>&1 | head` does: the run goes on, unseen."""

    def on_broken_pipe(self) -> None:
        """Print no more; rich itself would end the process."""
        self.quiet = True


class ProgressLine:
    """The line that lives at the foot of a terminal; elsewhere, a plain line now and then."""

    def __init__(self, console: Console) -> None:
        """Show on console."""
        self.console = console
        self.rate = 0.0  # the learning rate at its highest
        self.losses, self.weights = 0.0, 0.0  # of a running mean over some 20 steps
        self.shown_at = -math.inf  # when the live line was last drawn, seconds
        self.next_tenth = 0.0  # of the progress, when the next plain line is due
        # Drawn by hand: a thread that redraws would take time from training at moments of its own.
        self.progress = Progress(
            BarColumn(24),
            TextColumn("{task.percentage:3.0f} %  {task.fields[text]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self.task = self.progress.add_task("", total=1.0, text="")

    def start(self, event: Started) -> None:
        """Say what is about to be trained, and show the line."""
        entries, self.rate = event.tokenizer.vocab_size, event.config.optim.rate
        self.say(f"{event.n_parameters:,} parameters, {entries:,} entries, {event.budget}")
        self.say(f"into {event.run_dir}")
        if self.console.is_terminal:
            self.progress.start()

    def stop(self) -> None:
        """Take the line away, if it is there."""
        if self.progress.live.is_started:  # else rich would print a blank line
            self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line, above the live one."""
        self.console.print(Text(text), soft_wrap=True)

    def quote(self, sample: Sample) -> None:
        """Print a sample of text, set off from the rest, without its empty lines."""
        for line in harmless(sample.prompt + sample.text).splitlines():
            for part in textwrap.wrap(line, max(20, self.console.width - 8)):
                self.console.print(Text(f"    {part}", style="italic"), soft_wrap=True)

    def step(self, event: Stepped) -> None:
        """Show how far training is, at most four times a second or, as plain lines, ten in all."""
        if math.isfinite(event.loss):
            # One batch is noise; over some 20 of them a trend can be seen. Divided by the weights
            # so far (as Adam's means are), the first losses count no more than their share.
            self.losses = 0.95 * self.losses + event.loss
            self.weights = 0.95 * self.weights + 1
        if self.console.is_terminal:
            now = time.monotonic()
            if now - self.shown_at > 0.25:
                self.shown_at = now
                self.progress.update(self.task, completed=event.progress, text=self._text(event))
                self.progress.refresh()
        elif event.progress >= self.next_tenth:
            self.next_tenth = math.floor(event.progress * 10 + 1) / 10
            self.say(f"{100 * event.progress:3.0f} %  step {event.step:,}  {self._text(event)}")

    @property
    def loss(self) -> float:
        """The running mean, nats per token; not a number before there was one."""
        return self.losses / self.weights if self.weights else math.nan

    def _text(self, event: Stepped) -> str:
        return (
            f"loss {self.loss:.3f}  perplexity {perplexity(self.loss):,.1f}  "
            f"{event.tokens_per_second:,.0f} tokens/s  {clock(event.remaining_seconds)} left  "
            f"rate {event.rate * self.rate:.2g}"
        )


# A loss this far above the running mean, in deviations of those above it and in nats, is no chance.
SPIKE_DEVIATIONS, SPIKE_NATS = 6.0, 0.5
# Before this many losses their mean still falls too fast to be compared with.
LOSSES_BEFORE_SPIKES = 50


class Advice:
    """What an experienced person would say when looking over your shoulder, each thing once."""

    def __init__(self) -> None:
        self.best_valid, self.train_at_best = math.inf, math.inf
        self.warned: set[str] = set()
        self.n_losses, self.mean, self.variance = 0, 0.0, 0.0  # running, over some 50 steps
        self.n_spikes = 0

    def __call__(self, event: Event) -> list[str]:
        """Return the lines that this event calls for: none, as a rule."""
        if isinstance(event, Stepped):
            return self._on_loss(event)
        if not isinstance(event, Validated):
            return []
        valid = event.score.loss
        if valid < self.best_valid:
            self.best_valid, self.train_at_best = valid, event.train_loss
        elif event.train_loss < self.train_at_best and self.is_first("overfitting"):
            return [
                "train still falls while valid rises: the model learns its text by heart. The best "
                "checkpoint is kept; try a higher --model.dropout, a smaller model, or more text"
            ]
        return []

    def _on_loss(self, event: Stepped) -> list[str]:
        """Say that a loss is not finite, or jumped; count the jumps."""
        if not math.isfinite(event.loss):
            if not self.is_first("not finite"):
                return []
            return [
                f"the loss at step {event.step:,} is not finite: if it stays so, lower "
                "--optim.rate and --optim.matrix-rate, or lengthen --optim.warm-up"
            ]
        above = event.loss - self.mean
        is_spike = self.n_losses >= LOSSES_BEFORE_SPIKES and above > max(
            SPIKE_NATS, SPIKE_DEVIATIONS * math.sqrt(self.variance)
        )
        lines = []
        if is_spike:
            self.n_spikes += 1
            if self.is_first("spike"):
                lines.append(
                    f"the loss jumped from {self.mean:.2f} to {event.loss:.2f} at step "
                    f"{event.step:,}: once does no harm; if it happens again and again, lower "
                    "--optim.rate and --optim.matrix-rate"
                )
            above = min(above, SPIKE_NATS)  # one jump must not hide the next
        # Of few losses the plain mean, of many the running one.
        share = 1 / min(self.n_losses + 1, LOSSES_BEFORE_SPIKES)
        self.mean += share * above
        if self.n_losses:  # the first has no mean to be away from; below it, a loss does its duty
            self.variance += share * (max(above, 0.0) ** 2 - self.variance)
        self.n_losses += 1
        return lines

    def is_first(self, name: str) -> bool:
        """Is `name` said for the first time? From now on it has been."""
        is_first = name not in self.warned
        self.warned.add(name)
        return is_first


def versions() -> dict[str, str | None]:
    """Return what software ran; git is the checkout's commit, None where there is no checkout."""
    return {
        "minigpt": metadata.version("mini-gpt-lab"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "git": git_commit(Path(__file__).parents[2]),
    }


def git_commit(checkout: Path) -> str | None:
    """Return the commit that `checkout` stands at, with -dirty if files differ, or None."""
    if not (checkout / ".git").exists():  # else git would find whatever lies further up
        return None
    describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*describe, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, no commit yet, or a folder that git does not trust
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """Return what machine ran: its processor, the threads in use, the graphics card if any is."""
    # Asking a card for its name would start CUDA in a run that computes without it.
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if in_use else None,
        "system": platform.platform(),
    }


def cpu_model() -> str:
    """Return the processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())
