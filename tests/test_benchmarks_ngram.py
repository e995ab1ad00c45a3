"""The 5-gram model that judges text: probabilities, and the figures of the formula by hand."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import ngram

V = 7


def by_hand(text: list[int], history: list[int], word: int, n: int, order: int) -> float:
    """Return p_n of the docstring, with dictionaries, straight from the text."""
    if n == 0:
        return 1 / V
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    if n == order:
        counts = Counter(grams)
    else:
        longer = {tuple(text[i : i + n + 1]) for i in range(len(text) - n)}
        counts = Counter(dict.fromkeys(grams, 0))
        counts.update(gram[1:] for gram in longer)
    once, twice = (sum(c == k for c in counts.values()) for k in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    h = tuple(history[len(history) - n + 1 :])
    lower = by_hand(text, history, word, n - 1, order)
    following = {gram: c for gram, c in counts.items() if gram[:-1] == h}
    total = sum(following.values())
    if len(history) < n - 1 or not total:
        return lower
    n_following = sum(c > 0 for c in following.values())
    own = max(following.get((*h, word), 0) - discount, 0)
    return (own + discount * n_following * lower) / total


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, V - 2), min_size=5, max_size=41),
    scored=st.lists(st.integers(0, V - 1), min_size=1, max_size=11),
    order=st.integers(1, 5),
)
def test_chances_are_those_of_the_formula(text, scored, order):
    model = ngram.NGrams(np.array(text), V, order)
    found = np.exp(model.log_probs(np.array(scored)))
    for i, word in enumerate(scored):
        history = scored[max(0, i - order + 1) : i]
        n = min(order, i + 1)
        assert found[i] == pytest.approx(by_hand(text, history, word, n, order), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, V - 2), min_size=5, max_size=41),
    history=st.lists(st.integers(0, V - 1), max_size=6),
)
def test_chances_sum_to_one(text, history):
    model = ngram.NGrams(np.array(text), V)
    total = sum(np.exp(model.log_probs(np.array([*history, word]))[-1]) for word in range(V))
    assert total == pytest.approx(1)


def test_what_was_learned_is_likelier_than_its_shuffle():
    generator = np.random.default_rng(0)
    text = np.tile(generator.integers(0, 50, 300), 4)
    model = ngram.NGrams(text, 50)
    shuffled = generator.permutation(text)
    assert model.log_probs(text).mean() > -1
    assert model.log_probs(shuffled).mean() < -3.5
