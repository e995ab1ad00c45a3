"""Both softmaxes: exact, normalised, and never a (B·T, V) tensor in training."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import minigpt.output
from minigpt.model import MiniGPT, Objective
from minigpt.output import (
    AdaptiveEmbedding,
    AdaptiveSoftmax,
    FullSoftmax,
    SampledSoftmax,
    linear_cross_entropy,
)
from tiny import (
    ADAPTIVE,
    GPT2,
    B,
    D,
    LargestTensor,
    T,
    V,
    make_model,
    random_ids,
    randomised,
)

N = B * T
CUTOFFS = [(), (1,), (29,), (29, 61), (29, 61, V - 1), (2, 3, 5, 7)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def adaptive(cutoffs: tuple[int, ...], divisor: int = 2) -> AdaptiveSoftmax:
    return randomised(AdaptiveSoftmax(AdaptiveEmbedding(V, D, cutoffs, divisor)))


@pytest.mark.parametrize("n_logits", [1, V - 1, 3 * V + 1, N * V, 10**9])
def test_cross_entropy_in_chunks_is_cross_entropy(monkeypatch, n_logits):
    monkeypatch.setattr(minigpt.output, "LOGITS_PER_CHUNK", n_logits)
    hidden = torch.randn(N, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    targets = random_ids(N)
    total, rows = linear_cross_entropy(hidden, weight, targets)
    expected = functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    assert_close(rows, expected, atol=1e-5, rtol=1e-5)
    assert_close(total, expected.sum())
    assert not rows.requires_grad
    ours = torch.autograd.grad(total / 7, (hidden, weight))  # the gradient that comes from above
    theirs = torch.autograd.grad(expected.sum() / 7, (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_cross_entropy_has_the_gradient_of_its_value():
    hidden = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([6, 0, 6])

    def nats(h, w):
        return linear_cross_entropy(h, w, targets)[0]

    # Logits are float32 inside, so the steps of the finite differences must be large.
    assert torch.autograd.gradcheck(
        nats, (hidden, weight), eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=1e-6
    )


def test_cross_entropy_of_nothing_is_nothing():
    hidden = torch.empty(0, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    total, rows = linear_cross_entropy(hidden, weight, random_ids(0))
    assert total.item() == 0
    assert rows.shape == (0,)
    total.backward()
    assert (weight.grad == 0).all()


def test_cross_entropy_bears_enormous_logits():
    hidden = (torch.randn(N, D) * 1e4).requires_grad_()
    total, rows = linear_cross_entropy(hidden, torch.randn(V, D), random_ids(N))
    total.backward()
    assert rows.isfinite().all()
    assert hidden.grad.isfinite().all()


def test_bfloat16_products_are_close_and_sums_stay_float32():
    hidden = torch.randn(N, D, requires_grad=True)
    weight = (torch.randn(V, D) / math.sqrt(D)).requires_grad_()
    targets = random_ids(N)
    exact, _ = linear_cross_entropy(hidden, weight, targets)
    exact_grads = torch.autograd.grad(exact, (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, rows = linear_cross_entropy(hidden, weight, targets)
    grads = torch.autograd.grad(total, (hidden, weight))
    assert rows.dtype == total.dtype == torch.float32
    assert_close(total, exact, atol=0, rtol=3e-3)
    for mine, other in zip(grads, exact_grads, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() / other.norm() < 1e-2


@pytest.mark.parametrize("config", [GPT2, ADAPTIVE, replace(ADAPTIVE, tie_embeddings=False)])
def test_training_never_holds_all_logits(monkeypatch, config):
    monkeypatch.setattr(minigpt.output, "LOGITS_PER_CHUNK", 4 * V)
    model = make_model(config)
    objective = Objective(model).train()
    ids, targets = random_ids(B, T), random_ids(B, T, seed=3)
    with LargestTensor() as largest:
        nats, _ = objective(ids, targets)
        nats.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert 0 < largest.numel < N * V
    with LargestTensor() as largest, torch.no_grad():
        model(ids)
    assert largest.numel >= N * V  # the recorder does see a tensor of that size


def test_no_gradient_is_computed_where_nobody_asks_for_one():
    model = make_model(GPT2)
    hidden = torch.randn(N, D)
    with LargestTensor() as largest, torch.no_grad():
        model.output.nats(hidden[:1], random_ids(1))
    assert largest.numel < V * D  # a gradient of the table would be as large as the table


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize("divisor", [1, 2, 100])
def test_adaptive_probabilities_sum_to_1(cutoffs, divisor):
    softmax = adaptive(cutoffs, divisor)
    log_probs = softmax(torch.randn(B, T, D))
    assert log_probs.shape == (B, T, V)
    assert_close(log_probs.exp().sum(-1), torch.ones(B, T))


def targets_of(which: str, cutoffs: tuple[int, ...]) -> torch.Tensor:
    bounds = (0, *cutoffs, V)
    edges = [*bounds[:-1], *(bound - 1 for bound in bounds[1:])]
    return {
        "everywhere": random_ids(N),
        "edges": torch.tensor(edges * N)[:N],
        "frequent": random_ids(N, vocab_size=bounds[1]),
        "rarest": torch.full((N,), V - 1),
        "one": torch.tensor([V - 1]),
    }[which]


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize("which", ["everywhere", "edges", "frequent", "rarest", "one"])
def test_adaptive_nats_are_the_log_probabilities_of_its_forward(cutoffs, which):
    softmax = adaptive(cutoffs)
    targets = targets_of(which, cutoffs)
    hidden = torch.randn(len(targets), D, requires_grad=True)
    total, rows = softmax.nats(hidden, targets)
    expected = -softmax(hidden).gather(1, targets[:, None]).squeeze(1)
    assert_close(rows, expected, atol=1e-5, rtol=1e-5)
    assert_close(total, expected.sum(), atol=1e-3, rtol=1e-5)
    inputs = [hidden, *softmax.parameters()]
    ours = torch.autograd.grad(total, inputs)
    theirs = torch.autograd.grad(expected.sum(), inputs, materialize_grads=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cutoffs", [(29,), (29, 61), (2, 3, 5, 7)])
@pytest.mark.parametrize("divisor", [1, 2])
def test_adaptive_softmax_is_pytorchs(cutoffs, divisor):
    ours = adaptive(cutoffs, divisor)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, V, list(cutoffs), div_value=divisor)
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat((ours.tables[0], ours.clusters)))
        for i, (narrow, score) in enumerate(theirs.tail):
            narrow.weight.copy_(ours.projections[i].weight)
            score.weight.copy_(ours.tables[i + 1])
    hidden, targets = torch.randn(N, D, requires_grad=True), random_ids(N)
    assert_close(ours(hidden), theirs.log_prob(hidden), atol=1e-5, rtol=1e-5)
    total, rows = ours.nats(hidden, targets)
    expected = theirs(hidden, targets)
    assert_close(-rows, expected.output, atol=1e-5, rtol=1e-5)
    (mine,) = torch.autograd.grad(total / N, hidden)
    (other,) = torch.autograd.grad(expected.loss, hidden)
    assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_without_clusters_adaptive_is_full():
    embedding = randomised(AdaptiveEmbedding(V, D, (), 4))
    full, without = FullSoftmax(embedding.tables[0]), AdaptiveSoftmax(embedding)
    hidden, targets = torch.randn(N, D), random_ids(N)
    assert_close(without(hidden), full(hidden).log_softmax(-1))
    assert_close(without.nats(hidden, targets)[0], full.nats(hidden, targets)[0])
    assert torch.equal(embedding(targets), functional.embedding(targets, embedding.tables[0]))


def test_cutoffs_past_the_vocabulary_fall_away():
    model = MiniGPT(replace(ADAPTIVE, cutoffs=(29, V, 10_000)))
    assert model.config.cutoffs == (29,)
    assert model.embedding.bounds == (0, 29, V)
    assert model(random_ids(B, T)).shape == (B, T, V)
    assert MiniGPT(replace(ADAPTIVE, cutoffs=(2_000,))).embedding.bounds == (0, V)


@settings(max_examples=40, deadline=None)
@given(
    cutoffs=st.sets(st.integers(1, V - 1), max_size=4).map(sorted),
    ids=st.lists(st.integers(0, V - 1), min_size=1, max_size=2 * T),
)
def test_an_adaptive_vector_is_the_row_of_its_clusters_table(cutoffs, ids):
    embedding = randomised(AdaptiveEmbedding(V, D, cutoffs, 3))
    vectors = embedding(torch.tensor([ids]))
    assert vectors.shape == (1, len(ids), D)
    for i, vector in zip(ids, vectors[0], strict=True):
        cluster = sum(i >= cutoff for cutoff in cutoffs)
        row = embedding.tables[cluster][i - embedding.bounds[cluster]]
        expected = row if cluster == 0 else embedding.projections[cluster - 1](row)
        assert_close(vector, expected, atol=1e-5, rtol=1e-5)


def test_an_adaptive_table_learns_only_the_rows_that_were_read():
    embedding = randomised(AdaptiveEmbedding(V, D, (29, 61), 2))
    embedding(torch.tensor([[3, 40, 40]])).sum().backward()
    read = [grad.grad.abs().sum(1).nonzero().flatten().tolist() for grad in embedding.tables]
    # 28, the last frequent word, stands in for rarer ids on the way, but must not learn from them.
    assert read == [[3], [40 - 29], []]


def test_tables_are_narrower_the_rarer_their_words():
    tables = AdaptiveEmbedding(V, D, (29, 61, 83), 4).tables
    assert [tuple(table.shape) for table in tables] == [(29, 42), (32, 10), (22, 2), (6, 1)]


def sampled(n_frequent: int, n_sampled: int = 7) -> SampledSoftmax:
    table = nn.Parameter(torch.randn(V, D) / math.sqrt(D))
    softmax = SampledSoftmax(table, bias=True, n_frequent=n_frequent, n_sampled=n_sampled)
    return randomised(softmax)


@pytest.mark.parametrize("n_logits", [1, 3 * V + 1, 10**9])
def test_cross_entropy_with_a_bias_is_cross_entropy(monkeypatch, n_logits):
    monkeypatch.setattr(minigpt.output, "LOGITS_PER_CHUNK", n_logits)
    parts = [torch.randn(*shape, requires_grad=True) for shape in ((N, D), (V, D), (V,))]
    hidden, weight, bias = parts
    targets = random_ids(N)
    total, rows = linear_cross_entropy(hidden, weight, targets, bias)
    expected = functional.cross_entropy(hidden @ weight.T + bias, targets, reduction="none")
    assert_close(rows, expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(total / 7, parts)
    theirs = torch.autograd.grad(expected.sum() / 7, parts)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_frequent", [V, V + 100])
def test_a_sampled_softmax_that_samples_nothing_is_the_full_one(n_frequent):
    softmax, hidden, targets = sampled(n_frequent), torch.randn(N, D), random_ids(N)
    total, rows = softmax.nats(hidden, targets)
    with torch.no_grad():
        expected, expected_rows = softmax.nats(hidden, targets)
    assert_close(total, expected)
    assert_close(rows, expected_rows)


@pytest.mark.parametrize("n_frequent", [1, 29])
def test_a_sampled_softmax_is_the_full_one_but_for_training(n_frequent):
    softmax, hidden, targets = sampled(n_frequent), torch.randn(N, D), random_ids(N)
    exact = functional.cross_entropy(softmax(hidden), targets, reduction="none")
    with torch.no_grad():
        assert_close(softmax.nats(hidden, targets)[1], exact)
    assert (softmax.nats(hidden, targets)[1] - exact).abs().max() > 1e-3
    assert_close(softmax.eval().nats(hidden, targets)[1], exact)


def test_candidates_are_the_frequent_words_the_targets_and_draws():
    softmax, targets = sampled(n_frequent=13, n_sampled=5), random_ids(N)
    candidates, places = softmax._candidates(targets)
    assert torch.equal(candidates[places], targets)
    assert (candidates.diff() > 0).all()
    assert torch.equal(candidates[:13], torch.arange(13))
    others = set(candidates[13:].tolist()) - set(targets.tolist())
    assert len(others) <= 5
    assert {tuple(softmax._candidates(targets)[0].tolist()) for _ in range(5)} != {
        tuple(candidates.tolist())
    }


def test_words_are_candidates_as_often_as_the_correction_says():
    """Over texts whose words follow Zipf's law, as the class expects of them."""
    softmax, n_trials = sampled(n_frequent=5, n_sampled=7), 4_000
    ids = torch.arange(V, dtype=torch.float64)
    shares = ((ids + 2) / (ids + 1)).log()
    times = torch.zeros(V)
    for _ in range(n_trials):
        targets = torch.multinomial(shares, 11, replacement=True)
        times[softmax._candidates(targets)[0]] += 1
    expected = softmax._log_inclusion(11, torch.arange(V)).exp()
    assert torch.equal(expected[:5], torch.ones(5))
    spread = (expected * (1 - expected) / n_trials).sqrt()
    assert ((times / n_trials - expected).abs() <= 4.5 * spread).all()


