"""Positions: the paper's formula in double precision, Llama's rotation, and nothing else moved."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minigpt.layers.positions import (
    LearnedPositions,
    NoPositions,
    NoRotation,
    PositionalEncoding,
    Rotary,
    sinusoidal_table,
)
from tiny import B, D, H, K, T


def formula(position: int, channel: int, d_model: int) -> float:
    """PE of section 3.5, in Python's own double precision."""
    angle = position / 10_000 ** (channel // 2 * 2 / d_model)
    return math.cos(angle) if channel % 2 else math.sin(angle)


def formula_row(position: int, d_model: int) -> torch.Tensor:
    return torch.tensor([formula(position, c, d_model) for c in range(d_model)])


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 97), d_model=st.integers(1, 53))
def test_the_table_is_the_formula_for_odd_widths_too(length, d_model):
    expected = torch.stack([formula_row(position, d_model) for position in range(length)])
    table = sinusoidal_table(length, d_model)
    assert table.dtype == torch.float32
    assert_close(table, expected, atol=1e-6, rtol=0)


def test_position_100_000_is_as_exact_as_the_first():
    encoding = PositionalEncoding(D, dropout=0.0)
    found = encoding(torch.zeros(1, 1, D), offset=100_000)[0, 0]
    # The angle alone, kept in float32, would be off by 0.004.
    assert_close(found, formula_row(100_000, D), atol=1e-6, rtol=0)


def test_the_table_grows_by_itself_and_is_not_saved():
    encoding = PositionalEncoding(D, dropout=0.0, max_len=3)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    assert_close(encoding(x), x + sinusoidal_table(T, D), atol=0, rtol=0)
    one_by_one = torch.cat([encoding(x[:, t : t + 1], offset=t) for t in range(T)], dim=1)
    assert torch.equal(one_by_one, encoding(x))
    assert torch.equal(encoding(x[:, :2]), x[:, :2] + sinusoidal_table(2, D))
    assert not encoding.state_dict()


def test_a_later_position_is_a_rotation_of_an_earlier_one():
    """PE(pos + k) is a linear map of PE(pos) that depends on k alone (section 3.5)."""
    k, table = 5, sinusoidal_table(T + 5, D).double()
    angles = k / 10_000.0 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    sin, cos = table[:T, 0::2], table[:T, 1::2]
    assert_close(table[k:, 0::2], sin * angles.cos() + cos * angles.sin(), atol=1e-6, rtol=0)
    assert_close(table[k:, 1::2], cos * angles.cos() - sin * angles.sin(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "positions", [PositionalEncoding(D, 0.5), LearnedPositions(T, D, 0.5), NoPositions(0.5)]
)
def test_dropout_follows_the_sum_and_only_in_training(positions):
    torch.manual_seed(1)
    x = torch.randn(B, T, D)
    whole = positions.eval()(x)
    assert torch.equal(whole, positions(x))
    dropped = positions.train()(x)
    gone = dropped == 0
    assert 0.4 < gone.float().mean() < 0.6
    assert_close(dropped[~gone], 2 * whole[~gone])


def test_learned_positions_are_rows_of_their_table():
    torch.manual_seed(1)
    learned = LearnedPositions(T, D, 0.0)
    x = torch.randn(B, T, D)
    for t in range(T):
        assert torch.equal(learned(x)[:, t], x[:, t] + learned.weight[t])
    assert torch.equal(learned(x)[:, 4:], learned(x[:, 4:], offset=4))
    assert learned.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_model_without_added_positions_adds_nothing():
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    assert torch.equal(NoPositions(0.0)(x, offset=3), x)
    assert torch.equal(NoRotation()(x, offset=3), x)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
@pytest.mark.parametrize("offset", [0, 7])
def test_rotary_is_that_of_llama(base, offset):
    torch.manual_seed(1)
    q, k = torch.randn(B, H, T, K), torch.randn(B, 1, T, K)
    config = LlamaConfig(
        hidden_size=D,
        num_attention_heads=H,
        head_dim=K,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    positions = torch.arange(offset, offset + T)[None].expand(B, T)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    their_q, their_k = apply_rotary_pos_emb(q, k, cos, sin)
    rotary = Rotary(K, offset + T, base)
    assert_close(rotary(q, offset), their_q, atol=1e-5, rtol=0)
    assert_close(rotary(k, offset), their_k, atol=1e-5, rtol=0)


def test_rotary_angles_are_exact_far_out():
    position, base = 99_991, 10_000.0
    x = torch.zeros(1, 1, 1, K)
    x[..., : K // 2] = 1.0
    turned = Rotary(K, position + 1, base)(x, offset=position)[0, 0, 0]
    angles = [position / base ** (2 * i / K) for i in range(K // 2)]
    expected = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)])
    assert_close(turned, expected, atol=1e-6, rtol=0)


def test_rotary_lets_attention_see_distances_alone():
    torch.manual_seed(1)
    rotary = Rotary(K, 101)
    q, k = torch.randn(B, H, 1, K), torch.randn(B, H, 1, K)

    def score(i: int, j: int) -> torch.Tensor:
        return (rotary(q, i) * rotary(k, j)).sum(-1)

    assert_close(score(5, 2), score(97, 94), atol=1e-4, rtol=0)
    assert (score(5, 2) - score(2, 5)).abs().max() > 0.1  # before is not after
    assert_close(rotary(q, 41).norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(rotary(q, 0), q)
    assert not rotary.state_dict()
