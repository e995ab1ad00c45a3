"""Token shift: let each position know the word before it, ahead of all attention.

In: the embeddings x (B, T, D) of a text. Out: the same shape. Attention would first have to learn
to find that word, of all words the one that tells most.

B batch · T sequence · D d_model
"""

import torch
from torch import Tensor, nn


class TokenShift(nn.Module):
    """x_t + w ⊙ x_{t−1}, where w (D,) is learned and begins at 0, as no shift.

    After RWKV (Peng et al. 2023, section 3.1), whose blocks mix w and 1 − w; here x_t stays whole.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Shift x (B, T, D); before (B, 1, D) is what stood ahead of it, None at a text's begin."""
        if before is None:
            before = torch.zeros_like(x[:, :1])
        earlier = torch.cat((before, x[:, :-1]), dim=1)  # (B, T, D)
        shifted = x + self.weight * earlier
        return shifted


class NoTokenShift(nn.Identity):
    """Leave the embeddings as they are, for models without a shift."""

    def forward(self, input: Tensor, before: Tensor | None = None) -> Tensor:  # noqa: A002, ARG002
        """Return input (B, T, D) as it came; named and called as its base and its sibling are."""
        return input
