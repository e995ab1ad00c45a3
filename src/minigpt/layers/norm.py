"""Normalisation: keep each position's vector at a size that the next part can work with.

In: x (B, T, D), or any tensor whose last axis is D. Out: the same shape.

LayerNorm is what the paper and GPT-2 use, RMSNorm what most models since Llama do. Both look at one
position alone, so neither carries anything from one to another. Where the norm stands, after the
sum (paper) or before the part (GPT-2), is the block's choice: see minigpt.model.

B batch · T sequence · D d_model · H heads · K d_head
"""

import torch
from torch import Tensor, nn

from minigpt.config import Norm


class LayerNorm(nn.Module):
    """Centre each vector on 0, scale it to variance 1, then let the model choose both anew.

    (x − mean) / √(variance + ε) · weight + bias   — Ba et al. 2016, equation 4.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x (…, D)."""
        x = x - x.mean(dim=-1, keepdim=True)
        # The mean over D, not over D − 1 (Bessel's correction): the vector is all there is, not a
        # sample of something larger.
        variance = x.square().mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


class RMSNorm(nn.Module):
    """Scale each vector to mean square 1, then let the model choose the scale anew.

    x / √(mean(x²) + ε) · weight   — Zhang and Sennrich 2019, equation 4; the ε is LayerNorm's.
    Centring is not what makes layer norm work; without it and a bias, two memory passes fall away.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x (…, D), or of queries and keys (…, K)."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


def make_norm(kind: Norm, d_model: int, eps: float, bias: bool) -> nn.Module:
    """Return the norm called `kind` over d_model channels. Only layer norms can have a bias."""
    return LayerNorm(d_model, eps, bias) if kind == "layer" else RMSNorm(d_model, eps)
