"""Measurement: a run's model on a text, in every unit, with intervals and all that it depends on.

    measure(run, "test", tiers=("cache",)) ──▶ `Measurement` ──to_json──▶ `evaluation_table`

One column is static: the model as it was trained. Each tier is another way of scoring the same
tokens, which no static figure may stand beside without saying so:

    temperature   the softmax is made flatter or sharper
    cache         words that came before, in places like this one, become likelier
    dynamic       the model goes on learning from what it has been scored on

Settings of a tier are fitted on valid, every time anew, and never on test: on the whole of it, but
for dynamic, which reads too slowly, on its first FITTED_ON_AT_MOST tokens. What a tier gains is
told against the static model in the same windows: dynamic's are half as far apart, which is worth
much by itself. Of the nats of single tokens nothing is kept but their sums over articles.

A articles · T context
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt.articles import Articles, count_articles, interval, resampled_losses, resampling
from minigpt.checkpoint import Run
from minigpt.corpus import Corpus, Split, open_corpus, open_text
from minigpt.data import TokenStream, prepare
from minigpt.dynamic_evaluation import (
    FITTED_ON_AT_MOST,
    dynamic_at_ends,
    dynamic_token_nats,
    fit_dynamic,
)
from minigpt.errors import UserError, require
from minigpt.evaluate import Score, nats_by_context, perplexity, token_nats
from minigpt.figures import by_context_length, by_position, convention, figures, score_figures
from minigpt.neural_cache import cache_at_ends, cached_token_nats, fit_cache
from minigpt.temperature import fit_temperature, tempered_token_nats
from minigpt.unknown_words import UnknownCost, UnknownWords

Tier = Literal["temperature", "cache", "dynamic"]
TIERS: tuple[Tier, ...] = ("temperature", "cache", "dynamic")


class Windows(NamedTuple):
    """How a text is cut; the figures depend on the first two."""

    context: int
    stride: int
    batch_size: int


@dataclass(frozen=True)
class Fitted:
    """How a tier was set on valid, and what its figure is to be told against."""

    settings: dict[str, Any]
    at_ends: dict[str, str]
    """Settings that are the lowest or the highest of those tried: there may be better ones."""
    n_tokens: int
    """So many of the first tokens of valid."""
    static: Score
    """The static model's, at the stride of the tier."""


@dataclass(frozen=True, eq=False)  # == of arrays is no truth value
class Column:
    """What a text costs under one way of scoring."""

    score: Score
    stride: int
    article_nats: NDArray[np.float64] = field(repr=False)
    """(A,)"""
    fitted: Fitted | None = None
    """None for the static model."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """What there is to say about a run on a text."""

    run: Run = field(repr=False)
    split: Split | None
    """None: a file that is none of the run's own splits"""
    source: str
    """Which corpus or file the text is."""
    stream: TokenStream = field(repr=False)
    windows: Windows
    articles: Articles = field(repr=False)
    unpriced: str | None
    """Why the words that are read as `<unk>` have no price; None where they have, or are none."""
    static: Column
    tiers: dict[Tier, Column]
    context_nats: NDArray[np.float64] = field(repr=False)
    """(T,), as `nats_by_context` gives them, of the static model"""
    context_tokens: NDArray[np.int64] = field(repr=False)
    """(T,)"""

    @property
    def naming(self) -> UnknownCost | None:
        """What it costs to name the words that are read as `<unk>`; None: that is not known."""
        return None if self.unpriced else self.articles.naming

    @property
    def names_every_word(self) -> bool:
        """Whether each of those words has a price, so that figures per word compare."""
        return self.naming is not None and not self.naming.n_unseen

    @property
    def article_words(self) -> NDArray[np.int64]:
        """Words of each article, (A,), over which nats are shared out among tokenizers."""
        counts_own = self.run.tokenizer.kind == "basic_english"
        return self.articles.tokens if counts_own else self.articles.words

    def to_json(self) -> dict[str, Any]:
        """Return every figure, always under the same names: None for what there is not."""
        static = figures(
            self.run,
            self.split,
            self.stream,
            self.static.score,
            context=self.windows.context,
            stride=self.windows.stride,
            unknown=self.naming,
        )
        kind, unknown_share = self.run.tokenizer.kind, self.stream.unknown_share
        return {
            **static,
            "data": self.source,
            # A file that is called like a corpus is none.
            "convention": convention(self.source if self.split else "", kind, unknown_share),
            **self.intervals(self.static),
            "intervals": resampling(self.articles.n_drawn),
            "unpriced": self.unpriced,
            "tiers": {tier: self._tier(self.tiers.get(tier)) for tier in TIERS},
            "by_position": by_position(self.context_nats, self.context_tokens),
            "by_context_length": by_context_length(self.context_nats, self.context_tokens),
        }

    def intervals(self, column: Column) -> dict[str, list[float] | None]:
        """Return the intervals of a column's perplexities per token and per word, or None."""
        nats, articles = column.article_nats, self.articles
        return {
            "token_interval": _perplexities(nats, articles.tokens),
            "comparable_interval": _perplexities(nats + articles.naming_nats, self.article_words)
            if self.names_every_word
            else None,
        }

    def _tier(self, column: Column | None) -> dict[str, Any] | None:
        if column is None or column.fitted is None:
            return None
        fitted = column.fitted
        return {
            "stride": column.stride,
            "static_token_perplexity": fitted.static.token_perplexity,
            "fitted_on": "valid",
            "fitted_tokens": fitted.n_tokens,
            "settings": fitted.settings,
            "settings_at_ends": fitted.at_ends,
            **score_figures(column.score, self.run.tokenizer.kind, self.naming),
            **self.intervals(column),
        }


