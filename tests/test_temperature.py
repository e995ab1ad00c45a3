"""Temperature: one number, fitted where the nats are fewest, and a probability at any value."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import minigpt.output
from minigpt.errors import UserError
from minigpt.evaluate import token_nats
from minigpt.temperature import fit_temperature, tempered_token_nats
from tiny import MODELS, B, LargestTensor, T, V, make_model, random_ids

EOS = 3


def ids_of(n_ids: int, seed: int = 5) -> np.ndarray:
    return random_ids(n_ids, seed=seed).numpy().astype(np.uint16)


@torch.no_grad()
def spoken_ids(model, n_ids: int, temperature: float) -> np.ndarray:
    """Draw ids from the model itself, each after the one before alone, its logits divided."""
    log_probs = model(torch.arange(V)[:, None])[:, 0].log_softmax(dim=-1)  # (V, V)
    chances = (log_probs / temperature).softmax(dim=-1).double().numpy()
    draw = np.random.default_rng(7)
    ids = [EOS]
    for _ in range(n_ids):
        ids.append(int(draw.choice(V, p=chances[ids[-1]] / chances[ids[-1]].sum())))
    return np.array(ids[1:], dtype=np.uint16)


@pytest.mark.parametrize("name", ["modern", "sampled", "adaptive", "untied, adaptive"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.9])
def test_the_tempered_probabilities_of_all_words_sum_to_one(name, temperature):
    model, ids = make_model(MODELS[name]), ids_of(17)
    total = 0.0
    for word in range(V):
        ids[-1] = word  # nothing before it changes
        nats = tempered_token_nats(model, ids, EOS, temperature, context=T, stride=4)
        total += math.exp(-nats[-1])
    assert total == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "sampled"])
@torch.no_grad()
def test_a_full_softmax_is_the_softmax_of_the_divided_logits(name):
    """And a pointer beside it is mixed with that softmax as with the model's own."""
    model, ids = make_model(MODELS[name]), ids_of(T)
    nats = tempered_token_nats(model, ids, EOS, 1.7, context=T)
    inputs = torch.tensor([[EOS, *map(int, ids[:-1])]])
    hidden = model.hidden(inputs)
    tempered = model.pointer.mixed(model.output(hidden) / 1.7, hidden, inputs)
    log_probs = tempered[0].log_softmax(dim=-1)
    expected = -log_probs[range(T), ids.astype(np.int64)]
    assert nats == pytest.approx(expected.numpy(), abs=1e-5)


@pytest.mark.parametrize("stride", [T, 4])
@pytest.mark.parametrize("name", ["paper", "sampled", "adaptive"])
def test_a_temperature_of_one_is_the_model_as_it_is(name, stride):
    model, ids = make_model(MODELS[name]), ids_of(97)
    found = tempered_token_nats(model, ids, EOS, 1.0, context=T, stride=stride)
    expected = token_nats(model, ids, EOS, context=T, stride=stride)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("batch_size", [1, 7])
def test_the_batch_size_changes_nothing(batch_size):
    model, ids = make_model(MODELS["adaptive"]), ids_of(331)
    sizes = {"context": T, "stride": 5}
    expected = tempered_token_nats(model, ids, EOS, 1.3, **sizes)
    found = tempered_token_nats(model, ids, EOS, 1.3, **sizes, batch_size=batch_size)
    assert found == pytest.approx(expected, abs=1e-5)
    temperatures = [
        fit_temperature(model, ids, EOS, **sizes, batch_size=b) for b in (16, batch_size)
    ]
    assert temperatures[0] == pytest.approx(temperatures[1], rel=1e-3)


@pytest.mark.parametrize("name", ["modern", "sampled"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_the_fitted_temperature_is_the_one_that_the_text_was_made_with(name, temperature):
    model = make_model(MODELS[name])
    ids = spoken_ids(model, 3_000, temperature)
    fitted = fit_temperature(model, ids, EOS, context=1, batch_size=97)
    assert fitted == pytest.approx(temperature, rel=0.04)


@pytest.mark.parametrize("name", ["gpt2", "sampled", "adaptive"])
def test_no_temperature_near_the_fitted_one_costs_less(name):
    model = make_model(MODELS[name])
    ids = spoken_ids(model, 331, 1.6)
    best = fit_temperature(model, ids, EOS, context=1, batch_size=97)

    def cost(temperature):
        return tempered_token_nats(model, ids, EOS, temperature, context=1, batch_size=97).sum()

    assert 1.2 < best < 7
    assert cost(best) < cost(1.0) - 1
    assert cost(best) < min(cost(best * 0.95), cost(best * 1.05))


def test_a_model_that_knows_nothing_has_no_best_temperature_and_keeps_its_own():
    model = make_model(MODELS["gpt2"])
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert fit_temperature(model, ids_of(53), EOS, context=T) == pytest.approx(1)


def test_the_fitted_temperature_stays_within_its_bounds():
    model = make_model(MODELS["modern"])
    never_right = np.array([int(model(torch.tensor([[EOS]]))[0, 0].argmin())], dtype=np.uint16)
    always_right = np.array([int(model(torch.tensor([[EOS]]))[0, 0].argmax())], dtype=np.uint16)
    assert fit_temperature(model, never_right, EOS, context=T) == pytest.approx(8)
    assert fit_temperature(model, always_right, EOS, context=T) < 0.5


def test_fitting_leaves_no_trace():
    model, ids = make_model(replace(MODELS["paper"], dropout=0.5)), ids_of(53)
    expected = fit_temperature(model, ids, EOS, context=T)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    assert fit_temperature(model, ids, EOS, context=T) == expected
    assert all(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_out_of_range_is_a_users_error(temperature):
    with pytest.raises(UserError, match=f"temperature is {temperature}: it must be"):
        tempered_token_nats(make_model(MODELS["gpt2"]), ids_of(7), EOS, temperature, context=T)


def test_an_empty_text_is_a_users_error():
    with pytest.raises(UserError, match="empty"):
        fit_temperature(make_model(MODELS["gpt2"]), ids_of(0), EOS, context=T)


@pytest.mark.parametrize("name", ["gpt2", "sampled", "adaptive"])
def test_memory_is_flat_in_the_length_of_the_text(monkeypatch, name):
    monkeypatch.setattr(minigpt.output, "LOGITS_PER_CHUNK", 4 * V)
    model = make_model(MODELS[name])
    largest = []
    for n_ids in (6 * T, 24 * T):
        with LargestTensor() as recorded:
            tempered_token_nats(model, ids_of(n_ids), EOS, 1.2, context=T, batch_size=B)
        largest.append(recorded.numel)
    assert largest[0] == largest[1] < B * T * V
