"""Articles: found as WikiText sets them, counted exactly, drawn again as the textbook has it."""

import math
import tracemalloc
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import articles, vocabulary
from minigpt.articles import (
    N_RESAMPLES,
    Articles,
    count_articles,
    interval,
    numbered,
    resampled_losses,
    why_no_interval,
)
from minigpt.config import TokenizerConfig, TokenizerKind
from minigpt.corpus import open_corpus
from minigpt.data import prepare
from minigpt.tokenizer import Tokenizer
from minigpt.unknown_words import UnknownWords
from tiny import write_articles

KINDS: tuple[TokenizerKind, ...] = ("wikitext", "basic_english", "bpe", "char")
TRAIN = ["", " = Title = ", "", "the cat sat on the mat , the dog too .", 'a "quoted" word', "é ."]
PIECES = ["", " ", " = Title = ", " = = Part = = ", "the cat .", '"', "<|endoftext|>", " = x", "é"]


def tokenizer_of(kind: TokenizerKind) -> Tokenizer:
    size = {"wikitext": 7, "basic_english": 9, "bpe": 290, "char": 0}[kind]
    return Tokenizer.train(TokenizerConfig(kind, size), lambda: TRAIN)


def grouped(lines: list[str]) -> list[list[str]]:
    return [[line for _, line in group] for _, group in groupby(numbered(lines), lambda it: it[0])]


def test_a_title_stands_between_two_blank_lines() -> None:
    first = ["", " = One = ", "", "text", " = = Part = = ", "", " = no = title = = ", ""]
    second = [" = Two = ", " ", "formula :", " = 3 x = ", "", ""]
    third = [" = Three = ", "", "end"]
    assert grouped(first + second + third) == [first, second, third]
    assert grouped(["before", "", " = One = ", "", "text"]) == [
        ["before", ""],
        [" = One = ", "", "text"],
    ]
    assert grouped([]) == []
    assert grouped(["alone"]) == [["alone"]]
    assert grouped(["", ""]) == [["", ""]]


def test_a_mark_ends_an_article_and_blank_lines_follow_it() -> None:
    lines = ["a", "<|endoftext|>", "", "b", "<|endoftext|>", "", "", " = T = ", "", "c", ""]
    assert [len(article) for article in grouped(lines)] == [3, 4, 4]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(lines=st.lists(st.sampled_from(PIECES), max_size=17))
