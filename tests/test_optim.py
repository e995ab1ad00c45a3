"""Optimizers: each parameter once, decayed as transformers would, at the rates of the plan."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW
from transformers import Trainer

from minigpt.config import ModelConfig, OptimConfig, load_preset, preset_names
from minigpt.model import MiniGPT, Objective
from minigpt.optim import (
    Muon,
    decayed_parameters,
    hidden_matrices,
    make_optimizers,
    orthogonal,
    rate_factor,
    set_rates,
)
from tiny import MODELS, B, T, V, make_model, random_ids


def at_toy_size(config: ModelConfig) -> ModelConfig:
    """Return config with the same parts and small sizes."""
    return replace(
        config,
        vocab_size=V,
        context_length=T,
        d_model=48,
        d_ff=31,
        n_layers=2,
        cutoffs=(29, 61),
    )


PARTS = {name: at_toy_size(load_preset(name).model) for name in preset_names()} | MODELS


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in parameters]


# minGPT#23: weight decay on norms.
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_decayed_parameters_are_those_of_transformers_by_name(name, wrapped):
    model = make_model(PARTS[name])
    whole = Objective(model) if wrapped else model
    # Its grouping looks at the model alone. It counts a tied table under both of its names.
    theirs = Trainer.get_decay_parameter_names(cast(Any, None), whole)
    own = {parameter for parameter, _ in whole.named_parameters()}
    ours = decayed_parameters(whole)
    assert set(ours) == set(theirs) & own
    assert 0 < len(ours) < len(own)
    assert all(ours[n] is whole.get_parameter(n) for n in ours)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("matrix_rate", [0.02, 0.0])
def test_every_parameter_is_in_exactly_one_group(name, matrix_rate):
    model = make_model(PARTS[name])
    config = OptimConfig(matrix_rate=matrix_rate, matrix_weight_decay=0.3, weight_decay=0.2)
    optimizers = make_optimizers(model, config)
    groups = [(o, group) for o in optimizers for group in o.param_groups]
    trained = [n for _, group in groups for n in names_of(model, group["params"])]
    assert sorted(trained) == sorted(n for n, _ in model.named_parameters())
    assert len(trained) == len(set(trained))
    decayed = decayed_parameters(model)
    for optimizer, group in groups:
        inside = names_of(model, group["params"])
        if isinstance(optimizer, Muon):
            assert set(inside) == set(hidden_matrices(model))
            assert (group["lr"], group["weight_decay"]) == (matrix_rate, 0.3)
        else:
            assert isinstance(optimizer, AdamW)
            assert group["lr"] == config.rate
            expected = {n in decayed for n in inside}
            assert expected == {group["weight_decay"] == 0.2}
            assert group["weight_decay"] in (0.0, 0.2)
    assert any(isinstance(o, Muon) for o in optimizers) == (matrix_rate > 0)


@pytest.mark.parametrize("name", PARTS)
def test_muon_gets_the_matrices_inside_the_blocks_and_no_table(name):
    matrices = hidden_matrices(make_model(PARTS[name]))
    assert matrices
    for parameter, tensor in matrices.items():
        assert parameter.startswith("blocks.")
        assert tensor.dim() == 2
    kinds = {parameter.split(".", 2)[2] for parameter in matrices}
    three = {f"attention.{part}.weight" for part in ("query", "key", "value")}
    assert three | {"attention.output.weight", "feed_forward.narrow.weight"} <= kinds


@pytest.mark.parametrize("name", ["paper", "wikitext2-10min", "untied, adaptive"])
def test_a_step_moves_every_parameter(name):
    model = make_model(PARTS[name]).train()
    optimizers = make_optimizers(model, OptimConfig())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    ids = torch.arange(B * T).view(B, T) % V
    for i in range(2):
        nats, _ = Objective(model)((ids + i * B * T) % V, random_ids(B, T, seed=i))
        nats.backward()
    for optimizer in optimizers:
        optimizer.step()
    for n, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[n]), n


def test_the_settings_reach_the_optimizers():
    config = OptimConfig(momentum=0.9, beta1=0.8, beta2=0.7, eps=1e-5)
    adam, muon = make_optimizers(make_model(MODELS["modern"]), config)
    assert all(group["betas"] == (0.8, 0.7) for group in adam.param_groups)
    assert all(group["eps"] == 1e-5 for group in adam.param_groups)
    assert muon.param_groups[0]["momentum"] == 0.9
    assert muon.param_groups[0]["nesterov"]


SHAPES = [(8, 8), (24, 8), (8, 24), (1, 5)]


def test_muon_in_bfloat16_is_that_of_pytorch_to_the_bit():
    torch.manual_seed(1)
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8}
    muon, reference = Muon(ours, torch.bfloat16, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        muon.step()
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    found, expected = muon.state_dict(), reference.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for i, state in expected["state"].items():
        assert state.keys() == found["state"][i].keys()
        assert all(torch.equal(tensor, found["state"][i][key]) for key, tensor in state.items())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_an_orthogonal_update_has_the_directions_of_the_matrix(shape, dtype, error):
    torch.manual_seed(1)
    matrix = torch.randn(shape)
    before = matrix.clone()
    found = orthogonal(matrix, dtype)
    assert found.dtype == dtype
    assert torch.equal(matrix, before)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ found.float() @ right.T  # what became of the singular values
    off = inside - inside.diagonal().diag()
    assert off.abs().max() < error
    assert 0.6 < inside.diagonal().min() <= inside.diagonal().max() < 1.3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_computes_in_the_precision_of_the_model(precision, monkeypatch):
    seen = set()

    def watched(matrix, dtype):
        seen.add(dtype)
        return orthogonal(matrix, dtype)

    monkeypatch.setattr("minigpt.optim.orthogonal", watched)
    model = make_model(PARTS["wikitext2-10min"])
    optimizers = make_optimizers(model, OptimConfig(), precision)
    Objective(model)(random_ids(B, T), random_ids(B, T))[0].backward()
    for optimizer in optimizers:
        optimizer.step()
    assert seen == {getattr(torch, precision)}


PLAN = OptimConfig(warm_up=0.2, hold=0.6, final_rate=0.25)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [
        (-0.1, 0.1),
        (0.0, 0.1),  # the first step is small, not lost
        (0.01, 0.1),
        (0.1, 0.5),
        (0.2, 1.0),
        (0.4, 1.0),
        (0.6, 1.0),
        (0.8, 0.625),
        (1.0, 0.25),
        (1.1, 0.25),
    ],
)
def test_rates_rise_stay_and_fall(progress, factor):
    assert rate_factor(progress, PLAN) == pytest.approx(factor)


def test_a_plan_without_warm_up_or_decay_is_level():
    level = OptimConfig(warm_up=0.0, hold=1.0)
    assert {rate_factor(i / 7, level) for i in range(8)} == {1.0}
    assert rate_factor(1.0, OptimConfig(warm_up=0.0, hold=0.0)) == 0.0
    assert rate_factor(0.0, OptimConfig(warm_up=0.0, hold=0.0)) == 1.0


# nanoGPT#443: a first step at a rate of 0.
@given(
    shares=st.tuples(st.floats(0, 0.99), st.floats(0, 1), st.floats(0, 0.99)),
    n_steps=st.integers(1, 997),
)
def test_no_step_of_any_plan_is_lost(shares, n_steps):
    warm_up, hold, final_rate = shares
    config = OptimConfig(warm_up=min(warm_up, hold), hold=hold, final_rate=final_rate)
    factors = [rate_factor(step / n_steps, config) for step in range(n_steps)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    past_warm_up = [f for step, f in enumerate(factors) if step / n_steps >= config.warm_up]
    assert all(factor >= final_rate for factor in past_warm_up)


def test_set_rates_is_relative_to_the_first_rate():
    optimizers = make_optimizers(make_model(MODELS["gpt2"]), OptimConfig(matrix_rate=0.5, rate=0.1))
    for factor in (0.1, 1.0, 0.3):
        set_rates(optimizers, factor)
        rates = {group["lr"] for optimizer in optimizers for group in optimizer.param_groups}
        assert rates == {0.5 * factor, 0.1 * factor}


def test_a_model_without_norms_gets_no_empty_group():
    table = nn.Embedding(V, 5)
    (adam,) = make_optimizers(table, OptimConfig())
    assert [len(group["params"]) for group in adam.param_groups] == [1]
    assert MiniGPT(MODELS["modern"]).training
