"""Dynamic evaluation: scored first and learnt from afterwards, on a copy that nobody else sees."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import minigpt.dynamic_evaluation
from minigpt.dynamic_evaluation import (
    DynamicSettings,
    dynamic_at_ends,
    dynamic_token_nats,
    fit_dynamic,
)
from minigpt.errors import UserError
from minigpt.evaluate import token_nats
from tiny import MODELS, LargestTensor, T, V, make_model, random_ids

EOS = 3
S = 4
SETTINGS = DynamicSettings(rate=0.05, decay=0.02, segment=S)


def ids_of(n_ids: int, seed: int = 5, vocab_size: int = V) -> np.ndarray:
    return random_ids(n_ids, seed=seed, vocab_size=vocab_size).numpy().astype(np.uint16)


def by_hand(model, ids, settings, context):
    """Train on each stretch once it is scored, with PyTorch's optimizer on full logits."""
    learner = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(learner.parameters(), lr=settings.rate)
    ids = [EOS, *map(int, ids)]
    nats: list[float] = []
    while len(nats) < len(ids) - 1:
        done = len(nats)
        n_new = settings.segment if done else context
        end = min(done + n_new, len(ids) - 1)
        begin = max(0, done - (context - settings.segment)) if done else 0
        log_probs = learner(torch.tensor([ids[begin:end]]))[0].log_softmax(dim=-1)
        costs = torch.stack([-log_probs[i - begin, ids[i + 1]] for i in range(done, end)])
        optimizer.zero_grad()
        costs.mean().backward()
        optimizer.step()
        with torch.no_grad():
            for weight, start in zip(learner.parameters(), model.parameters(), strict=True):
                weight.add_(start - weight, alpha=settings.decay)
        nats += costs.tolist()
    return np.array(nats)


@pytest.mark.parametrize("name", ["modern", "sampled", "adaptive", "paper", "untied"])
@pytest.mark.parametrize("n_ids", [5, T, 41])
def test_nats_are_those_of_training_on_each_segment_once_it_is_scored(name, n_ids):
    model, ids = make_model(MODELS[name]), ids_of(n_ids)
    found = dynamic_token_nats(model, ids, EOS, SETTINGS, context=T)
    assert found.shape == (n_ids,)
    assert found.dtype == np.float32
    assert found == pytest.approx(by_hand(model, ids, SETTINGS, T), abs=2e-3)


@pytest.mark.parametrize("context", [T, S])
@pytest.mark.parametrize("name", ["gpt2", "sampled", "adaptive"])
def test_without_a_rate_it_is_static_evaluation(name, context):
    model, ids = make_model(MODELS[name]), ids_of(97)
    still = replace(SETTINGS, rate=0.0)
    found = dynamic_token_nats(model, ids, EOS, still, context=context)
    assert found == pytest.approx(token_nats(model, ids, EOS, context=context, stride=S), abs=1e-4)


@pytest.mark.parametrize("changed_from", [1, T - 1, T, T + S, T + S + 2, 95, 96])
@pytest.mark.parametrize("name", ["modern", "sampled", "adaptive"])
def test_no_id_is_scored_by_weights_that_have_seen_it(name, changed_from):
    model, ids = make_model(MODELS[name]), ids_of(97)
    other = ids.copy()
    other[changed_from:] = (ids[changed_from:] + 7) % V
    nats, others = (dynamic_token_nats(model, x, EOS, SETTINGS, context=T) for x in (ids, other))
    assert nats[:changed_from] == pytest.approx(others[:changed_from], abs=1e-5)
    assert abs(nats[changed_from] - others[changed_from]) > 1e-3


@pytest.mark.parametrize("name", ["modern", "sampled", "adaptive"])
@pytest.mark.parametrize("n_ids", [1, 19])
def test_the_probabilities_of_all_words_sum_to_one(name, n_ids):
    model, ids = make_model(MODELS[name]), ids_of(n_ids)
    total = 0.0
    for word in range(V):
        ids[-1] = word  # nothing before it changes
        total += math.exp(-dynamic_token_nats(model, ids, EOS, SETTINGS, context=T)[-1])
    assert total == pytest.approx(1, abs=1e-5)


def test_the_past_is_learnt_even_where_it_can_no_longer_be_seen():
    model, ids = make_model(MODELS["modern"]), ids_of(97)
    other = ids.copy()
    other[:S] = (ids[:S] + 7) % V
    end = slice(3 * T, None)
    nats, others = (dynamic_token_nats(model, x, EOS, SETTINGS, context=T) for x in (ids, other))
    assert np.abs(nats[end] - others[end]).max() > 1e-4
    still = replace(SETTINGS, rate=0.0)
    nats, others = (dynamic_token_nats(model, x, EOS, still, context=T) for x in (ids, other))
    assert np.array_equal(nats[end], others[end])


def test_a_text_that_repeats_itself_gets_cheaper():
    model, ids = make_model(MODELS["modern"]), np.tile(ids_of(2 * T), 9)
    nats = dynamic_token_nats(model, ids, EOS, SETTINGS, context=T).reshape(9, -1).mean(axis=1)
    static = token_nats(model, ids, EOS, context=T, stride=S).reshape(9, -1).mean(axis=1)
    assert nats[-1] < nats[0] - 1
    assert nats[-1] < static[-1] - 1