def _perplexities(nats: NDArray[np.float64], counts: NDArray[np.int64]) -> list[float] | None:
    """Return the interval of a perplexity, or None for a text of few articles."""
    found = interval(resampled_losses(nats, counts))
    return None if found is None else [perplexity(found.low), perplexity(found.high)]


def open_stream(
    run: Run, split: Split | None, text: Path | None = None
) -> tuple[Corpus, Split, TokenStream]:
    """Return a text as a run reads it, and where it comes from: its own data, or a text file.

    Raises UserError where both are named, where there is no such data, or no words in it.
    """
    require(
        split is None or text is None,
        f"split is {split}, but the text {text} is scored whole: leave one of them out",
    )
    corpus = open_corpus(run.config.data) if text is None else open_text(text)
    part: Split = (split or "valid") if text is None else "test"
    return corpus, part, prepare(corpus, part, run.tokenizer)


def measure(
    run: Run,
    split: Split | None = None,
    *,
    text: Path | None = None,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 16,
    tiers: Sequence[Tier] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Score a run's model on the whole of a split of its data, or on a text file of any other.

    split     None: valid, where there is no text
    context   None: the model's own    stride   None: the context
    tiers     ways of scoring beside the static one
    say       told what is going on, where that takes long
    Raises UserError for sizes out of range, an empty text, and data that cannot be had. A text file
    needs none but itself, tiers apart: without train, no word that is read as `<unk>` has a price.
    """
    known = isinstance(tiers, Collection) and all(tier in TIERS for tier in tiers)
    require(known, f"tiers are {tiers!r}: they must be among {TIERS}")
    context = run.config.model.context_length if context is None else context
    windows = Windows(context, context if stride is None else stride, batch_size)
    corpus, part, stream = open_stream(run, split, text)
    has_unknown = bool((stream.ids == run.tokenizer.unk_id).any())  # False where there is no id
    needs_own = text is not None and (has_unknown or tiers)
    own, missing = _own_corpus(run, tiers) if needs_own else (corpus, None)
    unknown = UnknownWords(run.tokenizer, own.lines("train")) if has_unknown and own else None
    nats = token_nats(run.model, stream.ids, run.tokenizer.eos_id, **windows._asdict())
    require(
        not np.isnan(nats).any(),
        f"{run.path} scores words with what is no number: its weights are damaged, so restore them "
        "from a copy or train it anew",
    )
    by_context = nats_by_context(nats, context=context, stride=windows.stride)
    articles = count_articles(corpus.lines(part), run.tokenizer, unknown)
    measured = Measurement(
        run=run,
        split=part if text is None else None,
        source=run.config.data if text is None else str(text),
        stream=stream,
        windows=windows,
        articles=articles,
        unpriced=missing,
        static=Column(Score.of(stream, nats), windows.stride, articles.sums(nats)),
        tiers={},
        context_nats=by_context[0],
        context_tokens=by_context[1],
    )
    return measured if own is None else _with_tiers(measured, tiers, own, say)


def _own_corpus(run: Run, tiers: Sequence[Tier]) -> tuple[Corpus | None, str | None]:
    """Return the corpus that a run learned from, or why it is not here.

    Raises UserError where tiers are to be fitted on it and it cannot be had.
    """
    try:
        return open_corpus(run.config.data), None
    except UserError as error:
        if tiers:
            raise UserError(
                f"{tiers[0]} is fitted on valid of {run.config.data}, which is not here: {error}"
            ) from None
        return None, str(error)


def _with_tiers(
    measured: Measurement, tiers: Sequence[Tier], own: Corpus, say: Callable[[str], None]
) -> Measurement:
    """Add a column for each tier, fitted on the valid of a run's own corpus."""
    columns = {}
    for tier in TIERS:
        if tier in tiers:
            valid = prepare(own, "valid", measured.run.tokenizer).ids
            read = len(valid) if tier != "dynamic" else min(len(valid), FITTED_ON_AT_MOST)
            say(f"{tier}: fitted on {read:,} tokens of valid, then the text is scored with that")
            columns[tier] = _tier_column(measured, tier, valid, read)
    return replace(measured, tiers=columns)


def _tier_column(measured: Measurement, tier: Tier, valid: NDArray[Any], n_fitted: int) -> Column:
    """Return the column of a tier, its settings fitted on n_fitted of the ids of valid (n,)."""
    run, stream, windows = measured.run, measured.stream, measured.windows
    scored = _score_tier(tier, run, stream.ids, valid, windows)
    static = measured.static.score
    if scored.stride != windows.stride:
        sizes = windows._replace(stride=scored.stride)._asdict()
        nats = token_nats(run.model, stream.ids, run.tokenizer.eos_id, **sizes)
        static = Score.of(stream, nats)
    return Column(
        Score.of(stream, scored.nats),
        scored.stride,
        measured.articles.sums(scored.nats),
        Fitted(scored.settings, scored.at_ends, n_fitted, static),
    )


class _Scored(NamedTuple):
    """What a tier made of a text."""

    settings: dict[str, Any]
    at_ends: dict[str, str]
    stride: int
    nats: NDArray[np.float32]
    """(n,)"""


def _score_tier(
    tier: Tier, run: Run, ids: NDArray[Any], valid: NDArray[Any], windows: Windows
) -> _Scored:
    """Return the settings that suit valid best of those tried, and the nats of ids under them."""
    model, eos_id, sizes = run.model, run.tokenizer.eos_id, windows._asdict()
    if tier == "temperature":
        temperature = fit_temperature(model, valid, eos_id, **sizes)
        nats = tempered_token_nats(model, ids, eos_id, temperature, **sizes)
        return _Scored({"temperature": temperature}, {}, windows.stride, nats)
    if tier == "cache":
        cache = fit_cache(model, valid, eos_id, **sizes)
        nats = cached_token_nats(model, ids, eos_id, cache, **sizes)
        return _Scored(asdict(cache), cache_at_ends(cache), windows.stride, nats)
    # One segment after the other: its length, not the stride, says how far a window moves.
    dynamic = fit_dynamic(model, valid, eos_id, context=windows.context)
    nats = dynamic_token_nats(model, ids, eos_id, dynamic, context=windows.context)
    return _Scored(asdict(dynamic), dynamic_at_ends(dynamic), dynamic.segment, nats)
