"""Runs side by side on one text: what each costs, and how sure it is that one is better.

    compare(runs, "valid") ──▶ `Comparison` ──▶ JSON, or a table

Perplexities per token compare only where the tokens are the same: two runs that cut one text in
two ways are refused. Per word, with every `<unk>` named, any runs compare that keep the text as it
is; those of basic_english, which do not, compare with each other.

A ratio is that of two perplexities, a run's over the first one's. Its interval comes from drawing
the same articles for both (`resampled_losses`): what makes an article hard for all cancels out.

R resamples
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from minigpt.articles import (
    LEVEL,
    N_RESAMPLES,
    interval,
    resampled_losses,
    resampling,
    why_no_interval,
)
from minigpt.checkpoint import Run
from minigpt.corpus import Corpus, Split
from minigpt.data import TokenStream
from minigpt.errors import UserError
from minigpt.evaluate import perplexity
from minigpt.evaluation_table import interval_text, table_of
from minigpt.measurement import Measurement, measure, open_stream


@dataclass(frozen=True)
class ComparedRun:
    """A run among others. None stands for what is not known, or does not compare."""

    run: str
    tokenizer: str
    vocab_size: int
    n_parameters: int
    context: int
    stride: int
    minutes: float | None
    """Of training, from its report."""
    epochs: float | None
    token_perplexity: float | None
    """None by word, where tokens differ."""
    word_perplexity: float | None
    """With every `<unk>` named."""
    bits_per_byte: float | None
    ratio: float | None
    """Its perplexity over that of the first run."""
    ratio_interval: list[float] | None


@dataclass(frozen=True)
class Comparison:
    """Runs in the order in which they were given, and what all of them were scored on."""

    runs: list[ComparedRun]
    data: str
    split: str | None
    sha256: str
    """Of the text."""
    by_word: bool
    n_articles: int

    def to_json(self) -> dict[str, Any]:
        """Return everything in the table, under names that stay."""
        return {
            "data": self.data,
            "split": self.split,
            "sha256": self.sha256,
            "by_word": self.by_word,
            "intervals": resampling(self.n_articles),
            "runs": [asdict(run) for run in self.runs],
        }

    def table(self) -> RenderableType:
        """Return a table for rich, a row for each run."""
        level = f"{LEVEL:.0%} interval"
        heads = ("parameters", "context", "minutes", "epochs", "per token", "per word")
        table = table_of("run", "tokenizer", *heads, "bits/byte", "ratio", level, left=2)
        for run in self.runs:
            cells = [
                run.run,
                f"{run.tokenizer} {run.vocab_size:,}",
                f"{run.n_parameters:,}",
                f"{run.context}/{run.stride}",
                _cell(run.minutes, ".1f"),
                _cell(run.epochs, ".2f"),
                _cell(run.token_perplexity, ",.2f"),
                _cell(run.word_perplexity, ",.2f"),
                _cell(run.bits_per_byte, ".4f"),
                _cell(run.ratio, ".4f"),
                interval_text(run.ratio_interval, ".4f"),
            ]
            table.add_row(*map(Text, cells))
        part = f"{self.split} of {self.data}" if self.split else self.data
        return Group(
            Text(f"Perplexity on {part}, sha256 {self.sha256}\n"), table, "", self._notes()
        )

    def _notes(self) -> Text:
        """Say what a ratio is, how its interval came about, and what runs do not share."""
        unit = "words" if self.by_word else "tokens"
        missing = why_no_interval(self.n_articles)
        drawn = (
            f"no interval: {missing}"
            if missing
            else (
                f"interval: {self.n_articles:,} articles drawn again {N_RESAMPLES:,} times, the "
                "same for both"
            )
        )
        notes = [f"ratio: perplexity over the first run's, by {unit}; {drawn}"]
        if len({(run.context, run.stride) for run in self.runs}) > 1:
            notes.append(
                "context/stride differ, and with them how much each run may look back at: for the "
                "same give --context and --stride"
            )
        without = [run.run for run in self.runs if run.word_perplexity is None]
        if without:
            notes.append(
                f"no figure per word for {', '.join(without)}: words that are read as <unk> and "
                "are not in train, or train is not here"
            )
        return Text("\n".join(notes))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def compare(
    runs: Sequence[Run],
    split: Split | None = None,
    *,
    text: Path | None = None,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 16,
    by_word: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Score runs on a split of their data, or on a text file, and put them side by side.

    The first run is what the others are compared with.
    by_word   compare per word alone, whatever the tokens
    say       told which run is being scored
    Others as for `measure`. Raises UserError, before anything is scored, where texts or tokens
    differ.
    """
    _require_comparable(runs, split, text, by_word=by_word)
    measured: list[Measurement] = []
    for run in runs:
        say(f"scoring {run.path}")
        try:
            measured.append(
                measure(
                    run, split, text=text, context=context, stride=stride, batch_size=batch_size
                )
            )
        except UserError as error:
            raise UserError(f"run {run.path}: {error}") from None
    return Comparison(
        runs=[_row(each, measured[0], by_word=by_word) for each in measured],
        data=measured[0].source,
        split=measured[0].split,
        sha256=measured[0].stream.sha256,
        by_word=by_word,
        n_articles=measured[0].articles.n_drawn,
    )


