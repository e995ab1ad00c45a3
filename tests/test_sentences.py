"""The two hundred sentences: the same every time, marked rightly, and no place gives them away."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from minigpt.config import TokenizerConfig
from minigpt.corpus import open_corpus
from minigpt.data import fit_tokenizer
from minigpt.sentences import (
    Sentence,
    best_fixed_place,
    pronoun_sentences,
    verb_object_sentences,
)

BOTH = {"verb_object": verb_object_sentences, "pronoun": pronoun_sentences}
PRONOUNS = {
    "she": "queen mother girl woman actress daughter wife sister",
    "he": "king father boy actor son husband brother",
    "they": "soldiers players men children officers",
}
DEEDS = {
    "built": "bridge",
    "wrote": "letter",
    "won": "game",
    "led": "army",
    "left": "city",
    "saw": "ship",
    "took": "gun",
    "played": "song",
    "held": "position",
    "received": "award",
    "opened": "church",
    "lost": "battle",
    "told": "story",
    "found": "body",
    "killed": "animal",
    "made": "film",
    "published": "book",
    "crossed": "river",
    "joined": "team",
    "destroyed": "house",
}


@pytest.mark.parametrize("name", BOTH)
def test_there_are_a_hundred_and_no_two_alike(name: str) -> None:
    sentences = BOTH[name]()
    assert len(sentences) == 100
    assert len({str(sentence) for sentence in sentences}) == 100
    assert all(len(sentence.words) <= 24 for sentence in sentences)
    for sentence in sentences:
        assert all(word == word.lower() and word.split() == [word] for word in sentence.words)
        assert str(sentence).split() == list(sentence.words)


@pytest.mark.parametrize("name", BOTH)
def test_a_later_word_looks_at_earlier_ones(name: str) -> None:
    for sentence in BOTH[name]():
        assert min(sentence.target, sentence.rival) >= 0
        assert max(sentence.target, sentence.rival) < sentence.looker < len(sentence.words)
        assert sentence.target != sentence.rival


def test_they_are_the_same_in_every_process() -> None:
    code = "from minigpt.sentences import *; print(verb_object_sentences(), pronoun_sentences())"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert told == {f"{verb_object_sentences()} {pronoun_sentences()}{os.linesep}".encode()}


def singular(word: str) -> str:
    """Return which of the things of DEEDS a word names, one or several."""
    return next(t for t in DEEDS.values() if word in (t, f"{t}s", f"{t}es", f"{t[:-1]}ies"))


def test_an_object_is_marked_with_the_verb_done_to_it() -> None:
    for sentence in verb_object_sentences():
        verb, rival = sentence.words[sentence.target], sentence.words[sentence.rival]
        thing = singular(sentence.words[sentence.looker])
        assert DEEDS[verb] == thing
        assert rival in DEEDS
        assert rival != verb
        # The rival has its own object, right behind it but for an article and an adjective.
        behind = sentence.words[sentence.rival + 1 : sentence.rival + 4]
        own = next(word for word in behind if word not in ("the", "first", ","))
        assert singular(own) == DEEDS[rival]
        assert sentence.words[sentence.looker + 1 :] == (".",)


def test_a_pronoun_is_marked_with_the_noun_that_it_fits() -> None:
    for sentence in pronoun_sentences():
        pronoun = sentence.words[sentence.looker]
        noun, rival = sentence.words[sentence.target], sentence.words[sentence.rival]
        assert noun in PRONOUNS[pronoun].split()
        assert rival not in PRONOUNS[pronoun].split()
        assert any(rival in nouns.split() for nouns in PRONOUNS.values())
        for i in (sentence.target, sentence.rival):
            assert sentence.words[i - 1] in ("the", "old", "young")


def test_only_the_pronoun_decides() -> None:
    told = {sentence.words: sentence for sentence in pronoun_sentences()}
    for sentence in told.values():
        twins = [
            other
            for other in told.values()
            if other.words[: sentence.looker] == sentence.words[: sentence.looker]
            and other.words[sentence.looker + 1 :] == sentence.words[sentence.looker + 1 :]
            and other is not sentence
        ]
        assert [(twin.target, twin.rival) for twin in twins] == [(sentence.rival, sentence.target)]


@pytest.mark.parametrize("name", BOTH)
def test_no_fixed_place_solves_them(name: str) -> None:
    sentences = BOTH[name]()
    for places in (
        Counter(s.looker - s.target for s in sentences),
        Counter(s.target for s in sentences),
    ):
        assert max(places.values()) <= 30
        assert len(places) >= 6


@pytest.mark.parametrize("name", BOTH)
def test_the_nearer_the_first_and_the_favourite_word_are_right_by_half(name: str) -> None:
    sentences = BOTH[name]()
    assert sum(sentence.target > sentence.rival for sentence in sentences) == 50
    targets = Counter(s.words[s.target] for s in sentences)
    rivals = Counter(s.words[s.rival] for s in sentences)
    assert targets == rivals
    # However much one word is liked better than another, it is meant as often as not.
    pairs = Counter((s.words[s.target], s.words[s.rival]) for s in sentences)
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)


def sentence(target: int, looker: int) -> Sentence:
    return Sentence(tuple("abcdefgh"), looker, target, rival=0)


def test_the_best_fixed_place_is_a_distance_or_a_position() -> None:
    back = best_fixed_place([sentence(1, 3), sentence(4, 6), sentence(4, 7)])
    assert (back.name, back.hits) == ("2 words back", (True, True, False))
    start = best_fixed_place([sentence(4, 5), sentence(4, 7), sentence(1, 2), sentence(4, 6)])
    assert (start.name, start.hits) == ("word 5 of the sentence", (True, True, False, True))
    near = best_fixed_place([sentence(2, 5), sentence(1, 2)])
    assert (near.name, near.hits) == ("1 word back", (False, True))
    assert best_fixed_place([]).hits == ()


@pytest.mark.parametrize("kind", ["basic_english", "wikitext"])
def test_every_word_is_a_frequent_one_of_wikitext2(kind: str, wikitext2: Path) -> None:
    tokenizer = fit_tokenizer(open_corpus("wikitext-2"), TokenizerConfig(kind, 10_000))
    for make in BOTH.values():
        for told in make():
            assert tokenizer.unk_id not in tokenizer.encode(str(told)), told
