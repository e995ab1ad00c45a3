"""Norms: those of PyTorch, number for number."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from minigpt.layers.norm import LayerNorm, RMSNorm, make_norm
from tiny import B, D, T, randomised

PAIRS = {
    "layer": (LayerNorm(D, eps=1e-5), nn.LayerNorm(D, eps=1e-5)),
    "layer, no bias": (LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)),
    "layer, large eps": (LayerNorm(D, eps=0.3), nn.LayerNorm(D, eps=0.3)),
    "rms": (RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)),
    "rms, large eps": (RMSNorm(D, eps=0.3), nn.RMSNorm(D, eps=0.3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_pytorch_forward_and_backward(name):
    torch.manual_seed(1)
    ours, theirs = PAIRS[name]
    theirs.load_state_dict(randomised(ours).state_dict())  # the names are PyTorch's as well
    x = (torch.randn(B, T, D) * 3 + 1).requires_grad_()
    upstream = torch.randn(B, T, D)
    inputs = (x, *ours.parameters())
    reference = (x, *theirs.parameters())
    assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
    ours_back = torch.autograd.grad(ours(x), inputs, upstream)
    theirs_back = torch.autograd.grad(theirs(x), reference, upstream)
    for mine, other in zip(ours_back, theirs_back, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_position_is_normed_alone(kind):
    torch.manual_seed(1)
    norm = randomised(make_norm(kind, D, 1e-5, bias=True))
    x = torch.randn(B, T, D)
    changed = x.clone()
    changed[:, 3] = 1e3
    others = [t for t in range(T) if t != 3]
    assert torch.equal(norm(x)[:, others], norm(changed)[:, others])
    assert not torch.equal(norm(x)[:, 3], norm(changed)[:, 3])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_vector_of_zeros_gives_no_nan(kind):
    norm = make_norm(kind, D, 1e-5, bias=False)
    x = torch.zeros(B, T, D, requires_grad=True)
    out = norm(x)
    assert torch.equal(out, torch.zeros(B, T, D))
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_make_norm_makes_what_it_is_asked_for():
    assert isinstance(make_norm("rms", D, 0.25, bias=True), RMSNorm)
    assert make_norm("rms", D, 0.25, bias=True).eps == 0.25
    layer = make_norm("layer", D, 0.5, bias=False)
    assert isinstance(layer, LayerNorm)
    assert layer.eps == 0.5
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert make_norm("layer", D, 0.5, bias=True).bias is not None