def _require_comparable(
    runs: Sequence[Run], split: Split | None, text: Path | None, *, by_word: bool
) -> None:
    """Raise UserError unless there are runs to compare, and what they read can be compared."""
    if len(runs) < 2:
        given = "is only one" if runs else "are none"
        raise UserError(f"of runs to compare there {given}: give two or more")
    first, *others = (_Read(run, *open_stream(run, split, text)) for run in runs)
    for other in others:
        _require_one_text(first, other)
        if by_word:
            _require_one_kind_of_word(first, other)
        else:
            _require_same_tokens(first, other)


class _Read(NamedTuple):
    """What a run reads, before it is scored."""

    run: Run
    corpus: Corpus
    split: Split
    stream: TokenStream

    def __str__(self) -> str:
        tokenizer = self.run.tokenizer
        return f"{self.run.path} ({tokenizer.kind}, {tokenizer.vocab_size:,} entries)"


def _require_one_text(first: _Read, other: _Read) -> None:
    if first.stream.sha256 != other.stream.sha256:
        names = (
            f"{read.run.path} ({read.split} of {read.corpus.name}, {read.stream.sha256[:12]}…)"
            for read in (first, other)
        )
        raise UserError(
            f"runs {' and '.join(names)} read different texts: no figures compare, so score all on "
            "one file with --text"
        )


def _require_same_tokens(first: _Read, other: _Read) -> None:
    if ids_sha256(first.stream.ids) != ids_sha256(other.stream.ids):
        raise UserError(
            f"runs {first} and {other} cut the text into different tokens: per token they do not "
            "compare, so ask for --by-word"
        )


def _require_one_kind_of_word(first: _Read, other: _Read) -> None:
    if [read.run.tokenizer.kind for read in (first, other)].count("basic_english") == 1:
        raise UserError(
            f"runs {first} and {other} have different words: those of basic_english are "
            "lower-cased and cut otherwise, so compare them with their own kind"
        )


def ids_sha256(ids: NDArray[Any]) -> str:
    """Return the hash of ids (n,), the same whether they are stored in two bytes or in four."""
    digest = hashlib.sha256()
    for start in range(0, len(ids), 1 << 18):
        digest.update(ids[start : start + (1 << 18)].astype("<u4").tobytes())
    return digest.hexdigest()


def _row(measured: Measurement, first: Measurement, *, by_word: bool) -> ComparedRun:
    figures, run = measured.to_json(), measured.run
    ratio, ratio_interval = _ratio(measured, first, by_word=by_word)
    seconds, epochs = (_number(run.report.get(name)) for name in ("elapsed_seconds", "epochs"))
    return ComparedRun(
        run=str(run.path),
        tokenizer=run.tokenizer.kind,
        vocab_size=run.tokenizer.vocab_size,
        n_parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        context=measured.windows.context,
        stride=measured.windows.stride,
        minutes=None if seconds is None else seconds / 60,
        epochs=epochs,
        token_perplexity=None if by_word else figures["token_perplexity"],
        word_perplexity=figures["comparable_perplexity"],
        bits_per_byte=figures["comparable_bits_per_byte"],
        ratio=ratio,
        ratio_interval=ratio_interval,
    )


def _number(value: Any) -> float | None:
    """Return a number of a report that somebody may have edited."""
    return float(value) if isinstance(value, int | float) else None


def _ratio(
    measured: Measurement, first: Measurement, *, by_word: bool
) -> tuple[float | None, list[float] | None]:
    """Return a run's perplexity over the first one's, and the interval of that."""
    if by_word and not (measured.names_every_word and first.names_every_word):
        return None, None  # a lower bound over another one is neither
    losses, samples = zip(*(_losses(m, by_word=by_word) for m in (measured, first)), strict=True)
    ratio = perplexity(losses[0] - losses[1])
    if samples[0] is None or samples[1] is None:
        return ratio, None
    found = interval(samples[0] - samples[1])
    assert found is not None
    return ratio, [perplexity(found.low), perplexity(found.high)]


def _losses(measured: Measurement, *, by_word: bool) -> tuple[float, NDArray[np.float64] | None]:
    """Return the loss on the text, and those on texts of the same articles drawn again, (R,)."""
    nats, counts = measured.static.article_nats, measured.articles.tokens
    if by_word:
        nats, counts = nats + measured.articles.naming_nats, measured.article_words
    return float(nats.sum() / counts.sum()), resampled_losses(nats, counts)