def test_the_more_decay_the_nearer_the_trained_weights():
    model, ids = make_model(MODELS["adaptive"]), ids_of(97)
    static = token_nats(model, ids, EOS, context=T, stride=S)
    distances = [
        np.abs(
            dynamic_token_nats(model, ids, EOS, replace(SETTINGS, decay=decay), context=T) - static
        ).mean()
        for decay in (0.0, 0.3, 0.9, 0.999999)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.1
    assert distances[-1] < 1e-4


def test_the_model_given_is_left_as_it_was():
    model, ids = make_model(replace(MODELS["paper"], dropout=0.5)), ids_of(53)
    expected = dynamic_token_nats(model, ids, EOS, SETTINGS, context=T)
    model.train().requires_grad_(False)  # frozen or not, the copy learns
    model.blocks[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    with torch.no_grad():
        found = dynamic_token_nats(model, ids, EOS, SETTINGS, context=T)
    assert np.array_equal(found, expected)
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def small_grid(monkeypatch, rates, fitted_on=57):
    monkeypatch.setattr(minigpt.dynamic_evaluation, "_RATES", rates)
    monkeypatch.setattr(minigpt.dynamic_evaluation, "FITTED_ON_AT_MOST", fitted_on)


def test_fitting_finds_the_best_of_its_rates(monkeypatch):
    rates = (0.0, 0.02, 0.1, 3.0)
    small_grid(monkeypatch, rates)
    model = make_model(MODELS["adaptive"])
    ids = np.tile(ids_of(19, vocab_size=23), 3)
    best = fit_dynamic(model, ids, EOS, context=T)
    assert best.segment == T // 2
    costs = {
        rate: dynamic_token_nats(model, ids, EOS, replace(best, rate=rate), context=T).sum()
        for rate in rates
    }
    assert best.rate == min(costs, key=costs.__getitem__)
    assert 0 < best.rate < 3


def test_a_model_that_learning_would_harm_is_left_alone():
    """Of ids drawn at random there is nothing to learn, and the rates that ship say so."""
    model = make_model(MODELS["modern"])
    model.output.table.data.zero_()  # every word is as likely as any other, and so they are
    best = fit_dynamic(model, ids_of(57), EOS, context=T)
    assert best.rate == 0
    assert dynamic_at_ends(best) == {"rate": "lowest"}


def test_a_rate_at_an_end_is_named(monkeypatch):
    small_grid(monkeypatch, (0.0, 0.0001, 0.0002))
    ids = np.tile(ids_of(19, vocab_size=23), 3)
    best = fit_dynamic(make_model(MODELS["adaptive"]), ids, EOS, context=T)
    assert dynamic_at_ends(best) == {"rate": "highest"}
    assert dynamic_at_ends(replace(best, rate=0.0001)) == {}


def test_fitting_reads_no_more_than_it_says(monkeypatch):
    small_grid(monkeypatch, (0.0, 0.05), fitted_on=31)
    model = make_model(MODELS["modern"])
    repeated = np.tile(ids_of(3), 40)
    assert fit_dynamic(model, repeated[:31], EOS, context=T).rate == 0.05
    longer = np.concatenate((repeated[:31], np.full(97, V + 1)))  # those are no ids of this model
    assert fit_dynamic(model, longer, EOS, context=T).rate == 0.05


def test_a_rate_that_ends_in_nan_is_no_choice(monkeypatch):
    small_grid(monkeypatch, (1e30, 0.01))
    model, ids = make_model(MODELS["gpt2"]), ids_of(57)
    best = fit_dynamic(model, ids, EOS, context=T)
    assert best.rate == 0.01
    lost = dynamic_token_nats(model, ids, EOS, replace(best, rate=1e30), context=T)
    assert np.isnan(lost).any()  # that is what was refused


def test_a_context_of_one_has_segments_of_one(monkeypatch):
    small_grid(monkeypatch, (0.01,), fitted_on=7)
    model, ids = make_model(MODELS["gpt2"]), ids_of(7)
    assert fit_dynamic(model, ids, EOS, context=1).segment == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": -0.1}, "rate is -0.1: it must be at least 0"),
        ({"rate": math.nan}, "rate is nan"),
        ({"rate": math.inf}, "rate is inf"),
        ({"decay": -0.1}, "decay is -0.1"),
        ({"decay": 1.0}, "decay is 1.0: it must be at least 0 and less than 1"),
        ({"segment": 0}, "segment is 0: it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_a_users_error(change, message):
    with pytest.raises(UserError, match=message):
        replace(SETTINGS, **change)


@pytest.mark.parametrize(
    ("n_ids", "context", "message"),
    [
        (0, T, "empty"),
        (7, T + 1, f"context is {T + 1}: it must lie between 1 and the model's {T}"),
        (7, S - 1, f"stride is {S}: it must lie between 1 and the context {S - 1}"),
    ],
)
def test_sizes_out_of_range_are_a_users_error(n_ids, context, message):
    with pytest.raises(UserError, match=message):
        dynamic_token_nats(
            make_model(MODELS["gpt2"]), ids_of(n_ids), EOS, SETTINGS, context=context
        )


def test_memory_is_flat_in_the_length_of_the_text():
    model = make_model(MODELS["adaptive"])
    largest = []
    for n_ids in (4 * T, 16 * T):
        with LargestTensor() as recorded:
            dynamic_token_nats(model, ids_of(n_ids), EOS, SETTINGS, context=T)
        largest.append(recorded.numel)
    assert largest[0] == largest[1]
