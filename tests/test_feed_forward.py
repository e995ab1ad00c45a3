"""Feed-forward networks: the same as transformers' own, and as the equations spelt out."""

from typing import get_args

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from minigpt.config import FeedForward
from minigpt.layers.feed_forward import (
    GELUFeedForward,
    PositionwiseFeedForward,
    ReLU2FeedForward,
    SwiGLUFeedForward,
    make_feed_forward,
)
from tiny import B, D, F, H, T, randomised


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(B, T, D, requires_grad=True)


def assert_same(ours: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    upstream = torch.randn(B, T, D)
    assert ours(x).shape == (B, T, D)
    assert_close(ours(x), reference(x), atol=1e-5, rtol=0)
    (mine,) = torch.autograd.grad(ours(x), x, upstream)
    (theirs,) = torch.autograd.grad(reference(x), x, upstream)
    assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_relu_is_two_maps_with_a_bend_between(x, bias):
    ours = randomised(PositionwiseFeedForward(D, F, dropout=0.0, bias=bias))
    assert_same(ours, nn.Sequential(ours.widen, nn.ReLU(), ours.narrow), x)
    assert (ours.widen.weight.shape, ours.narrow.weight.shape) == ((F, D), (D, F))
    assert (ours.widen.bias is not None) is bias


def test_gelu_is_gpt2s(x):
    ours = randomised(GELUFeedForward(D, F))
    theirs = GPT2MLP(F, GPT2Config(n_embd=D, resid_pdrop=0.0))
    names = {"widen": "c_fc", "narrow": "c_proj"}
    theirs.load_state_dict(
        {  # GPT-2 keeps its matrices transposed
            f"{names[part]}.{kind}": tensor.T if kind == "weight" else tensor
            for name, tensor in ours.state_dict().items()
            for part, kind in [name.split(".")]
        }
    )
    assert_same(ours, theirs, x)


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_is_llamas(x, bias):
    ours = randomised(SwiGLUFeedForward(D, F, bias=bias))
    config = LlamaConfig(hidden_size=D, num_attention_heads=H, intermediate_size=F, mlp_bias=bias)
    theirs = LlamaMLP(config)
    names = {"gate": "gate_proj", "widen": "up_proj", "narrow": "down_proj"}
    theirs.load_state_dict(
        {
            f"{names[part]}.{kind}": tensor
            for name, tensor in ours.state_dict().items()
            for part, kind in [name.split(".")]
        }
    )
    assert_same(ours, theirs, x)


def test_relu2_is_the_equation(x):
    class Squared(nn.Module):
        def forward(self, inner):
            return inner.clamp(min=0) ** 2

    ours = randomised(ReLU2FeedForward(D, F))
    assert_same(ours, nn.Sequential(ours.widen, Squared(), ours.narrow), x)


def test_dropout_sits_between_the_two_maps(x):
    ours = randomised(PositionwiseFeedForward(D, F, dropout=0.3)).train()
    torch.manual_seed(2)
    dropped = ours(x)
    torch.manual_seed(2)
    assert torch.equal(dropped, ours.narrow(nn.Dropout(0.3)(ours.widen(x).relu())))
    assert not torch.equal(dropped, ours.eval()(x))
    assert torch.equal(ours(x), ours(x))


@pytest.mark.parametrize("kind", get_args(FeedForward))
def test_every_position_is_worked_on_alone(kind, x):
    network = randomised(make_feed_forward(kind, D, F, bias=True)).train()
    changed = x.detach().clone()
    changed[:, 4] += 1
    others = [t for t in range(T) if t != 4]
    assert_close(network(x)[:, others], network(changed)[:, others], atol=1e-6, rtol=0)
    assert not torch.equal(network(x)[:, 4], network(changed)[:, 4])


def test_make_feed_forward_makes_what_it_is_asked_for():
    made = {kind: make_feed_forward(kind, D, F, bias=False) for kind in get_args(FeedForward)}
    assert {kind: type(network) for kind, network in made.items()} == {
        "relu": PositionwiseFeedForward,
        "gelu": GELUFeedForward,
        "swiglu": SwiGLUFeedForward,
        "relu2": ReLU2FeedForward,
    }
    for network in made.values():
        assert not any("bias" in name for name, _ in network.named_parameters())
