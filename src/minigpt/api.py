"""The Python interface: what the commands do, as functions.

    run = minigpt.train("mini", "runs/first", minutes=5, model={"d_model": 128})
    run = minigpt.load("runs/first")
    minigpt.evaluate(run).token_perplexity            # a `Score`, no more

What `minigpt evaluate` prints, with its intervals and a column for each tier, is a `Measurement`:

    measured = minigpt.measure(run, "test", tiers=("cache",))
    measured.static.score.token_perplexity            # and measured.tiers["cache"].score
    measured.intervals(measured.static)               # {"token_interval": [low, high], …}
    measured.to_json()                                # all of it, as with --json

Nothing is computed here; each function puts the modules below it in a row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minigpt.attention_maps import AttentionMaps, attention_maps
from minigpt.checkpoint import Run
from minigpt.comparison import Comparison
from minigpt.comparison import compare as compare_runs
from minigpt.config import Config, from_dict, load_preset
from minigpt.corpus import Split, open_corpus
from minigpt.data import prepare
from minigpt.errors import require
from minigpt.evaluate import Score
from minigpt.evaluate import evaluate as evaluate_stream
from minigpt.events import Event
from minigpt.generate import generate_text
from minigpt.head_roles import HeadRoles, measure_heads
from minigpt.machine import choose_device
from minigpt.measurement import Measurement, Tier
from minigpt.measurement import measure as measure_run
from minigpt.report import Report
from minigpt.run_folder import read_config
from minigpt.sampling import Sampling
from minigpt.train import resume as resume_run
from minigpt.train import train as train_config


def load(path: str | Path, device: str = "cpu") -> Run:
    """Open a run folder: its config, tokenizer, figures, and its model with the best weights.

    device   cpu, cuda, mps or auto

    Raises UserError where path is not a run folder, or device is not here.
    """
    return Run.open(path, device=str(choose_device(device)))


def train(
    config: Config | str,
    out: str | Path,
    *,
    on_event: Callable[[Event], None] | None = None,
    overwrite: bool = False,
    **overrides: Any,
) -> Run:
    """Train a model into the folder `out` and return the run.

    config      a `Config`, or the name of a preset
    on_event    told of every step, validation and note; None: a progress line on stderr and
                metrics, samples, a plot and a report in `out`
    overwrite   replace a run that stands in `out`
    overrides   settings laid over config, as in a TOML file: minutes=5, model={"d_model": 128}
    Raises UserError, before anything is trained, for settings that cannot be.
    """
    base = load_preset(config) if isinstance(config, str) else config
    settings, run_dir = from_dict(Config, overrides, base), Path(out)
    if on_event is not None:
        return train_config(settings, run_dir, on_event, overwrite=overwrite)
    with Report(run_dir, settings) as report:
        return train_config(settings, run_dir, report, overwrite=overwrite)


def resume(
    path: str | Path, *, on_event: Callable[[Event], None] | None = None, **changes: Any
) -> Run:
    """Go on with the training of the run at `path`, from its last checkpoint; return the run.

    on_event   as for `train`
    changes    settings that may change: a larger budget (epochs=20), another place of the same
               data, device, threads, and what only shows
    Raises UserError for other changes, and where the run or its data is missing or damaged.
    """
    run_dir = Path(path)
    settings = from_dict(Config, changes, read_config(run_dir))
    if on_event is not None:
        return resume_run(run_dir, on_event, settings)
    with Report(run_dir, settings) as report:
        return resume_run(run_dir, report, settings)


def evaluate(
    run: Run, split: Split = "valid", *, context: int | None = None, stride: int | None = None
) -> Score:
    """Score a run's model on the whole of a split of the data it was trained on.

    context, stride   ids seen at once and ids scored per window; None: the model's context
    """
    _require_run(run)
    stream = prepare(open_corpus(run.config.data), split, run.tokenizer)
    return evaluate_stream(
        run.model,
        stream,
        run.tokenizer.eos_id,
        context=context,
        stride=stride,
    )


def measure(
    run: Run,
    split: Split | None = None,
    *,
    text: str | Path | None = None,
    context: int | None = None,
    stride: int | None = None,
    tiers: Sequence[Tier] = (),
) -> Measurement:
    """Score a run's model as `evaluate` does, and say all that `minigpt evaluate` prints of it.

    split   None: valid
    text    score the whole of this text file instead
    context, stride   as for `evaluate`
    tiers   columns more, each fitted on valid: temperature, cache, dynamic
    Raises UserError for sizes out of range, an empty text, and data that cannot be had.
    """
    _require_run(run)
    return measure_run(run, split, text=_path(text), context=context, stride=stride, tiers=tiers)


def compare(
    runs: Sequence[Run],
    split: Split | None = None,
    *,
    text: str | Path | None = None,
    context: int | None = None,
    stride: int | None = None,
    by_word: bool = False,
) -> Comparison:
    """Score runs on one split and put them side by side, as ratios to the first with intervals.

    split     None: valid
    text      score the whole of this text file instead
    context, stride   as for `evaluate`
    by_word   compare per word alone, so that their tokens may differ
    Raises UserError, before anything is scored, where texts differ, or tokens without by_word.
    """
    require(isinstance(runs, Sequence), f"runs is {runs!r}: give a list of two runs or more")
    for run in runs:
        _require_run(run)
    return compare_runs(
        runs, split, text=_path(text), context=context, stride=stride, by_word=by_word
    )


def generate(run: Run, prompt: str = "", **sampling: Any) -> str:
    """Return the text that a run's model writes after `prompt`.

    sampling   the fields of `Sampling`: temperature, top_k, min_p, seed, max_new_tokens …; what is
               not given is as the run's config has it. For stop strings, bans and several texts see
               `minigpt.generate.continuations`
    Raises UserError for a name that is no setting, and a value that cannot be one.
    """
    _require_run(run)
    settings = from_dict(Sampling, sampling, run.config.sampling, "sampling.")
    return "".join(generate_text(run.model, run.tokenizer, prompt, settings))


def attention(run: Run, text: str) -> AttentionMaps:
    """Return where a run's model looks as it reads `text`; a notebook shows it as a page.

    Raises UserError for a text without tokens, or with more than the model's context.
    """
    _require_run(run)
    ids = run.tokenizer.encode_prompt(text)
    return attention_maps(run.model, ids, run.tokenizer.pieces(ids))


def heads(run: Run, split: Split = "valid", *, n_tokens: int | None = None) -> HeadRoles:
    """Measure what each head of a run's model does on a split of its data; a table in a notebook.

    n_tokens   about how many to look at; None: 16 windows of the model's context
    Raises UserError for a split of fewer than two windows.
    """
    _require_run(run)
    stream = prepare(open_corpus(run.config.data), split, run.tokenizer)
    return measure_heads(run.model, run.tokenizer, stream.ids, n_tokens=n_tokens)


def _path(text: str | Path | None) -> Path | None:
    if text is None:
        return None
    named = isinstance(text, str | Path) and text != ""
    require(named, f"text is {text!r}: give the path of a text file")
    return Path(text)


def _require_run(run: Run) -> None:
    """Raise UserError for the path of a run, which is not yet the run."""
    require(
        isinstance(run, Run), f"run is {run!r}: give what minigpt.load or minigpt.train returns"
    )
