"""The articles of a text, and how far a perplexity would move had others been drawn.

    text ──numbered──▶ articles ──count_articles──▶ `Articles` ──resampled_losses──▶ `interval`

Words of one article say much about each other, words of two hardly any. So an interval resamples
whole articles: the nats of A articles, drawn with replacement, over the tokens of the same ones.
That is the percentile bootstrap of a ratio (Efron and Tibshirani 1993, sections 8.4 and 13.3).
Intervals of one text draw the same articles in the same order: a difference of two models can be
taken draw by draw, and is far more certain than either figure (Koehn 2004, section 4).

In: lines, a tokenizer, nats (n,) of the tokens. Out: sums (A,), and from these an `Interval`.

A articles · R resamples
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt.tokenizer import Tokenizer
from minigpt.unknown_words import UnknownCost, UnknownWords
from minigpt.vocabulary import DOCUMENT_MARK, is_title

LEVEL = 0.95
N_RESAMPLES = 2_000
SEED = 1
# Drawing few articles again shows too little of how they differ: a percentile interval that claims
# 95 % holds the truth in 90 % of texts of ten articles, and in 80 % of texts of five.
MIN_ARTICLES = 10
_DRAWS_AT_ONCE = 1 << 22  # 32 MB of counts: a text of 30,000 articles is drawn in parts


def numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each line behind the number of its article, counted from 0.

    An article begins with a WikiText title, or with the first words after `<|endoftext|>`; where
    the tokenizers bpe and char end a document, an article ends. What stands before the first title
    is one too, and blank lines belong to what they follow.
    """
    ended = chain(lines, [""])
    earlier, line = "", next(ended)
    number, is_over, has_text = 0, False, False
    for later in ended:
        is_over = is_over or (has_text and is_title(earlier, line, later))
        if is_over and line.strip():
            number, is_over = number + 1, False
        yield number, line
        has_text = has_text or bool(line.strip())
        is_over = is_over or line.strip() == DOCUMENT_MARK
        earlier, line = line, later


@dataclass(frozen=True)
class Articles:
    """What stands in each article of a text, in their order."""

    tokens: NDArray[np.int64]
    """(A,)"""
    words: NDArray[np.int64]
    """(A,), line ends included"""
    bytes: NDArray[np.int64]
    """(A,)"""
    naming_nats: NDArray[np.float64]
    """(A,), to say which word each `<unk>` is"""
    naming: UnknownCost
    """The same for the whole text."""

    def __len__(self) -> int:
        """Return A."""
        return len(self.tokens)

    @property
    def n_drawn(self) -> int:
        """How many can be drawn again: one of quotation marks has no token for basic_english."""
        return int((self.tokens > 0).sum())

    def sums(self, nats: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the nats of each article, (A,), for those of each token, (n,).

        Raises ValueError where the articles have more tokens than n, or fewer: they were counted in
        another text, and each would be given nats of its neighbours.
        """
        if self.tokens.sum() != len(nats):
            raise ValueError(f"articles of {self.tokens.sum()} tokens, and nats of {len(nats)}")
        parts = np.split(nats, np.cumsum(self.tokens)[:-1])
        return np.array([part.sum(dtype=np.float64) for part in parts])


def count_articles(
    lines: Iterable[str], tokenizer: Tokenizer, unknown: UnknownWords | None
) -> Articles:
    """Count what stands in each article of `lines`, read one after the other.

    unknown   prices the words that are read as `<unk>`; None: leave their prices at 0
    """
    counts = [
        _count((line for _, line in article), tokenizer, unknown)
        for _, article in groupby(numbered(lines), key=itemgetter(0))
    ]
    costs = [count.naming for count in counts]
    return Articles(
        tokens=np.array([count.tokens for count in counts], dtype=np.int64),
        words=np.array([count.words for count in counts], dtype=np.int64),
        bytes=np.array([count.bytes for count in counts], dtype=np.int64),
        naming_nats=np.array([cost.nats for cost in costs]),
        naming=_sum(costs),
    )


class _Count(NamedTuple):
    tokens: int
    words: int
    bytes: int
    naming: UnknownCost


def _count(lines: Iterable[str], tokenizer: Tokenizer, unknown: UnknownWords | None) -> _Count:
    """Count one article, a line at a time: it may be a whole book."""
    words, n_bytes, naming = 0, 0, UnknownCost(0.0, 0, 0)

    def read() -> Iterator[str]:
        nonlocal words, n_bytes, naming
        for line in lines:
            words += len(line.split()) + 1
            n_bytes += len(line.encode()) + 1
            if unknown is not None:
                naming = _sum([naming, unknown.cost([line])])
            yield line

    tokens = sum(map(len, tokenizer.encode_lines(read())))
    return _Count(tokens, words, n_bytes, naming)


def _sum(costs: Sequence[UnknownCost]) -> UnknownCost:
    return UnknownCost(
        math.fsum(cost.nats for cost in costs),
        sum(cost.n_unknown for cost in costs),
        sum(cost.n_unseen for cost in costs),
    )


class Interval(NamedTuple):
    """Where a figure lies in LEVEL of the texts that might have been drawn instead."""

    low: float
    high: float


def resampled_losses(
    nats: NDArray[np.float64], counts: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Return the loss on each of R texts, (R,): Σ nats / Σ counts over articles drawn again.

    nats, counts   (A,): what each article cost, and over how many tokens or words that is shared
    None where the text has fewer than MIN_ARTICLES articles: no drawing could tell how they differ.
    """
    nats, counts = nats[counts > 0], counts[counts > 0]
    n_articles = len(counts)
    if n_articles < MIN_ARTICLES:
        return None
    random = np.random.default_rng(SEED)
    shares = np.full(n_articles, 1 / n_articles)
    losses = []
    n_rows = max(1, _DRAWS_AT_ONCE // n_articles)
    for start in range(0, N_RESAMPLES, n_rows):
        # How often each article was drawn, (rows, A): which one came when makes no difference.
        times = random.multinomial(n_articles, shares, size=min(n_rows, N_RESAMPLES - start))
        with np.errstate(invalid="ignore"):  # a model may say nan, or that a word cannot be
            losses.append((times @ nats) / (times @ counts))
    return np.concatenate(losses)


def interval(samples: NDArray[np.float64] | None) -> Interval | None:
    """Return the middle LEVEL of samples (R,) of a figure; None for None."""
    if samples is None:
        return None
    with np.errstate(invalid="ignore"):
        low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def why_no_interval(n_articles: int) -> str | None:
    """Return why a text of so many articles has no interval, or None where it has one.

    n_articles   as `Articles.n_drawn` counts them
    """
    if n_articles >= MIN_ARTICLES:
        return None
    return (
        f"the text has {n_articles} article{'s' * (n_articles != 1)} (titles: a line ` = Title = ` "
        f"between blank lines), and to draw them again at least {MIN_ARTICLES} are needed"
    )


def resampling(n_articles: int) -> dict[str, Any]:
    """Return what the intervals of a text of so many articles rest on, ready for JSON."""
    return {
        "level": LEVEL,
        "resamples": N_RESAMPLES,
        "seed": SEED,
        "articles": n_articles,
        "missing": why_no_interval(n_articles),
    }
