"""What a run measured, kept as lines of JSON, and what is made of them.

In: records, flat dictionaries with a step. Out: metrics.jsonl, one record a line; samples.md and
loss.png, made anew from it; the same figures in TensorBoard or wandb where the config asks for it.

metrics.jsonl is the one source. A run that goes on from a checkpoint cuts it back to where the
checkpoint stands, and all that is made from it follows.
"""

import contextlib
import importlib.util
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from minigpt.config import Config, to_dict
from minigpt.errors import UserError
from minigpt.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; inf and nan, for which JSON has no word, become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def read_metrics(path: Path) -> Iterator[Record]:
    """Yield the records of metrics.jsonl; none where there is no file.

    A line that is no record is passed over: the last one may have been cut by a loss of power.
    """
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as f:
        for line in f:
            record = _record_of(line)
            if record is not None:
                yield record


def _record_of(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # nested too deeply, or a number too long for Python
        return None
    known = isinstance(record, dict) and isinstance(record.get("kind"), str)
    return record if known and type(record.get("step")) is int else None


def cut_back(path: Path, step: int, *, validation_due: bool = False) -> None:
    """Drop from metrics.jsonl what a run that broke off recorded after `step`.

    validation_due   drop the validation at that step as well: it is about to be made again
    """
    if not path.exists():
        return
    dropped = ("validation", step) if validation_due else None
    kept = [
        to_json(record) + "\n"
        for record in read_metrics(path)
        if record["step"] <= step and (record["kind"], record["step"]) != dropped
    ]
    with atomic_write(path) as file:
        file.write("".join(kept).encode(errors="replace"))  # JSON can spell half a character


class Metrics:
    """An open metrics.jsonl, with TensorBoard or wandb beside it. A record is on disk at once."""

    def __init__(
        self, run_dir: Path, config: Config, step: int, *, validation_due: bool = False
    ) -> None:
        """Go on in run_dir after `step`; later records, of a run that broke off, are cut off."""
        self.path = run_dir / "metrics.jsonl"
        cut_back(self.path, step, validation_due=validation_due)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._log = open_log(run_dir, config, step)

    def add(self, record: Record) -> None:
        """Append a record and flush it."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()
        self._log.add(record)

    def close(self) -> None:
        """Close the file and the log."""
        with contextlib.suppress(OSError):  # a full disk was told of when the line was written
            self._file.close()
        self._log.close()


class Log(Protocol):
    """Where figures go besides metrics.jsonl."""

    def add(self, record: Record) -> None:
        """Take note of the numbers in a record."""

    def close(self) -> None:
        """Send what is still held."""


def require_log(kind: str) -> None:
    """Raise UserError where the package that config.log names is not installed."""
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise UserError(
            f"log is {kind} but {kind} is not installed: run pip install '.[{kind}]' in the "
            "checkout of Mini-GPT, or leave --log out"
        )


def open_log(run_dir: Path, config: Config, step: int) -> Log:
    """Return the log that config names, ready to go on after `step`."""
    require_log(config.log)
    if config.log == "tensorboard":
        return _TensorBoard(run_dir, step)
    if config.log == "wandb":
        return _Wandb(run_dir, config)
    return _NoLog()


class _NoLog:
    def add(self, record: Record) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _TensorBoard:
    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def add(self, record: Record) -> None:
        """Add a curve point for each number."""
        for name, value in _numbers(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Write out what is still held."""
        self._writer.close()


class _Wandb:
    def __init__(self, run_dir: Path, config: Config) -> None:
        import wandb

        # A run that goes on from a checkpoint is a new one to wandb; the group joins them.
        self._run = wandb.init(
            project="minigpt",
            name=run_dir.name,
            group=run_dir.name,
            dir=str(run_dir),
            config=to_dict(config),
        )

    def add(self, record: Record) -> None:
        """Log every number under the record's step."""
        figures = {f"{record['kind']}/{name}": v for name, v in _numbers(record).items()}
        self._run.log(figures, step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _numbers(record: Record) -> dict[str, float]:
    """Return what of a record can be drawn as a curve."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step"
    }


def samples_page(title: str, records: Sequence[Record]) -> str:
    """Return samples.md: what the model wrote at each validation, newest first, unselected."""
    parts = [
        f"# What {title} wrote",
        "The same prompts and the same seed at each validation, nothing selected; newest first.",
    ]
    for record in reversed([r for r in records if r["kind"] == "validation"]):
        perplexity = record["valid_token_perplexity"]
        spoken = "not finite" if perplexity is None else f"{perplexity:,.1f}"
        parts.append(f"## Step {record['step']:,}: perplexity {spoken}")
        for sample in record["samples"]:
            text = sample["prompt"] + sample["text"]
            # Indented text is shown as it is, whatever Markdown the model has picked up.
            lines = "\n".join("    " + line for line in text.splitlines())
            prompt = f"From “{sample['prompt']}”" if sample["prompt"] else "Without a prompt"
            parts += [f"{prompt}:", lines]
    return "\n\n".join(parts) + "\n"


_TRAIN, _VALID, _INK, _GREY = "#3b8ac4", "#e8710a", "#22262e", "#666a73"


def draw_losses(records: Sequence[Record]) -> "Figure":
    """Draw the loss of train and valid against steps; time stands on top, perplexity beside."""
    from matplotlib.figure import Figure

    steps = [r for r in records if r["kind"] == "step" and r["loss"] is not None]
    valid = [r for r in records if r["kind"] == "validation" and r["valid_loss"] is not None]
    losses = [r["loss"] for r in steps]
    trend = smoothed(losses)
    figure = Figure(figsize=(9, 5.4), dpi=144, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    at = [r["step"] for r in steps]
    axes.plot(at, losses, color=_TRAIN, alpha=0.25, linewidth=0.7)
    axes.plot(at, trend, color=_TRAIN, linewidth=2, label="train, running mean")
    axes.plot(
        [r["step"] for r in valid],
        [r["valid_loss"] for r in valid],
        color=_VALID,
        linewidth=2,
        marker="o",
        markersize=6,
        markeredgecolor="white",
        label="valid, with its perplexity",
    )
    for r in spaced(valid):
        axes.annotate(
            f"{r['valid_token_perplexity']:,.1f}",
            (r["step"], r["valid_loss"]),
            xytext=(0, 9),  # points above its dot
            textcoords="offset points",
            ha="center",
            color=_VALID,
            fontsize=10,
            fontweight="bold",
        )
    # The fall of the first steps, from ln V, would press all that matters flat.
    seen = trend[len(trend) // 30 :] + [r["valid_loss"] for r in valid]
    if seen:
        low, high = min(seen), max(seen)
        axes.set_ylim(low - 0.08 * (high - low) - 0.05, high + 0.04 * (high - low) + 0.05)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK)
    _scales(axes, [*steps, *valid])
    return figure


def _scales(axes: "Axes", records: Sequence[Record]) -> None:
    """Label the axes: steps below, time above, loss on the left, perplexity on the right."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_xlim(0, max([1, *(r["step"] for r in records)]) * 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(color="#e3e3e8", linewidth=0.8)
    right = axes.twinx()
    right.set_ylim(axes.get_ylim())
    low, high = axes.get_ylim()
    round_ones = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    inside = [p for p in round_ones if low <= math.log(p) <= high]
    right.set_yticks([math.log(p) for p in inside], [f"{p:,}" for p in inside])
    right.set_ylabel("perplexity")
    top = axes.twiny()
    top.set_xlim(axes.get_xlim())
    timed = sorted((r["step"], r["elapsed_seconds"]) for r in records)
    ticks = [t for t in axes.get_xticks() if timed and timed[0][0] <= t <= timed[-1][0]]
    top.set_xticks(ticks, [clock(next(at for step, at in timed if step >= t)) for t in ticks])
    top.set_xlabel("time of training")
    for each in (axes, right, top):
        each.tick_params(length=0, colors=_GREY, labelsize=9)
        each.xaxis.label.set_color(_GREY)
        each.yaxis.label.set_color(_GREY)
        each.spines[:].set_visible(False)


def spaced(records: Sequence[Record]) -> list[Record]:
    """Return the last record and, going back, those far enough apart to be labelled."""
    kept: list[Record] = []
    for record in reversed(records):
        if not kept or kept[-1]["step"] - record["step"] >= 0.07 * kept[0]["step"]:
            kept.append(record)
    return kept


def clock(seconds: float) -> str:
    """Return a duration as m:ss or h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def smoothed(values: Sequence[float]) -> list[float]:
    """Return running means over 3 % of the values, each in the middle of its window."""
    reach = math.ceil(0.015 * len(values))
    sums = [0.0, *itertools.accumulate(values)]
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]
