"""Mini-GPT: ids in, a probability for every possible next word out.

                 ids (B, T)
                     │  embedding, token shift, positions, dropout
                  x (B, T, D) ───────────────────────────┐
      ┌──────────────┴───────────────┐                   │
      │ block  × L                   │                   │  the residual stream: blocks
      │   attention    gathers       │  ← layers/        │  add to x, and nothing else is
      │   feed forward digests       │                   │  done to it but post-norm's norms
      └──────────────┬───────────────┘                   │
                  x (B, T, D) ◄──────────────────────────┘
                     │  norm, output, pointer
              logits (B, T, V)

`MiniGPT.forward(ids) -> logits` gives the logits of all positions; `Objective.forward(ids,
targets)` gives the loss without ever holding them all. Which parts a model has is chosen here,
once, from its config; no `forward` asks again.

B batch · T sequence · N positions to score · D d_model · V vocabulary · L n_layers
G n_kv_heads · K d_head
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.layers.attention import CausalSelfAttention, KeyValueCache
from minigpt.layers.feed_forward import make_feed_forward
from minigpt.layers.norm import make_norm
from minigpt.layers.pointer import Copied, NoPointer, Pointer, PointerCache
from minigpt.layers.positions import (
    LearnedPositions,
    NoPositions,
    NoRotation,
    PositionalEncoding,
    Rotary,
)
from minigpt.layers.token_shift import NoTokenShift, TokenShift
from minigpt.output import AdaptiveEmbedding, AdaptiveSoftmax, FullSoftmax, SampledSoftmax


class Block(nn.Module):
    """Attention, then a feed-forward network: the two parts that both kinds of block share.

    The kinds differ in where the two norms stand, so each has its own `forward`. In both, dropout
    falls on what a part adds to the stream, never on the stream itself (section 5.4).
    """

    def __init__(self, config: ModelConfig, rotation: nn.Module, layer: int) -> None:
        """Build block number `layer`, whose place in a cache that is; `rotation` serves them all.

        The config is a resolved one: every size in it is the size itself.
        """
        super().__init__()
        self.layer = layer
        self.attention_norm = make_norm(config.norm, config.d_model, config.norm_eps, config.bias)
        self.attention = CausalSelfAttention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            config.d_head,
            bias=config.bias,
            dropout=config.attention_dropout,
            rotation=rotation,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
        )
        self.feed_forward_norm = make_norm(
            config.norm, config.d_model, config.norm_eps, config.bias
        )
        self.feed_forward = make_feed_forward(
            config.feed_forward, config.d_model, config.d_ff, config.bias
        )
        self.dropout = nn.Dropout(config.dropout)


class PostNormBlock(Block):
    """LayerNorm(x + Sublayer(x))   — Vaswani et al. 2017, section 3.1: normed after the sum.

    What leaves a block always has the same size, but the gradient must pass every norm on its way
    down, so deep stacks of these need a careful warm-up (Xiong et al. 2020).
    """

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map x (B, T, D), which continues what cache holds, to (B, T, D)."""
        x = self.attention_norm(x + self.dropout(self.attention(x, cache, self.layer)))
        x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x


class PreNormBlock(Block):
    """x + Sublayer(LayerNorm(x))   — Radford et al. 2019, section 2.3: parts read a normed copy.

    The sum itself is never touched, so a gradient reaches every block undamped. The stream grows
    with depth, which is why such a model ends with one more norm.
    """

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map x (B, T, D), which continues what cache holds, to (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cache, self.layer))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


class States(NamedTuple):
    """Positions to score, N of them: what `output.nats` takes."""

    hidden: Tensor
    """(N, D), the last hidden vectors, from which the output says what comes next"""
    targets: Tensor
    """(N,) int64, what did come"""
    copied: Copied | None
    """What the model's pointer says of the targets, if it has one"""


