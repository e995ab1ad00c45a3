"""The parts of a Transformer, a file a part.

norm, positions, token_shift, attention, pointer, feed_forward.
"""

from minigpt.layers.attention import (
    CausalSelfAttention,
    KeyValueCache,
    MultiHeadAttention,
    ScaledDotProductAttention,
)
from minigpt.layers.feed_forward import PositionwiseFeedForward
from minigpt.layers.norm import LayerNorm, RMSNorm
from minigpt.layers.pointer import Pointer
from minigpt.layers.positions import PositionalEncoding, Rotary, sinusoidal_table
from minigpt.layers.token_shift import TokenShift

__all__ = [
    "CausalSelfAttention",
    "KeyValueCache",
    "LayerNorm",
    "MultiHeadAttention",
    "Pointer",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "RMSNorm",
    "Rotary",
    "ScaledDotProductAttention",
    "TokenShift",
    "sinusoidal_table",
]
