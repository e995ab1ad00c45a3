"""Attention: every position gathers what it needs from the positions it may see.

In and out: vectors x (B, T, D). Inside, each head works on its own K channels of them: queries,
keys and values (B, H, T, K).

Read in this order: `attention` is equation 1 of the paper; `ScaledDotProductAttention` the same
with a mask and dropout; `MultiHeadAttention` section 3.2.2, as encoders and decoders use it; then
what a decoder-only model makes of it: which positions are visible, the same sum computed fast, the
cache of keys and values, and `CausalSelfAttention`, which is the attention of Mini-GPT.

B batch · T queries in sequence · S keys, T of them in self-attention · D d_model · H heads
G key heads, H of them unless queries share keys · K d_head · L layers, in the cache alone
"""

import math
from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.errors import require
from minigpt.layers.norm import RMSNorm

# Up to so many positions, attention in bfloat16 on a CPU is faster in one piece than in blocks.
ONE_PIECE_AT_MOST = 512


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mix the values of all visible positions, each as much as its key answers the query.

    softmax(Q Kᵀ / √d_k) V   — Vaswani et al. 2017, section 3.2.1, equation 1.

    q   (B, H, T, K)    k, v   (B, H, S, K), the sequence itself (S = T) or another one
    visible   (…, T, S) bool: may position i look at position j?
    Returns the mixed values (B, H, T, K) and the weights (B, H, T, S) that mixed them, as they
    were before dropout: rows sum to 1, or to 0 where nothing is visible.
    """
    scores = q @ k.transpose(-2, -1)  # (B, H, T, S)
    # A dot product of K unit-variance pairs has variance K. Undo that, or the softmax saturates as
    # heads grow wider and its gradient dies.
    scores = scores / math.sqrt(q.size(-1))
    # exp(-inf) is exactly 0, so a hidden position gets no weight at all, not merely a small one.
    scores = scores.masked_fill(~visible, -math.inf)
    # In a row that sees nothing every score is -inf and the softmax would be 0/0. Give such rows
    # any finite scores (so that no NaN flows backward either) and take the weights away again.
    sees_something = visible.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~sees_something, 0.0).softmax(dim=-1)  # (B, H, T, S)
    weights = weights.masked_fill(~sees_something, 0.0)
    return F.dropout(weights, dropout) @ v, weights  # (B, H, T, K), (B, H, T, S)


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    """Raise UserError unless mask holds only 0 and 1 and broadcasts to shape (…, T, S)."""
    # (B, T, S) would broadcast wherever there are as many texts as heads, to each head its text's.
    require(
        not 2 < mask.dim() < len(shape) or all(size == 1 for size in mask.shape[:-2]),
        f"mask has shape {tuple(mask.shape)}, which leaves open what its first axis counts: "
        "unsqueeze it to (B, 1, T, S), a mask for each text, or to (1, H, T, S), one for each head",
    )
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    require(
        mask.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in sizes),
        f"mask has shape {tuple(mask.shape)}: give one that broadcasts to {shape}, "
        "a row for each query and a column for each key",
    )
    # Other code bases *add* their mask to the scores: 0 where one may look, -inf where not. Read
    # as ours, such a mask would hide the past and show the future, and the loss would look fine.
    require(
        mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all()),
        "mask has numbers other than 0 and 1: give 0 where a position is hidden, 1 elsewhere; "
        "of a mask that is to be added, give mask == 0",
    )


class ScaledDotProductAttention(nn.Module):
    """Equation 1 as a module, with a mask that says who may be seen and dropout on the weights.

    The paper drops out what sublayers return and the embedding sums, no weights (section 5.4); its
    authors' code, tensor2tensor, drops out weights too, as do The Annotated Transformer and
    PyTorch.
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output (…, T, K) and the attention weights (…, T, S).

        q   (…, T, K)    k, v   (…, S, K)
        mask   broadcastable to (…, T, S); where it is 0 (or False) is hidden; None hides nothing
        Raises UserError for a mask of another shape or with numbers other than 0 and 1.
        """
        visible = torch.ones((), dtype=torch.bool, device=q.device)
        if mask is not None:
            _check_mask(mask, (*q.shape[:-1], k.size(-2)))
            visible = mask != 0
        # Spelt out to (…, T, S), since `attention` asks of each row whether it sees anything.
        visible = visible.expand(*visible.shape[:-2], q.size(-2), k.size(-2))
        return attention(q, k, v, visible, self.dropout if self.training else 0.0)


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, T, H·K) → (B, H, T, K): from here on each head is on its own."""
    # Not -1 for K: of a batch of no texts nothing could tell it.
    return x.view(*x.shape[:2], n_heads, x.size(-1) // n_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, K) → (B, T, H·K): the Concat of section 3.2.2."""
    return x.transpose(1, 2).flatten(2)


class MultiHeadAttention(nn.Module):
    """Let h heads attend at once, each in its own projection of the input; join what they found.

    MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O,
    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)   — Vaswani et al. 2017, section 3.2.2.

    The h matrices W_i^Q stand side by side in one (D, D) matrix, so one product serves all heads;
    W^K and W^V likewise. The biases are those of GPT-2 and of nn.MultiheadAttention; the paper has
    none.
    """

    def __init__(self, d_model: int = 512, n_heads: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        require(
            d_model >= 1 and n_heads >= 1 and d_model % n_heads == 0,
            f"d_model {d_model} is not a multiple of n_heads {n_heads}: change one of them",
        )
        self.n_heads = n_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.attention = ScaledDotProductAttention(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, D) and the weights (B, H, T, S) of every head.

        query   (B, T, D)    key, value   (B, S, D); the same as query in self-attention
        mask    (T, S), (B, T, S) or (B, H, T, S); where it is 0 is hidden. Padding is the same for
                every query, (B, 1, S): see `padding_mask` in minigpt.transformer, and beside it
                `look_ahead_mask` in minigpt.transformer for what a decoder must not see.
        Raises UserError as `ScaledDotProductAttention` does.
        """
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S): one mask for all heads
        q = split_heads(self.query(query), self.n_heads)  # (B, H, T, K)
        k = split_heads(self.key(key), self.n_heads)  # (B, H, S, K)
        v = split_heads(self.value(value), self.n_heads)  # (B, H, S, K)
        mixed, weights = self.attention(q, k, v, mask)
        return self.output(merge_heads(mixed)), weights


def causal_mask(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Return which positions are visible, (n_queries, n_keys) bool: none that comes later.

    In training every position of a text is an exercise, all answered in one pass; the mask is what
    keeps each from reading its own answer one place further on; in evaluation likewise. In decoding
    nothing later exists yet: the queries are the last of the keys' positions, and a single query
    sees all keys.
    """
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return visible.tril(n_keys - n_queries)


def taught_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `attention` with nothing later visible; query heads may share a key head.

    q   (B, H, T, K)    k, v   (B, G, S, K), G a divisor of H
    The queries are the last T of the S positions. Returns the mixed values (B, H, T, K) and the
    weights (B, H, T, S).
    """
    # Query heads 0 … H/G − 1 share key head 0, and so on (Ainslie et al. 2023, figure 2).
    n_sharing = q.size(1) // k.size(1)
    k = k.repeat_interleave(n_sharing, dim=1)  # (B, H, S, K)
    v = v.repeat_interleave(n_sharing, dim=1)  # (B, H, S, K)
    return attention(q, k, v, causal_mask(q.size(2), k.size(2), q.device), dropout)


def one_piece_causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute what `taught_causal_attention` does as two products and a softmax, in bfloat16.

    For sequences that fit the processor's cache whole: in blocks there is nothing to save. Each
    position sees itself, so no row needs care. q, k, v (B, H, T, K); returns the mixed values.
    """
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    unseen = q.new_full((q.size(2), k.size(2)), -math.inf).triu(1)  # added: 0 where one may look
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + unseen  # (B, H, T, T)
    return F.dropout(scores.softmax(dim=-1), dropout) @ v


def fast_causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute what `taught_causal_attention` does, without keeping the weights.

    PyTorch works through the keys in blocks that fit the processor's cache (Dao et al. 2022), which
    saves the (T, S) matrix and most of the time; with dropout, on a CPU, it holds the matrix after
    all. A short sequence in bfloat16 on a CPU goes in one piece: 256 positions take 0.4 of the
    time that the blocks do. Same shapes; returns the mixed values alone.
    """
    n_queries, n_keys = q.size(2), k.size(2)
    square = n_queries == n_keys
    alike = q.size(1) == k.size(1)
    in_bfloat16 = torch.is_autocast_enabled("cpu") and (
        torch.get_autocast_dtype("cpu") == torch.bfloat16
    )
    short = q.device.type == "cpu" and n_queries <= ONE_PIECE_AT_MOST
    if square and alike and in_bfloat16 and short:
        return one_piece_causal_attention(q, k, v, dropout)
    # A lone query is the newest position and sees every key; only a stretch of them needs a mask.
    several = n_queries > 1
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=causal_mask(n_queries, n_keys, q.device) if several and not square else None,
        dropout_p=dropout,
        is_causal=several and square,
        enable_gqa=not alike,
    )


class KeyValueCache:
    """The keys and values of what was read already, so that a new word costs one position, not T.

    Exact, not an approximation: nothing later is ever visible, so no vector of a position that was
    read depends on what follows it, in the first layer nor, layer by layer, in any other. When the
    text grows, its keys and values would only be computed again, to the same numbers, up to
    rounding.

    The buffers have their full size from the start; nothing is allocated per word. Each layer has
    its own: of one for all, a compiler that knows no side effects would copy all for each layer's
    part. Beside them stands `newest` (B, 1, D), the last embedding that was read, for the token
    shift of the next one; None at the start.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Take empty buffers for keys and values of L layers, (B, G, T, K) each."""
        self.keys, self.values = keys, values
        self.newest: Tensor | None = None
        self.length = 0

    @property
    def capacity(self) -> int:
        """How many positions it can hold."""
        return self.keys[0].size(2)

    def reset(self) -> None:
        """Forget everything; the next ids stand at position 0 again."""
        self.newest = None
        self.length = 0

    def select(self, texts: Tensor) -> "KeyValueCache":
        """Return a cache of the texts (B,) of this one, some of them more than once, or none.

        Several continuations of one prompt read it once, and go their ways from there.
        """
        chosen = copy(self)
        chosen.keys = [keys[texts] for keys in self.keys]
        chosen.values = [values[texts] for values in self.values]
        chosen.newest = None if self.newest is None else self.newest[texts]
        return chosen

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, G, T, K) of one layer behind what it holds; return all of them.

        `length` moves only in `advance`, once every layer has stored its part.
        """
        end = self.length + k.size(2)
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, {end} are too many")
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, n_positions: int) -> None:
        """Count n_positions as read."""
        self.length += n_positions


class CausalSelfAttention(nn.Module):
    """Multi-head attention of a sequence to its own past: the attention of Mini-GPT.

    What section 3.2.2 has gained since: keys and values may have fewer heads than queries
    (grouped-query attention, Ainslie et al. 2023), queries and keys may be normalised (Henry et al.
    2020) and turned by their position (Su et al. 2021), and the past may come from a cache.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        *,
        bias: bool,
        dropout: float,
        rotation: nn.Module,
        qk_norm_eps: float | None,
    ) -> None:
        """Build the four projections; qk_norm_eps None leaves queries and keys as they are."""
        super().__init__()
        self.n_heads, self.n_kv_heads, self.dropout = n_heads, n_kv_heads, dropout
        self.query = nn.Linear(d_model, n_heads * d_head, bias=bias)
        self.key = nn.Linear(d_model, n_kv_heads * d_head, bias=bias)
        self.value = nn.Linear(d_model, n_kv_heads * d_head, bias=bias)
        self.output = nn.Linear(n_heads * d_head, d_model, bias=bias)
        # One norm serves all heads: it has K weights, and each head's vector is normed by itself.
        self.query_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(d_head, qk_norm_eps)
        self.key_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(d_head, qk_norm_eps)
        self.rotation = rotation
        # Whoever wants to see the weights puts the taught form here for a while.
        self.attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] = fast_causal_attention

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> Tensor:
        """Let each position of x (B, T, D) gather from itself and what came before: (B, T, D).

        cache   holds the keys and values of what came before x, and takes in those of x
        layer   which part of the cache is this module's
        """
        offset = cache.length if cache is not None else 0
        q = split_heads(self.query(x), self.n_heads)  # (B, H, T, K)
        k = split_heads(self.key(x), self.n_kv_heads)  # (B, G, T, K)
        v = split_heads(self.value(x), self.n_kv_heads)  # (B, G, T, K)
        # Not v: where to look depends on the distance, what is found there does not.
        q = self.rotation(self.query_norm(q), offset)
        k = self.rotation(self.key_norm(k), offset)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, G, S, K), S = all positions so far
        mixed = self.attend(q, k, v, self.dropout if self.training else 0.0)  # (B, H, T, K)
        x = self.output(merge_heads(mixed))
        return x
