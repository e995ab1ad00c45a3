"""Filters of logits: those of transformers and of OpenAI's formula, number for number."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from minigpt import filters
from minigpt.decoding import choose
from minigpt.errors import UserError
from minigpt.filters import FILTERS, Least, Text, TokenRules, filtered, wishes_of
from minigpt.sampling import Sampling

B, V, N = 5, 89, 37


def random_logits(seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


def random_texts(seed: int, n_ids: int = N, n_prompt: int = 11, n_words: int = 9) -> list[Text]:
    """Return texts in few words, so that much comes again."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(n_words, (B, n_ids), generator=generator).tolist()
    return [Text(row, n_prompt) for row in ids]


TEXTS = random_texts(0)
IDS = torch.tensor([text.ids for text in TEXTS])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", 0.0),
        ("min_p", 1.5),
        ("typical_p", -1.0),
        ("typical_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("no_repeat_ngram", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("min_new_tokens", 101),
    ],
)
def test_a_value_that_no_draw_could_follow_is_named(name, value):
    with pytest.raises(UserError, match=rf"^{name} is {value}: it must"):
        Sampling(**{name: value})


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(7))
def test_filters_are_those_of_transformers(seed, ties):
    logits = random_logits(seed, ties=ties)
    for k in (1, 2, 11, V, V + 100):
        assert torch.equal(filters.top_k(logits, TEXTS, k), TopKLogitsWarper(k)(IDS, logits))
    for p in (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0):
        assert torch.equal(filters.top_p(logits, TEXTS, p), TopPLogitsWarper(p)(IDS, logits))
        assert torch.equal(filters.min_p(logits, TEXTS, p), MinPLogitsWarper(p)(IDS, logits))
    for p in (1e-6, 0.1, 0.5, 0.9, 0.999):
        theirs = TypicalLogitsWarper(p)(IDS, logits)
        assert torch.equal(filters.typical_p(logits, TEXTS, p), theirs)
    for temperature in (0.05, 0.8, 1.0, 7.0):
        ours = filters.temperature(logits, TEXTS, temperature).softmax(-1)
        theirs = TemperatureLogitsWarper(temperature)(IDS, logits).softmax(-1)
        torch.testing.assert_close(ours, theirs)


# transformers#1725: text in circles.
@pytest.mark.parametrize("seed", range(7))
def test_what_a_text_has_already_counts_as_in_transformers(seed):
    logits, texts = random_logits(seed), random_texts(seed)
    ids = torch.tensor([text.ids for text in texts])
    for penalty in (0.7, 1.0, 1.3, 5.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
        assert torch.equal(filters.repetition_penalty(logits, texts, penalty), theirs)
    for n in (1, 2, 3, 7, N, N + 1, N + 2):
        theirs = NoRepeatNGramLogitsProcessor(n)(ids, logits)
        assert torch.equal(filters.no_repeat_ngram(logits, texts, n), theirs)
    added = {3: 1.5, 7: -4.0, 80: math.pi}
    theirs = SequenceBiasLogitsProcessor([[[i], value] for i, value in added.items()])(ids, logits)
    assert torch.equal(filters.bias(logits, texts, added), theirs)


@pytest.mark.parametrize("n_prompt", [0, 11, N])
def test_presence_and_frequency_are_those_of_openai(n_prompt):
    """mu[j] → mu[j] − c[j] · α_frequency − (c[j] > 0) · α_presence, c of the sampled tokens."""
    logits, texts = random_logits(1), random_texts(1, n_prompt=n_prompt)
    alpha_presence, alpha_frequency = 0.6, -0.3
    ours = filters.presence_penalty(logits, texts, alpha_presence)
    ours = filters.frequency_penalty(ours, texts, alpha_frequency)
    for b, text in enumerate(texts):
        for j in range(V):
            c = text.ids[n_prompt:].count(j)
            mu = logits[b, j].item() - c * alpha_frequency - float(c > 0) * alpha_presence
            assert ours[b, j].item() == pytest.approx(mu, abs=1e-5)


def test_filters_follow_each_other_as_in_transformers():
    sampling = Sampling(
        0.7, 23, 0.8, 0.02, 0.9, repetition_penalty=1.2, no_repeat_ngram=2, min_new_tokens=9
    )
    logits = random_logits(3)
    ours = filtered(logits, TEXTS, wishes_of(sampling, TokenRules(bias={4: 2.0})))
    theirs = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[4], 2.0]]),
            RepetitionPenaltyLogitsProcessor(1.2),
            NoRepeatNGramLogitsProcessor(2),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(23),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.02),
            TypicalLogitsWarper(0.9),
        ]
    )(IDS, logits)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))
    assert (ours > -math.inf).sum() < B * 23


