"""Unknown words: with each `<unk>` named, probabilities of words sum to 1 again."""

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.config import TokenizerConfig, TokenizerKind
from minigpt.corpus import open_corpus
from minigpt.data import fit_tokenizer
from minigpt.errors import UserError
from minigpt.text import basic_english
from minigpt.tokenizer import Tokenizer
from minigpt.unknown_words import UnknownCost, UnknownWords
from tiny import MODELS, make_model, random_ids

TRAIN = [
    "the cat saw the dog , the dog saw the bird .",
    "",
    "the <unk> saw a cat ; a Bird and a fish fled .",
    "a fish saw the <unk> of the sea , the sea saw a fish .",
]
WORD_LISTS = {"wikitext": str.split, "basic_english": basic_english}
KINDS: list[TokenizerKind] = ["wikitext", "basic_english"]


def cut_tokenizer(kind: TokenizerKind, vocab_size: int) -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(kind, vocab_size), lambda: TRAIN)


def test_by_hand() -> None:
    tokenizer = cut_tokenizer("wikitext", 5)
    known = {tokenizer.decode([i], raw=True) for i in range(5)}
    assert known == {"<unk>", "<eos>", "the", "saw", "a"}
    unknown = UnknownWords(tokenizer, TRAIN)
    # cat 2, dog 2, "," 2, bird, "." 3, <unk> 2, ";", Bird, and, fish 3, fled, of, sea 2: 22 in all.
    assert len(unknown) == 13
    assert unknown.share("cat") == 2 / 22
    assert unknown.share("<unk>") == 2 / 22
    assert unknown.share("fish") == 3 / 22
    assert unknown.share("the") == unknown.share("<eos>") == unknown.share("cow") == 0
    cost = unknown.cost(["the fish saw <unk>", "", "a fled"])
    assert cost.nats == pytest.approx(-math.log(3 / 22) - math.log(2 / 22) - math.log(1 / 22))
    assert (cost.n_unknown, cost.n_unseen) == (3, 0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_probabilities_of_all_words_sum_to_1(kind: TokenizerKind) -> None:
    tokenizer = cut_tokenizer(kind, 7)
    assert tokenizer.unk_id is not None
    unknown = UnknownWords(tokenizer, TRAIN)
    model = make_model(replace(MODELS["paper"], vocab_size=7))
    probabilities = model(random_ids(1, 5, vocab_size=7))[0, -1].double().softmax(-1)
    p_unknown = probabilities[tokenizer.unk_id].item()
    entries = [tokenizer.decode([i], raw=True) for i in range(7)]
    words = {word for line in TRAIN for word in WORD_LISTS[kind](line)} | {*entries}
    assert len(words) > 7
    named = {
        word: p_unknown * unknown.share(word)
        if tokenizer.token_to_id(word) in (None, tokenizer.unk_id)
        else probabilities[tokenizer.token_to_id(word) or 0].item()
        for word in words
    }
    assert p_unknown > 1e-3
    assert sum(named.values()) == pytest.approx(1, abs=1e-9)
    assert sum(map(unknown.share, words)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_naming_is_free_where_nothing_was_cut(kind: TokenizerKind) -> None:
    tokenizer = cut_tokenizer(kind, 0)
    unknown = UnknownWords(tokenizer, TRAIN)
    assert len(unknown) == 1
    assert unknown.share("<unk>") == 1
    assert unknown.cost(TRAIN) == UnknownCost(nats=0.0, n_unknown=2, n_unseen=0)


def test_unseen_words_are_counted_and_cost_nothing() -> None:
    unknown = UnknownWords(cut_tokenizer("wikitext", 5), TRAIN)
    seen, both = unknown.cost(["cat dog"]), unknown.cost(["cat dog cow", "dinosaur"])
    assert (both.n_unknown, both.n_unseen) == (4, 2)
    assert both.nats == seen.nats > 0


def test_a_train_without_unknown_words_prices_none() -> None:
    tokenizer = Tokenizer.train(TokenizerConfig("wikitext", 0), lambda: ["a b a"])
    unknown = UnknownWords(tokenizer, ["a b a"])
    assert len(unknown) == 0
    assert unknown.cost(["a c", "b"]) == UnknownCost(nats=0.0, n_unknown=1, n_unseen=1)
    assert unknown.cost(["a b"]) == UnknownCost(nats=0.0, n_unknown=0, n_unseen=0)


def test_words_of_basic_english_are_its_own() -> None:
    unknown = UnknownWords(cut_tokenizer("basic_english", 6), TRAIN)
    assert unknown.share("bird") == unknown.share("sea") > 0  # twice each: "bird", "Bird"
    assert unknown.share("Bird") == unknown.share(";") == 0
    assert unknown.cost(["BIRD"]).nats == unknown.cost(["bird"]).nats > 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("aAt he.<unk>,;\"'İΣ\x1c\u3000\u00a0br/0"), max_size=40),
    size=st.integers(5, 19),
)
def test_each_unk_that_a_model_reads_is_charged(kind: TokenizerKind, text: str, size: int) -> None:
    tokenizer = cut_tokenizer(kind, size)
    ids = [i for line in tokenizer.encode_lines([text, *TRAIN]) for i in line]
    cost = UnknownWords(tokenizer, TRAIN).cost([text, *TRAIN])
    assert cost.n_unknown == ids.count(tokenizer.unk_id or 0)


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_kinds_that_spell_every_word_are_refused(kind: TokenizerKind) -> None:
    tokenizer = Tokenizer.train(TokenizerConfig(kind, 300), lambda: TRAIN)
    with pytest.raises(UserError, match=f"tokenizer kind {kind} reads no word as <unk>: take"):
        UnknownWords(tokenizer, TRAIN)


def test_memory_does_not_grow_with_the_text() -> None:
    tokenizer = cut_tokenizer("wikitext", 5)

    def lines(n: int) -> Iterator[str]:
        return (f"{TRAIN[i % 4]} {i % 97}" for i in range(n))

    def peak(n: int) -> int:
        tracemalloc.start()
        try:
            UnknownWords(tokenizer, lines(n)).cost(lines(n))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(997)
    assert peak(9_973) < 1.1 * peak(997) + 1_000


def test_the_cuts_of_wikitext2_cost_what_they_were_found_to_cost(wikitext2: Path) -> None:
    """The factors on perplexity, as computed once from the files alone, by other code."""
    corpus = open_corpus("wikitext-2")
    for vocab_size, factor in ((5_000, 3.57), (10_000, 2.03), (20_000, 1.29)):
        tokenizer = fit_tokenizer(corpus, TokenizerConfig("wikitext", vocab_size))
        unknown = UnknownWords(tokenizer, corpus.lines("train"))
        # The entry <unk> shares its own symbol with all the words that have no entry.
        assert len(unknown) == 33_278 - vocab_size + 1
        cost = unknown.cost(corpus.lines("valid"))
        assert cost.n_unseen == 0
        assert math.exp(cost.nats / 217_646) == pytest.approx(factor, abs=0.005)
