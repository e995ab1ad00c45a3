"""Feed-forward: what each position does alone with what attention brought it.

In: x (B, T, D). Out: the same shape. Widen to F channels, bend, narrow again; every position passes
through the same matrices. With F = 4 D, two thirds of a block's weights are here.

B batch · T sequence · D d_model · F d_ff
"""

from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import FeedForward


class PositionwiseFeedForward(nn.Module):
    """max(0, x W₁ + b₁) W₂ + b₂   — Vaswani et al. 2017, section 3.3, equation 2.

    Dropout sits between the two maps, where The Annotated Transformer has it; the paper has none
    there.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1, bias: bool = True) -> None:
        super().__init__()
        self.widen = nn.Linear(d_model, d_ff, bias=bias)
        self.narrow = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        x = self.narrow(self.dropout(self.widen(x).relu()))  # D → F → D
        return x


class GELUFeedForward(nn.Module):
    """GELU(x W₁ + b₁) W₂ + b₂, in GPT-2's tanh form (Hendrycks and Gimpel 2016, section 2).

    Bent smoothly where ReLU has a corner, and a little below 0 on the left of it, so that a channel
    that is off still has a gradient to come back by.
    """

    def __init__(self, d_model: int, d_ff: int, bias: bool = True) -> None:
        super().__init__()
        self.widen = nn.Linear(d_model, d_ff, bias=bias)
        self.narrow = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        x = self.narrow(F.gelu(self.widen(x), approximate="tanh"))
        return x


class ReLU2FeedForward(nn.Module):
    """max(0, x W₁)² W₂   — So et al. 2021 ("Primer"), section 3.

    As cheap as ReLU, and it learned faster wherever they tried. The square lets one channel answer
    to the product of two features, as a gate would, without a third matrix.
    """

    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.widen = nn.Linear(d_model, d_ff, bias=bias)
        self.narrow = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        x = self.narrow(self.widen(x).relu().square())
        return x


class SwiGLUFeedForward(nn.Module):
    """(SiLU(x W) ⊙ x V) W₂   — Shazeer 2020, equation 6; W is `gate`, V is `widen`.

    One half decides how much of the other passes. That takes three matrices; the config's default F
    of 8/3 D makes them cost what two of 4 D do.
    """

    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.widen = nn.Linear(d_model, d_ff, bias=bias)
        self.narrow = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        x = self.narrow(F.silu(self.gate(x)) * self.widen(x))
        return x


def make_feed_forward(kind: FeedForward, d_model: int, d_ff: int, bias: bool) -> nn.Module:
    """Return the feed-forward network called `kind`, D → F → D."""
    if kind == "relu":
        # Mini-GPT drops out after the sublayer only, where section 5.4 of the paper says.
        return PositionwiseFeedForward(d_model, d_ff, dropout=0.0, bias=bias)
    networks = {"gelu": GELUFeedForward, "relu2": ReLU2FeedForward, "swiglu": SwiGLUFeedForward}
    return networks[kind](d_model, d_ff, bias)
