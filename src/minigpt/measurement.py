"""Measurement: a run's model on a text, in every unit, with intervals and all that it depends on.

    measure(run, "test", tiers=("cache",)) ──▶ `Measurement` ──to_json──▶ `evaluation_table`

One column is static: the model as it was trained. Each tier is another way of scoring the same
tokens, which no static figure may stand beside without saying so:

    temperature   the softmax is made flatter or sharper
    cache         words that came before, in places like this one, become likelier
    dynamic       the model goes on learning from what it has been scored on

Settings of a tier are fitted on valid, every time anew, and never on test: on the whole of it, but
for dynamic, which reads too slowly, on its first FITTED_ON_AT_MOST tokens. Of the nats of single
tokens nothing is kept but their sums over articles.

A articles · T context
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt.articles import Articles, count_articles, interval, resampled_losses, resampling
from minigpt.checkpoint import Run
from minigpt.corpus import Corpus, Split, open_corpus, open_text
from minigpt.data import TokenStream, prepare
from minigpt.dynamic_evaluation import FITTED_ON_AT_MOST, dynamic_token_nats, fit_dynamic
from minigpt.evaluate import Score, nats_by_context, perplexity, token_nats
from minigpt.info import convention, figures, score_figures
from minigpt.neural_cache import cached_token_nats, fit_cache
from minigpt.temperature import fit_temperature, tempered_token_nats
from minigpt.unknown_words import UnknownWords

Tier = Literal["temperature", "cache", "dynamic"]
TIERS: tuple[Tier, ...] = ("temperature", "cache", "dynamic")


class Windows(NamedTuple):
    """How a text is cut; the figures depend on the first two."""

    context: int
    stride: int
    batch_size: int


@dataclass(frozen=True)
class Column:
    """What a text costs under one way of scoring."""

    score: Score
    article_nats: NDArray[np.float64]
    """(A,)"""
    settings: dict[str, Any]
    """Of a tier, as fitted on valid."""
    fitted_tokens: int
    """So many of the first tokens of valid, 0 for the static model."""


@dataclass(frozen=True)
class Measurement:
    """What there is to say about a run on a text."""

    run: Run
    split: Split | None
    """None: a file that is none of the run's own splits"""
    source: str
    """Which corpus or file the text is."""
    stream: TokenStream
    windows: Windows
    articles: Articles
    static: Column
    tiers: dict[Tier, Column]
    context_nats: NDArray[np.float64]
    """(T,), as `nats_by_context` gives them, of the static model"""
    context_tokens: NDArray[np.int64]
    """(T,)"""

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
            unknown=self.articles.naming,
        )
        kind, unknown_share = self.run.tokenizer.kind, self.stream.unknown_share
        return {
            **static,
            "data": self.source,
            # A file that is called like a corpus is none.
            "convention": convention(self.source if self.split else "", kind, unknown_share),
            **self._intervals(self.static),
            "intervals": resampling(len(self.articles)),
            "tiers": {tier: self._tier(self.tiers.get(tier)) for tier in TIERS},
            "by_position": self._by_position(),
            "by_context_length": self._by_context_length(),
        }

    def _tier(self, column: Column | None) -> dict[str, Any] | None:
        if column is None:
            return None
        kind, naming = self.run.tokenizer.kind, self.articles.naming
        return {
            "fitted_on": "valid",
            "fitted_tokens": column.fitted_tokens,
            "settings": column.settings,
            **score_figures(column.score, kind, naming),
            **self._intervals(column),
        }

    def _intervals(self, column: Column) -> dict[str, list[float] | None]:
        nats, articles = column.article_nats, self.articles
        named = None if articles.naming.n_unseen else nats + articles.naming_nats
        return {
            "token_interval": _perplexities(nats, articles.tokens),
            "comparable_interval": None
            if named is None
            else _perplexities(named, self.article_words),
        }

    def _by_position(self) -> dict[str, list[Any]]:
        """Return tokens and perplexity at each position of a window, counted from 0."""
        return {
            "tokens": self.context_tokens.tolist(),
            "perplexity": [
                perplexity(float(nats) / int(n)) if n else None
                for nats, n in zip(self.context_nats, self.context_tokens, strict=True)
            ],
        }

    def _by_context_length(self) -> list[dict[str, Any]]:
        """Return the same by how many ids could be looked back at: 1, 2, 3-4, 5-8, 9-16, …"""
        rows, first, longest = [], 1, len(self.context_tokens)
        while first <= longest:
            last = min(longest, 1 << (first - 1).bit_length())
            among = slice(first - 1, last)
            n_tokens = int(self.context_tokens[among].sum())
            if n_tokens:
                value = perplexity(float(self.context_nats[among].sum()) / n_tokens)
                rows.append({"from": first, "to": last, "tokens": n_tokens, "perplexity": value})
            first = last + 1
        return rows