EACH = {
    "bias": {0: 1.0, 7: -2.0},
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram": 2,
    "banned": [0, 7],
    "min_new_tokens": Least(N - 11 + 1, [0, 7]),
    "temperature": 0.3,
    "top_k": 4,
    "top_p": 0.6,
    "min_p": 0.2,
    "typical_p": 0.5,
}


def test_the_table_has_a_filter_for_each_wish():
    assert list(FILTERS) == list(EACH)


@pytest.mark.parametrize("name", EACH)
def test_a_filter_leaves_its_input_alone_and_sees_each_row_alone(name):
    logits, value, apply = random_logits(5, ties=True), EACH[name], FILTERS[name]
    before = logits.clone()
    together = apply(logits, TEXTS, value)
    assert torch.equal(logits, before)
    assert together.shape == (B, V)
    assert not torch.equal(together, logits)
    assert not together.isnan().any()
    for row, alone, text in zip(together, logits, TEXTS, strict=True):
        assert torch.equal(apply(alone[None], [text], value)[0], row)


@pytest.mark.parametrize("name", EACH)
def test_what_is_banned_stays_banned(name):
    logits = random_logits(5)
    logits[:, [1, 4]] = -math.inf
    after = FILTERS[name](logits, TEXTS, EACH[name])
    assert (after[:, [1, 4]] == -math.inf).all()
    assert not after.isnan().any()


def test_one_word_is_left_whatever_the_filters():
    wishes = wishes_of(Sampling(1e-4, 1000, 1e-9, 1.0, 1e-9), TokenRules(banned=range(V - 1)))
    logits = filtered(random_logits(0, ties=True), TEXTS, wishes)
    assert logits.isfinite().sum(dim=-1).tolist() == [1] * B
    assert [choose(row, None) for row in logits] == [V - 1] * B


def test_nothing_left_to_draw_is_told():
    text = Text(list(range(V)), V)
    wishes = wishes_of(Sampling(no_repeat_ngram=1))
    with pytest.raises(UserError, match="nothing is left to draw"):
        filtered(torch.zeros(1, V), [text], wishes)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_not_finite_are_told(value, temperature):
    logits = torch.zeros(1, V)
    logits[0, 3] = value
    with pytest.raises(UserError, match="the logits are not finite"):
        filtered(logits, [Text([0], 1)], wishes_of(Sampling(temperature)))


def test_what_is_banned_takes_no_place_among_the_top_k():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    wishes = wishes_of(Sampling(1.0, 2), TokenRules(banned=[0, 1]))
    kept = filtered(logits, [Text([0], 1)], wishes)
    assert kept.isfinite().tolist() == [[False, False, True, True]]


def test_where_nothing_is_drawn_nothing_that_shapes_chance_is_done():
    greedy = Sampling(0, 50, 0.9, 0.1, 0.5, repetition_penalty=1.1)
    assert [apply for apply, _ in wishes_of(greedy)] == [filters.repetition_penalty]
    assert [apply for apply, _ in wishes_of(Sampling(0.5, None))] == [filters.temperature]


@pytest.mark.parametrize("temperature", [1e-2, 1e-7, 1e-38, 1e-300])
def test_cold_sampling_tends_to_the_likeliest_word(temperature):
    logits = random_logits(2)
    scaled = filters.temperature(logits, TEXTS, temperature)
    assert torch.equal(scaled.softmax(-1).argmax(-1), logits.argmax(-1))
    generator = torch.Generator().manual_seed(0)
    coldest = filters.temperature(logits, TEXTS, 1e-7)
    assert [choose(row, generator) for row in coldest] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e3, 1e300])
def test_hot_sampling_tends_to_an_even_draw_among_what_is_allowed(temperature):
    allowed = filters.banned(random_logits(2), TEXTS, [3])
    shares = filters.temperature(allowed, TEXTS, temperature).softmax(-1)
    assert shares[:, 3].eq(0).all()
    torch.testing.assert_close(shares[:, 4], torch.full((B,), 1 / (V - 1)), rtol=0.02, atol=0)


def test_draws_follow_the_distribution():
    logits, generator = torch.tensor([0.5, 0.3, 0.2]).log(), torch.Generator().manual_seed(1)
    ids = torch.tensor([choose(logits, generator) for _ in range(5_000)])
    shares = ids.bincount(minlength=3) / len(ids)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.03, rtol=0)