def test_articles_one_by_one_are_the_whole_text(kind: TokenizerKind, lines: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    whole = [i for ids in tokenizer.encode_lines(lines) for i in ids]
    parts = [[i for ids in tokenizer.encode_lines(part) for i in ids] for part in grouped(lines)]
    assert [i for part in parts for i in part] == whole
    unknown = UnknownWords(tokenizer, TRAIN) if tokenizer.unk_id is not None else None
    found = count_articles(lines, tokenizer, unknown)
    assert found.tokens.tolist() == [len(part) for part in parts]
    assert found.words.sum() == sum(len(line.split()) + 1 for line in lines)
    assert found.bytes.sum() == sum(len(f"{line}\n".encode()) for line in lines)
    if unknown is not None:
        cost = unknown.cost(lines)
        assert found.naming_nats.sum() == pytest.approx(cost.nats)
        assert found.naming.nats == pytest.approx(cost.nats)
        assert found.naming[1:] == cost[1:]
    if kind in ("bpe", "char") and any(line.strip() for line in lines):
        # An article is what these two take for a document.
        assert len(found) == whole.count(tokenizer.eos_id)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_stream(kind: TokenizerKind, tmp_path: Path) -> None:
    corpus = open_corpus(str(write_articles(tmp_path / "text")))
    tokenizer = tokenizer_of(kind)
    stream = prepare(corpus, "valid", tokenizer, tmp_path)
    found = count_articles(corpus.lines("valid"), tokenizer, None)
    assert len(found) == 7
    assert found.tokens.sum() == len(stream.ids)
    assert found.words.sum() == stream.n_words
    assert found.bytes.sum() == stream.n_bytes
    nats = np.random.default_rng(3).random(len(stream.ids), dtype=np.float32)
    ends = [sum(found.tokens[: i + 1]) for i in range(7)]
    begins = [0, *ends[:-1]]
    expected = [sum(map(float, nats[i:j])) for i, j in zip(begins, ends, strict=True)]
    assert found.sums(nats) == pytest.approx(expected)


def test_an_article_without_tokens_has_none_of_the_nats() -> None:
    counts = np.array([2, 0, 3])
    found = Articles(counts, counts, counts, counts * 0.0, naming=None)
    assert found.sums(np.arange(5, dtype=np.float32)).tolist() == [1, 0, 9]
    assert (len(found), found.n_drawn) == (3, 2)


@pytest.mark.parametrize("n", [0, 4, 6])
def test_nats_of_another_text_are_refused(n: int) -> None:
    """Else the last articles would be given fewer, and a text of zeros would look well."""
    counts = np.array([2, 0, 3])
    found = Articles(counts, counts, counts, counts * 0.0, naming=None)
    with pytest.raises(ValueError, match=f"articles of 5 tokens, and nats of {n}"):
        found.sums(np.ones(n, dtype=np.float32))


def test_memory_does_not_grow_with_an_article(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_BATCH_CHARACTERS", 1 << 12)
    tokenizer = tokenizer_of("wikitext")
    unknown = UnknownWords(tokenizer, TRAIN)

    def lines(n: int) -> Iterator[str]:
        return (f"the cat {i % 97} " * 11 for i in range(n))

    def peak(n: int) -> int:
        tracemalloc.start()
        try:
            count_articles(lines(n), tokenizer, unknown)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(97)
    assert peak(1_999) < 1.2 * peak(199) + 1_000


def drawn(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nats and counts of n articles, the longer the harder."""
    random = np.random.default_rng(seed)
    counts = random.integers(100, 5_000, size=n)
    return counts * (4 + counts / 10_000 + random.normal(0, 0.3, size=n)), counts


def test_it_is_the_bootstrap_of_a_ratio() -> None:
    nats, counts = drawn(61, 1)
    samples = resampled_losses(nats, counts)
    assert samples is not None
    assert samples.shape == (N_RESAMPLES,)
    random = np.random.default_rng(17)
    by_hand = []
    for _ in range(5_000):
        again = random.integers(61, size=61)
        by_hand.append(nats[again].sum() / counts[again].sum())
    assert samples.mean() == pytest.approx(np.mean(by_hand), abs=0.1 * np.std(by_hand))
    assert samples.std() == pytest.approx(np.std(by_hand), rel=0.06)
    found = interval(samples)
    assert found is not None
    low, high = np.quantile(by_hand, [0.025, 0.975])
    assert found == pytest.approx((low, high), abs=0.15 * np.std(by_hand))


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(300):
        counts = random.integers(100, 2_000, size=41)
        found = interval(resampled_losses(counts * random.normal(5, 0.5, size=41), counts))
        assert found is not None
        covered += found.low <= 5 <= found.high
    assert 0.89 <= covered / 300 <= 0.98


def test_the_same_articles_are_drawn_for_every_model() -> None:
    nats, counts = drawn(23, 2)
    first, second = resampled_losses(nats, counts), resampled_losses(nats + 0.1 * counts, counts)
    assert first is not None
    assert second is not None
    assert first.std() > 0.01
    assert second - first == pytest.approx(0.1)  # a difference for all is no matter of chance
    again = resampled_losses(nats, counts)
    assert again is not None
    assert np.array_equal(first, again)


def test_a_long_text_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    nats, counts = drawn(13, 3)
    whole = resampled_losses(nats, counts)
    monkeypatch.setattr(articles, "_DRAWS_AT_ONCE", 13 * 7)  # which does not divide N_RESAMPLES
    parts = resampled_losses(nats, counts)
    assert whole is not None
    assert parts is not None
    assert parts == pytest.approx(whole)


def test_nothing_else_is_drawn_from() -> None:
    before = np.random.get_state()[1]
    resampled_losses(*drawn(7, 4))
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("n", [0, 1, 9])
def test_few_articles_have_no_interval(n: int) -> None:
    assert interval(resampled_losses(*drawn(n, 6))) is None
    reason = why_no_interval(n)
    assert reason is not None
    assert f"the text has {n} article{'' if n == 1 else 's'} (titles:" in reason
    assert resampled_losses(*drawn(10, 6)) is not None
    assert why_no_interval(10) is None


def test_articles_without_words_are_not_drawn() -> None:
    nats, counts = drawn(11, 8)
    with_empty = resampled_losses(np.append(nats, 0.0), np.append(counts, 0))
    assert with_empty is not None
    assert np.array_equal(with_empty, resampled_losses(nats, counts))
    assert resampled_losses(nats[:9], counts[:9]) is None
    assert resampled_losses(np.append(nats[:9], 0.0), np.append(counts[:9], 0)) is None


def test_articles_alike_leave_no_doubt() -> None:
    found = interval(resampled_losses(np.full(13, 7 * math.log(11)), np.full(13, 7)))
    assert found == pytest.approx((math.log(11), math.log(11)))


@pytest.mark.parametrize(("split", "n"), [("train", 600), ("valid", 60), ("test", 60)])
def test_wikitext2_has_as_many_articles_as_are_published(
    split: str, n: int, wikitext2: Path
) -> None:
    lines = open_corpus("wikitext-2").lines(split)
    numbers = {number for number, _ in numbered(lines)}
    assert numbers == set(range(n))