def _perplexities(nats: NDArray[np.float64], counts: NDArray[np.int64]) -> list[float] | None:
    """Return the interval of a perplexity, or None for a text of few articles."""
    found = interval(resampled_losses(nats, counts))
    return None if found is None else [perplexity(found.low), perplexity(found.high)]


def open_stream(
    run: Run, split: Split, text: Path | None = None
) -> tuple[Corpus, Split, TokenStream]:
    """Return a text as a run reads it, and where it comes from: its own data, or a text file.

    Raises UserError where there is no such data, or no words in it.
    """
    if text is None:
        corpus = open_corpus(run.config.data)
    else:
        corpus, split = open_text(text), "test"
    return corpus, split, prepare(corpus, split, run.tokenizer)


def measure(
    run: Run,
    split: Split = "valid",
    *,
    text: Path | None = None,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 16,
    tiers: Sequence[Tier] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Score a run's model on the whole of a split of its data, or on a text file of any other.

    context   None: the model's own    stride   None: the context
    tiers     ways of scoring beside the static one
    say       told what is going on, where that takes long
    Raises UserError for sizes out of range, an empty text, and data that cannot be had.
    """
    tokenizer = run.tokenizer
    context = run.config.model.context_length if context is None else context
    windows = Windows(context, context if stride is None else stride, batch_size)
    corpus, part, stream = open_stream(run, split, text)
    has_unknown, own = tokenizer.unk_id is not None, corpus
    if text is not None and (has_unknown or tiers):
        own = open_corpus(run.config.data)
    nats = token_nats(run.model, stream.ids, tokenizer.eos_id, **windows._asdict())
    unknown = UnknownWords(tokenizer, own.lines("train")) if has_unknown else None
    articles = count_articles(corpus.lines(part), tokenizer, unknown)
    columns = {}
    for tier in TIERS:
        if tier in tiers:
            valid = prepare(own, "valid", tokenizer).ids
            read = len(valid) if tier != "dynamic" else min(len(valid), FITTED_ON_AT_MOST)
            say(f"{tier}: fitted on {read:,} tokens of valid, then the text is scored with that")
            settings, tier_nats = _score_tier(tier, run, stream.ids, valid, windows)
            columns[tier] = _column(stream, articles, tier_nats, settings, read)
    by_context = nats_by_context(nats, context=context, stride=windows.stride)
    return Measurement(
        run=run,
        split=split if text is None else None,
        source=run.config.data if text is None else str(text),
        stream=stream,
        windows=windows,
        articles=articles,
        static=_column(stream, articles, nats, {}, 0),
        tiers=columns,
        context_nats=by_context[0],
        context_tokens=by_context[1],
    )


def _column(
    stream: TokenStream,
    articles: Articles,
    nats: NDArray[np.float32],
    settings: dict[str, Any],
    fitted_tokens: int,
) -> Column:
    return Column(Score.of(stream, nats), articles.sums(nats), settings, fitted_tokens)


def _score_tier(
    tier: Tier, run: Run, ids: NDArray[Any], valid: NDArray[Any], windows: Windows
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return the settings that suit valid best, and the nats of ids under them."""
    model, eos_id, sizes = run.model, run.tokenizer.eos_id, windows._asdict()
    if tier == "temperature":
        temperature = fit_temperature(model, valid, eos_id, **sizes)
        nats = tempered_token_nats(model, ids, eos_id, temperature, **sizes)
        return {"temperature": temperature}, nats
    if tier == "cache":
        cache = fit_cache(model, valid, eos_id, **sizes)
        return asdict(cache), cached_token_nats(model, ids, eos_id, cache, **sizes)
    # One segment after the other: its length, not the stride, says how far a window moves.
    dynamic = fit_dynamic(model, valid, eos_id, context=windows.context)
    return asdict(dynamic), dynamic_token_nats(model, ids, eos_id, dynamic, context=windows.context)
