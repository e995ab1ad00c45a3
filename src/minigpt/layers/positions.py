"""Positions: tell the model where each symbol stands.

Attention without a mask sees a set, not a sequence: shuffle the positions and its outputs are
shuffled alike, nothing more. A causal mask tells what came before, but hardly how long before. So
position has to be put in, in one of three ways.

In: embeddings x (B, T, D) for the two that add a vector; queries or keys (B, H, T, K) for the one
that turns them. Out: the same shape. `offset` is the position of the first symbol of x, which is
not 0 when a cache already holds what came before.

B batch · T sequence · D d_model · H heads · K d_head
"""

import torch
from torch import Tensor, nn


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """Return the sines and cosines of positions 0 … length − 1 as a table (length, D), in float32.

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(the same)   — Vaswani et al. 2017,
    section 3.5. For any fixed k, PE(pos+k) is a linear map of PE(pos): a rotation of each pair.
    """
    # In float32 an angle near 100,000 is off by up to 0.004 already, so: float64, cast once.
    positions = torch.arange(length, dtype=torch.float64)
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model  # 2i/D
    angles = positions[:, None] / 10_000.0**exponents  # (length, ⌈D/2⌉)
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()
    return table[:, :d_model]  # (length, D); an odd D ends with a sine that has no cosine


class PositionalEncoding(nn.Module):
    """Add the paper's sines and cosines to the embeddings, then drop out (sections 3.5 and 5.4).

    The table starts with max_len positions and grows by itself: there is no position it ends at.
    """

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = 5_000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.table: Tensor
        # A formula has nothing to save: it is made again wherever the model is loaded.
        self.register_buffer("table", sinusoidal_table(max_len, d_model), persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Add positions offset … offset + T − 1 to x (B, T, D)."""
        end = offset + x.size(1)
        if end > self.table.size(0):
            # Twice what is needed, so that a text that grows by single words rarely comes here.
            self.table = sinusoidal_table(2 * end, self.table.size(1)).to(self.table)
        x = self.dropout(x + self.table[offset:end])
        return x


class LearnedPositions(nn.Module):
    """Add a learned vector for each position, then drop out (GPT-2; the paper's table 3, row E).

    The table ends at context_length: no vector was ever learned for a position beyond it.
    """

    def __init__(self, context_length: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(context_length, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Add positions offset … offset + T − 1 to x (B, T, D)."""
        x = self.dropout(x + self.weight[offset : offset + x.size(1)])
        return x


class NoPositions(nn.Module):
    """Add nothing, for models whose attention turns queries and keys; only drop out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:  # noqa: ARG002, its siblings' call
        """Return x (B, T, D) as it came, dropout apart."""
        x = self.dropout(x)
        return x


class Rotary(nn.Module):
    """Turn each pair of channels by an angle that grows with the position (Su et al. 2021, eq. 34).

    A query at i and a key at j then meet at an angle that depends on i − j alone, so attention sees
    distances. The channels c and c + K/2 are a pair, as in Llama's weights ("rotate half"); the
    article pairs 2c with 2c + 1, which is the same up to the order of the channels.
    """

    def __init__(self, d_head: int, context_length: int, base: float = 10_000.0) -> None:
        super().__init__()
        exponents = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
        angles = torch.arange(context_length, dtype=torch.float64)[:, None] / base**exponents
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().float(), persistent=False)  # (T, K/2)
        self.register_buffer("sin", angles.sin().float(), persistent=False)  # (T, K/2)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Turn x (B, H, T, K), whose first position is `offset`."""
        cos, sin = self.cos[offset : offset + x.size(2)], self.sin[offset : offset + x.size(2)]
        a, b = x.chunk(2, dim=-1)  # (B, H, T, K/2) each
        # (a, b) as a point in the plane, turned: the product of two complex numbers, written out.
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class NoRotation(nn.Module):
    """Leave queries and keys as they are, for models that add positions to the embedding."""

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:  # noqa: ARG002, its sibling's call
        """Return x (B, H, T, K) as it came."""
        return x