def test_the_corrected_sum_is_that_of_all_words():
    """The mean of Σ exp(score) / π over draws is Σ exp(score) over the vocabulary."""
    softmax, scores = sampled(n_frequent=5, n_sampled=23), torch.randn(V)
    none = torch.empty(0, dtype=torch.long)
    sums = []
    for _ in range(4_000):
        candidates, _ = softmax._candidates(none)
        weights = softmax._log_inclusion(0, candidates)
        sums.append((scores[candidates] - weights).exp().sum())
    sums = torch.stack(sums)
    error = sums.std() / math.sqrt(len(sums))
    assert (sums.mean() - scores.exp().sum()).abs() < 4.5 * error
    assert error < 0.02 * scores.exp().sum()


def test_a_sampled_softmax_learns_what_the_full_one_would():
    """Its loss is least at the true shares, so that is where training on it ends."""
    torch.manual_seed(3)
    ids = torch.arange(V, dtype=torch.float64)
    shares = ((ids + 2) / (ids + 1)).log()
    softmax = SampledSoftmax(torch.zeros(V, D), bias=True, n_frequent=7, n_sampled=11)
    optimizer = torch.optim.Adam(softmax.parameters(), lr=0.03)
    for step in range(1_500):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 1_500)
        targets = torch.multinomial(shares, 211, replacement=True)
        nats, _ = softmax.nats(torch.zeros(211, D), targets)
        optimizer.zero_grad()
        (nats / 211).backward()
        optimizer.step()
    learned = softmax(torch.zeros(1, D)).log_softmax(dim=-1)[0]
    expected = (shares / shares.sum()).log().float()
    assert (learned - expected).abs().mean() < 0.1