class MiniGPT(nn.Module):
    """A decoder-only Transformer: it reads ids from left to right and says what may come next.

    The paper's decoder without its cross attention (Liu et al. 2018, and GPT after them): there is
    no source to translate from, what came before is all that the model is given. As nothing looks
    ahead, one pass over T ids is T exercises at once, each with a context of its own length.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build the parts that config names, with fresh weights from PyTorch's generator.

        Raises UserError where config leaves the size of the vocabulary open.
        """
        super().__init__()
        config = config.resolved()
        self.config = config
        self.embedding = self._make_embedding()
        # Section 3.4: a table that scores words is small; beside sines, nobody would hear it.
        self.embedding_scale = math.sqrt(config.d_model) if config.position == "sinusoidal" else 1.0
        self.embedding_norm = (
            make_norm(config.norm, config.d_model, config.norm_eps, config.bias)
            if config.embedding_norm
            else nn.Identity()
        )
        self.token_shift = TokenShift(config.d_model) if config.token_shift else NoTokenShift()
        self.positions = self._make_positions()
        # One table of angles for all blocks: a position is the same in each of them.
        rotation = (
            Rotary(config.d_head, config.context_length, config.rope_base)
            if config.position == "rotary"
            else NoRotation()
        )
        block = PostNormBlock if config.norm_placement == "post" else PreNormBlock
        self.blocks = nn.ModuleList(block(config, rotation, i) for i in range(config.n_layers))
        # After post-norm blocks x is normed already; after pre-norm blocks it is a bare sum.
        self.norm = (
            make_norm(config.norm, config.d_model, config.norm_eps, config.bias)
            if config.norm_placement == "pre"
            else nn.Identity()
        )
        # Two masks a step, where `dropout` takes two a block and costs a sixth of the step.
        self.edge_dropout = nn.Dropout(config.edge_dropout)
        self.output = self._make_output()
        # Beside the output, not behind it: what it says of a word needs no row of any table.
        self.pointer = Pointer(config.d_model) if config.pointer else NoPointer()
        self._initialise()

    def _make_embedding(self) -> nn.Embedding | AdaptiveEmbedding:
        """Return a fresh table that turns ids (B, T) into vectors (B, T, D).

        Which kind depends on the output, so that the two can be tied.
        """
        config = self.config
        if config.output == "adaptive":
            return AdaptiveEmbedding(
                config.vocab_size, config.d_model, config.cutoffs, config.tail_divisor
            )
        return nn.Embedding(config.vocab_size, config.d_model)

    def _make_positions(self) -> nn.Module:
        """Return what is done to the embeddings: a vector added for each position, and dropout.

        Rotary positions add nothing here. They turn queries and keys, inside every block.
        """
        config = self.config
        if config.position == "sinusoidal":
            return PositionalEncoding(config.d_model, config.dropout, config.context_length)
        if config.position == "learned":
            return LearnedPositions(config.context_length, config.d_model, config.dropout)
        return NoPositions(config.dropout)

    def _make_output(self) -> FullSoftmax | AdaptiveSoftmax:
        """Return what scores words, with the input's own table (section 3.4) or one like it.

        Tied, a word is scored by how well the hidden vector agrees with the vector it is read as:
        V·D weights are saved, and every position teaches every row, not only those it reads.
        """
        tables = self.embedding if self.config.tie_embeddings else self._make_embedding()
        if isinstance(tables, AdaptiveEmbedding):
            return AdaptiveSoftmax(tables)
        if self.config.output == "sampled":
            return SampledSoftmax(
                tables.weight,
                bias=self.config.output_bias,
                n_frequent=self.config.n_frequent,
                n_sampled=self.config.n_sampled,
            )
        return FullSoftmax(tables.weight, bias=self.config.output_bias)

    def _initialise(self) -> None:
        """Give every matrix small random weights: GPT-2's (Radford et al. 2019, section 2.3).

        Standard deviation 0.02, and smaller by √(2L) where a matrix writes to the stream, to which
        2L parts add. Tables that are multiplied by √D (paper, section 3.4) begin at 1/√D instead;
        times √D that is 1, of the order of the sines (root mean square 1/√2).
        """
        # Parts that agree by chance alone add up as √(2L), which this takes out again.
        into_stream = 0.02 / math.sqrt(2 * self.config.n_layers)
        table_std = 1 / self.embedding_scale if self.embedding_scale != 1 else 0.02
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("attention.output.weight", "feed_forward.narrow.weight")):
                nn.init.normal_(parameter, std=into_stream)
            elif parameter.dim() == 2:
                is_table = name.startswith(("embedding", "output"))
                nn.init.normal_(parameter, std=table_std if is_table else 0.02)

    def hidden(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the last hidden vectors (B, T, D) of ids (B, T), which continue the cache.

        Without a cache they stand at positions 0 … T − 1; with one, behind those it holds, and it
        holds them too from then on. Raises UserError for more than context_length in all and for
        ids that are not (B, T).
        """
        if ids.dim() != 2:
            raise UserError(
                f"ids have shape {tuple(ids.shape)}: give (B, T), one text as ids[None]"
            )
        offset = cache.length if cache is not None else 0
        if offset + ids.size(1) > self.config.context_length:
            raise UserError(
                f"{offset + ids.size(1)} ids are more than context_length "
                f"{self.config.context_length}: give fewer"
            )
        embeddings: Tensor = self.embedding_norm(self.embedding(ids) * self.embedding_scale)
        # The word before the first one here: nothing where a text begins.
        x: Tensor = self.token_shift(embeddings, cache.newest if cache is not None else None)
        x = self.edge_dropout(self.positions(x, offset))
        for block in self.blocks:
            x = block(x, cache)  # (B, T, D)
        x = self.norm(x)
        # Only now: until the last block has stored its part, all must see the same length.
        if cache is not None:
            cache.advance(ids.size(1))
            # A copy, for a view would keep the embeddings of a whole prompt.
            cache.newest = embeddings[:, -1:].clone(memory_format=torch.contiguous_format)
            self.pointer.keep(x, ids, cache)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V): at each position, scores of every word for the next one.

        ids   (B, T) int64, T at most context_length. With the adaptive softmax or a pointer the
        scores are log-probabilities.
        """
        logits = self.logits(self.hidden(ids), ids)
        return logits

    def logits(
        self, hidden: Tensor, ids: Tensor, cache: KeyValueCache | None = None, last: int = 0
    ) -> Tensor:
        """Return the logits (B, T, V) behind ids (B, T), of which `hidden` made hidden (B, T, D).

        cache   the one that `hidden` was given
        last    how many positions to score, from the end; 0: all of them
        With a pointer the probabilities are mixed here, place by place and word by word: what the
        vocabulary says of all words, and what the places of the text have to offer.
        """
        logits = self.output(self.edge_dropout(hidden[:, -last:]))
        return self.pointer.mixed(logits, hidden, ids, cache)

    def states(self, ids: Tensor, targets: Tensor, skipped: int = 0) -> States:
        """Return what `output.nats` needs to say what targets (B, T), one on from ids, cost.

        skipped   positions at the begin of each text that are there to look back at only
        Training and every figure go this way, never by `logits`: of a mixture they need the
        target's part alone, which is three numbers a position where the logits are V.
        """
        hidden = self.hidden(ids)  # (B, T, D)
        copied: Copied | None = self.pointer.copied(hidden, ids, targets)  # (B, T) each
        if copied is not None:
            copied = Copied(*(part[:, skipped:].flatten() for part in copied))
        # Not for the pointer: two vectors with gaps in other places are less alike than they are.
        scored = self.edge_dropout(hidden[:, skipped:])
        return States(scored.flatten(0, 1), targets[:, skipped:].flatten(), copied)

    def next_logits(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits (B, V) of what follows ids (B, T), which continue what cache holds.

        The last position alone is scored: a text needs one next word, not T of them.
        """
        return self.logits(self.hidden(ids, cache), ids, cache, last=1)[:, 0]

    def new_cache(self, batch_size: int) -> KeyValueCache:
        """Return an empty cache for batch_size texts of up to context_length ids.

        Keys and values of each layer are (B, G, T, K), of the weights' precision and on their
        device.
        """
        config, like = self.config, next(self.parameters())
        shape = (batch_size, config.n_kv_heads, config.context_length, config.d_head)
        keys, values = ([like.new_zeros(shape) for _ in self.blocks] for _ in range(2))
        if not config.pointer:
            return KeyValueCache(keys, values)
        directions = like.new_zeros(batch_size, config.context_length, config.d_model)
        ids = like.new_zeros(batch_size, config.context_length, dtype=torch.int64)
        return PointerCache(keys, values, directions, ids)


class Objective(nn.Module):
    """What training makes small: the nats that the targets cost the model.

    A module of its own, because this is what gets compiled or spread over machines.
    """

    def __init__(self, model: MiniGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the nats of all targets, a scalar, and how many targets that were.

        ids, targets   (B, T) int64; targets[:, i] is the id that follows ids[:, i]
        """
        # The sum and the count, not the mean: sums of micro-batches add up to that of their batch.
        nats, _ = self.model.output.nats(*self.model.states(ids, targets))
        return nats, targets.numel()
