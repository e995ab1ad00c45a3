"""The pointer against its definition, and what a mixture must hold to."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from minigpt.errors import UserError
from minigpt.layers.pointer import Copied, Pointer, PointerCache, chances, direction
from minigpt.output import linear_cross_entropy
from tiny import MODELS, B, D, T, V, make_model, random_ids


def make_pointer() -> Pointer:
    """Return a pointer with weights that a training might have left."""
    pointer = Pointer(D)
    with torch.no_grad():
        pointer.sentinel.normal_(std=0.3)
        pointer.sentinel_score.fill_(2.0)
    return pointer


def by_hand(
    pointer: Pointer, logits: torch.Tensor, hidden: torch.Tensor, ids: list[int]
) -> torch.Tensor:
    """Return p(word) (T, V) of one text, place by place, from equations 3 to 7 of the paper."""
    rows = []
    for t in range(len(ids)):
        sentinel = hidden[t] @ pointer.sentinel + pointer.sentinel_score
        cosines = [functional.cosine_similarity(hidden[t], hidden[j], dim=0) for j in range(t - 1)]
        scores = torch.stack([sentinel, *(c * pointer.log_sharpness.exp() for c in cosines)])
        gate, *shares = scores.exp() / scores.exp().sum()
        row = gate * logits[t].softmax(dim=-1)
        for j, share in enumerate(shares):
            row[ids[j + 1]] += share
        rows.append(row)
    return torch.stack(rows)


@torch.no_grad()
def test_the_mixture_is_the_papers():
    pointer, ids = make_pointer(), random_ids(B, T, vocab_size=5)
    hidden, logits = torch.randn(B, T, D), torch.randn(B, T, V)
    mixed = pointer.mixed(logits, hidden, ids)
    for row in range(B):
        expected = by_hand(pointer, logits[row], hidden[row], ids[row].tolist())
        assert_close(mixed[row].exp(), expected, atol=1e-6, rtol=1e-4)
    assert_close(mixed.exp().sum(dim=-1), torch.ones(B, T))


@torch.no_grad()
def test_what_it_says_of_the_targets_is_what_it_says_of_all_words():
    pointer, ids = make_pointer(), random_ids(B, T, vocab_size=5)
    hidden, targets = torch.randn(B, T, D), random_ids(B, T, vocab_size=7)
    log_gate, chance = pointer.copied(hidden, ids, targets)
    _, weights = pointer(hidden, direction(hidden))
    of_words = chances(weights, ids, V)
    assert_close(chance, of_words.gather(-1, targets[..., None]).squeeze(-1))
    assert_close(log_gate.exp() + of_words.sum(dim=-1), torch.ones(B, T))
    assert (chance == 0).any()  # a word that the text has not said
    assert (chance > 0).any()


def test_the_first_two_words_are_left_to_the_vocabulary():
    hidden, ids = torch.randn(B, 2, D), random_ids(B, 2)
    log_gate, chance = make_pointer().copied(hidden, ids, ids)
    assert_close(log_gate, torch.zeros(B, 2))
    assert_close(chance, torch.zeros(B, 2))


def test_the_word_just_read_is_not_offered_for_having_been_read():
    hidden, ids = torch.randn(1, T, D), torch.arange(T)[None]
    _, chance = make_pointer().copied(hidden, ids, ids)  # each target is the word just read
    assert_close(chance, torch.zeros(1, T))
    _, of_the_one_before = make_pointer().copied(hidden, ids, ids - 1)
    assert (of_the_one_before[:, 2:] > 0).all()


def test_the_length_of_a_vector_does_not_matter_to_where_it_points():
    pointer, hidden, ids = make_pointer(), torch.randn(B, T, D), random_ids(B, T, vocab_size=5)
    pointer.sentinel.data.zero_()
    assert_close(pointer.copied(hidden * 7, ids, ids), pointer.copied(hidden, ids, ids))


def test_the_nats_of_a_mixture_and_their_gradients(monkeypatch):
    """In chunks, with the gradients made in the forward pass, against autograd's own."""
    monkeypatch.setattr("minigpt.output.LOGITS_PER_CHUNK", 4 * V)
    n = 11
    hidden, table, bias = torch.randn(n, D), torch.randn(V, D), torch.randn(V)
    log_gate, chance = torch.rand(n).log(), torch.rand(n) * (torch.arange(n) % 2)
    targets, given = random_ids(n), (hidden, table, bias, log_gate, chance)
    for tensor in given:
        tensor.requires_grad_()
    total, rows = linear_cross_entropy(hidden, table, targets, bias, Copied(log_gate, chance))
    softmax = (hidden @ table.T + bias).softmax(dim=-1)[torch.arange(n), targets]
    expected = -(log_gate.exp() * softmax + chance).log()
    assert_close(rows, expected.detach(), atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(total / n, given)
    theirs = torch.autograd.grad(expected.mean(), given)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_a_target_that_could_not_be_less_likely_gives_no_nan():
    table = torch.zeros(V, D)
    table[3] = 1.0
    hidden = torch.full((1, D), 300.0).requires_grad_()
    log_gate, weights = torch.zeros(1), torch.zeros(1, 2, requires_grad=True)
    chance = (weights * torch.tensor([True, False])).sum(dim=-1)
    total, _ = linear_cross_entropy(
        hidden, table, torch.tensor([5]), None, Copied(log_gate, chance)
    )
    assert total > 1_000
    of_hidden, of_weights = torch.autograd.grad(total, (hidden, weights))
    assert of_hidden.isfinite().all()
    assert of_weights.isfinite().all()


def test_no_gradient_is_lost_where_no_place_offers_the_target():
    model = make_model(replace(MODELS["sampled"], n_layers=1)).train()
    ids = torch.arange(T)[None]  # each word once: nothing to point at
    states = model.states(ids, ids + 1)
    assert states.copied is not None
    assert states.copied.chance[-1] == 0
    nats, _ = model.output.nats(*states)
    nats.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_the_last_positions_alone_are_scored_as_among_all():
    model, ids = make_model(MODELS["sampled"]), random_ids(B, T)
    hidden = model.hidden(ids)
    assert_close(model.logits(hidden, ids, last=3), model.logits(hidden, ids)[:, -3:])
    whole, late = model.states(ids, ids), model.states(ids, ids, skipped=2)
    assert whole.copied is not None
    assert late.copied is not None
    for all_of_them, some in zip(
        (whole.hidden, whole.targets, *whole.copied),
        (late.hidden, late.targets, *late.copied),
        strict=True,
    ):
        assert_close(some, all_of_them.unflatten(0, (B, T))[:, 2:].flatten(0, 1))


def test_a_cache_that_was_reset_points_at_nothing_old():
    model, ids = make_model(MODELS["sampled"]), random_ids(B, T)
    cache = model.new_cache(B)
    assert isinstance(cache, PointerCache)
    with torch.no_grad():
        fresh = model.next_logits(ids, cache)
        cache.reset()
        assert torch.equal(model.next_logits(ids, cache), fresh)


def test_there_is_none_beside_the_adaptive_softmax():
    with pytest.raises(UserError, match="pointer is true, but output adaptive"):
        replace(MODELS["adaptive"], pointer=True)
