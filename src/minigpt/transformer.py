"""The whole Transformer of the paper: an encoder reads one sequence, a decoder writes another.

          source (B, S)                         target (B, T), begins with <bos>
              │  embedding · √D, positions          │  embedding · √D, positions
          x (B, S, D)                           x (B, T, D)
    ┌─────────┴─────────┐                 ┌─────────┴─────────┐
    │ encoder layer × L │                 │ decoder layer × L │
    │   self-attention  │◀ padding_mask   │   self-attention  │◀ look_ahead_mask
    │   feed forward    │                 │   cross-attention │◀ padding_mask of the source
    └─────────┬─────────┘                 │   feed forward    │
        memory (B, S, D) ── keys, values ▶└─────────┬─────────┘
                                                    │  output
                                             logits (B, T, V)

Mini-GPT (`model`) is the right half without its cross-attention. It shares equation 1, the
feed-forward network, the norm and the sines with this file; its attention, `CausalSelfAttention`,
which reads one sequence alone and has a cache, and its blocks are its own. Read in this order: what
stands around a sublayer, where the paper and GPT-2 differ (`PostNorm`, `PreNorm`); the two layers
and their stacks; who may see whom (`padding_mask`, `look_ahead_mask`); the model; what its training
takes, `label_smoothing_loss` and `paper_rate`; and how it writes, `greedy_decode` and
`beam_search`.

B batch · S source length · T target length · D d_model · V target vocabulary · L n_layers
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minigpt.config import NormPlacement
from minigpt.errors import require
from minigpt.layers.attention import MultiHeadAttention, causal_mask
from minigpt.layers.feed_forward import PositionwiseFeedForward
from minigpt.layers.norm import LayerNorm
from minigpt.layers.positions import PositionalEncoding

Sublayer = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """What stands around every sublayer: an addition, dropout and a norm (sections 3.1 and 5.4).

    A sublayer says what to change about x, and the addition keeps the rest: at the start, when it
    has learned nothing yet, words still get through. The two kinds differ in where the norm stands,
    so each has its own `forward`; dropout falls on what the sublayer adds, never on x itself.
    """

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm = LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)


class PostNorm(Residual):
    """LayerNorm(x + Dropout(Sublayer(x)))   — section 3.1: the paper norms the sum.

    Whatever leaves a sublayer then has the same size, however many came before it, so the next one,
    the memory and the output find vectors they can work with, and no norm is needed at the end. The
    price: on its way down the gradient passes every norm, and each divides it by the size of the
    sum, between 1.1 and 1.5 in a fresh base model. In a decoder the lowest layers hear least, the
    topmost most, and a full rate from the first step on throws them off (Xiong et al. 2020). The
    warm-up of `paper_rate` answers that.
    """

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """Add what sublayer makes of x (B, T, D), then normalise the sum."""
        x = self.norm(x + self.dropout(sublayer(x)))
        return x


class PreNorm(Residual):
    """x + Dropout(Sublayer(LayerNorm(x)))   — GPT-2 norms a copy (Radford et al. 2019, 2.3).

    So did the authors' own code soon after the paper. x is a bare sum from the embedding to the
    top, which a gradient runs down undamped: deep stacks learn, with little warm-up or none. The
    price: the sum grows with every layer, so that each weighs less in it than the one before, and
    whoever reads it must norm it first. That is why a stack of these ends with one more norm.
    """

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """Add what sublayer makes of the normalised x (B, T, D)."""
        x = x + self.dropout(sublayer(self.norm(x)))
        return x


def make_residuals(kind: NormPlacement, n: int, d_model: int, dropout: float) -> nn.ModuleList:
    """Return n residuals of one kind, a sublayer each. UserError for a kind that is none."""
    kinds: dict[str, type[Residual]] = {"post": PostNorm, "pre": PreNorm}
    require(kind in kinds, f"norm_placement is {kind}: take post or pre")
    return nn.ModuleList(kinds[kind](d_model, dropout) for _ in range(n))


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network (section 3.1, left half of figure 1).

    The attention carries, the feed-forward network digests: only in the first do positions meet,
    only in the second is anything but a weighted mean made of what they found. Each position may
    look at all of the source, to its left and to its right; Mini-GPT's may not.
    """

    def __init__(
        self,
        d_model: int = 512,
        n_heads: int = 8,
        d_ff: int = 2_048,
        dropout: float = 0.1,
        norm_placement: NormPlacement = "post",
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.residuals = make_residuals(norm_placement, 2, d_model, dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (B, S, D) to (B, S, D); mask (B, S or 1, S) is 0 where a position is hidden."""
        around_attention, around_feed_forward = self.residuals
        x = around_attention(x, lambda x: self.self_attention(x, x, x, mask)[0])
        x = around_feed_forward(x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory, feed-forward network (section 3.1, right half).

    Section 3.2.3 names three uses of attention, and here are the other two. In self-attention a
    position asks what was written so far, and later words are hidden from it. In cross-attention
    the queries come from the decoder, keys and values from the encoder: a position asks the source
    what it needs to know for the next word. It is the only place where the two sequences meet.
    """

    def __init__(
        self,
        d_model: int = 512,
        n_heads: int = 8,
        d_ff: int = 2_048,
        dropout: float = 0.1,
        norm_placement: NormPlacement = "post",
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.cross_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
        self.residuals = make_residuals(norm_placement, 3, d_model, dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, T, D) to (B, T, D). In both masks 0 hides a position.

        memory   (B, S, D), from the encoder
        source_mask   (B, T or 1, S): which of the memory may be looked at
        target_mask   (B, T, T): which of x may be looked at
        """
        around_self, around_cross, around_feed_forward = self.residuals
        x = around_self(x, lambda x: self.self_attention(x, x, x, target_mask)[0])
        # Never normed here, in either kind: the memory left the encoder's stack normed already.
        x = around_cross(x, lambda x: self.cross_attention(x, memory, memory, source_mask)[0])
        x = around_feed_forward(x, self.feed_forward)
        return x


class Encoder(nn.Module):
    """Encoder layers, one upon the other; the paper has six."""

    def __init__(self, layers: list[EncoderLayer], norm: nn.Module) -> None:
        """Stack layers; norm ends the stack, for whatever reads the sum of pre-norm layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (B, S, D) to the memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return x


class Decoder(nn.Module):
    """Decoder layers, one upon the other; all of them attend to the same memory.

    Not to the encoder layer of their own height: the decoder starts when the encoder has finished,
    and even its first layer may use the best that is known of the source.
    """

    def __init__(self, layers: list[DecoderLayer], norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, T, D), in view of memory (B, S, D), to (B, T, D)."""
        for layer in self.layers:
            x = layer(x, memory, source_mask, target_mask)
        x = self.norm(x)
        return x


def padding_mask(ids: Tensor, pad_id: int) -> Tensor:
    """Return which of ids (B, S) may be looked at, (B, 1, S) bool: all that is not padding.

    Sentences of a batch are filled up to the longest. With the filling hidden, in the encoder's
    self-attention and in the cross-attention alike, a sentence means the same in any company. More
    is not hidden: the source is known from end to end before the first word is written.

    Padding is hidden as a key only. It still asks, as a query, and gets a vector like any other;
    but nobody looks at that vector, and the loss does not count it.
    """
    return (ids != pad_id).unsqueeze(1)


def look_ahead_mask(ids: Tensor, pad_id: int) -> Tensor:
    """Return what each of ids (B, T) may look at, (B, T, T) bool: no padding and nothing later.

    Training shows the decoder the whole target at once, and position i, where ids[i] stands, is
    asked for ids[i + 1], which it could copy. In decoding the later words do not exist yet; the
    mask stays, so that each position computes there what it computed in training.

    A word always sees itself, which is no cheating: what is asked for is the word after it (the
    paper's outputs are "shifted right", by `<bos>` in front). Padding stands at the end, where no
    word looks anyway; the mask says so too, for targets that are padded in front.
    """
    return padding_mask(ids, pad_id) & causal_mask(ids.size(1), ids.size(1), ids.device)


def _require_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise UserError unless ids is (B, T) int64, not empty, within the vocabulary.

    The table would refuse an id outside, too, but on a GPU by killing the whole process, and in
    neither place would it say which of the two sequences has it. Compiled code checks no values:
    what it does next must not depend on them.
    """
    require(
        ids.dim() == 2 and ids.dtype == torch.int64 and ids.numel() > 0,
        f"{name} is {ids.dtype} of shape {tuple(ids.shape)}: give ids (B, length) of type "
        "torch.int64, at least one a row",
    )
    if torch.compiler.is_compiling():
        return
    low, high = torch.stack(ids.aminmax()).tolist()  # one wait for the device, not two
    require(
        low >= 0 and high < vocab_size,
        f"{name} has the id {low if low < 0 else high}: its vocabulary goes from 0 to "
        f"{vocab_size - 1}",
    )


class Transformer(nn.Module):
    """Encoder and decoder, with embeddings before and the map to words behind (figure 1).

    `forward` is for training, where the target is known. `encode` and `decode` are its two halves
    for writing, where the target grows by a word at a time and the source stays as it is.
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        d_model: int = 512,
        n_heads: int = 8,
        n_layers: int = 6,
        d_ff: int = 2_048,
        dropout: float = 0.1,
        *,
        max_len: int = 5_000,
        pad_id: int = 1,
        norm_placement: NormPlacement = "post",
        share_embeddings: bool = False,
    ) -> None:
        """Build the base model of the paper's table 3, or another by its sizes.

        max_len   positions the table of sines starts with; it grows by itself
        pad_id    the id of `<pad>`, which nobody looks at
        share_embeddings   one table for source, target and output, as in section 3.4. All three or
            none: they had one vocabulary for both languages (section 5.1), of pieces of words that
            often are the same in both. Two vocabularies number their words differently and have
            nothing to share, so that is an error.

        Raises UserError for sizes that do not fit together.
        """
        super().__init__()
        sizes = {"d_model": d_model, "n_heads": n_heads, "n_layers": n_layers, "d_ff": d_ff}
        for name, size in (*sizes.items(), ("max_len", max_len)):
            require(size >= 1, f"{name} is {size}: it must be at least 1")
        require(
            0 <= pad_id < min(source_vocab_size, target_vocab_size),
            f"pad_id is {pad_id}: it must be an id of both vocabularies, which have "
            f"{source_vocab_size} and {target_vocab_size} entries",
        )
        require(
            not share_embeddings or source_vocab_size == target_vocab_size,
            f"share_embeddings needs one vocabulary: source_vocab_size is {source_vocab_size}, "
            f"target_vocab_size {target_vocab_size}",
        )
        self.pad_id, self.d_model = pad_id, d_model
        self.source_embedding = nn.Embedding(source_vocab_size, d_model)
        self.target_embedding = nn.Embedding(target_vocab_size, d_model)
        self.positions = PositionalEncoding(d_model, dropout, max_len)
        layer = (d_model, n_heads, d_ff, dropout, norm_placement)
        norms = [LayerNorm(d_model) if norm_placement == "pre" else nn.Identity() for _ in range(2)]
        self.encoder = Encoder([EncoderLayer(*layer) for _ in range(n_layers)], norms[0])
        self.decoder = Decoder([DecoderLayer(*layer) for _ in range(n_layers)], norms[1])
        self.output = nn.Linear(d_model, target_vocab_size)
        # Shared, a word is scored by how well it agrees with the vector that it is read as.
        if share_embeddings:
            self.target_embedding = self.source_embedding
            self.output.weight = self.source_embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        """Draw fresh weights; the paper does not say how, and its authors' code much like this.

        Matrices keep the variance of what passes them, in both directions on average (Glorot and
        Bengio 2010, equation 16). Tables get standard deviation 1/√D; times √D that is 1, of the
        order of the sines (root mean square 1/√2). An output that shares no table is drawn like any
        other matrix here, and like a table there.
        """
        for name, parameter in self.named_parameters():
            if "embedding" in name:
                nn.init.normal_(parameter, std=self.d_model**-0.5)
            elif parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def _embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Look up ids (B, T), scale by √D (section 3.4), add positions (3.5): (B, T, D).

        A table that also scores words wants rows of length 1, or its logits of D terms grow too
        large. √D makes entries of size 1 of those rows, so that beside the sines they are heard.
        """
        x: Tensor = self.positions(embedding(ids) * math.sqrt(self.d_model))
        return x

    def encode(self, source: Tensor) -> Tensor:
        """Return the memory (B, S, D) of source (B, S) int64.

        A row of padding alone is allowed: nothing is looked at, and the decoder has only its own
        words to go by. Raises UserError for an id outside the vocabulary and for an empty source.
        """
        _require_ids("source", source, self.source_embedding.num_embeddings)
        x = self._embed(self.source_embedding, source)
        memory: Tensor = self.encoder(x, padding_mask(source, self.pad_id))
        return memory

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Return logits (B, T, V) for target (B, T), given the memory (B, S, D) of source (B, S).

        source tells only which of the memory is padding. Whoever writes word by word makes the
        memory once and comes back here for each word with a longer target.

        Raises UserError as `encode` does, and where the three do not belong together.
        """
        _require_ids("target", target, self.target_embedding.num_embeddings)
        require(
            target.size(0) == source.size(0) and memory.shape[:2] == source.shape,
            f"target, memory and source are of shapes {tuple(target.shape)}, "
            f"{tuple(memory.shape)} and {tuple(source.shape)}: give a target for each source, "
            "and the memory of this source",
        )
        x = self._embed(self.target_embedding, target)
        x = self.decoder(
            x, memory, padding_mask(source, self.pad_id), look_ahead_mask(target, self.pad_id)
        )
        logits: Tensor = self.output(x)
        return logits

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (B, T, V): at each position of target, scores for the word after it.

        source (B, S), target (B, T) int64. "Outputs (shifted right)" in figure 1 means that target
        begins with `<bos>`: the target of a sentence is its ids without the last one, and what the
        loss compares with is its ids without the first.
        """
        return self.decode(target, self.encode(source), source)


def label_smoothing_loss(
    logits: Tensor, targets: Tensor, smoothing: float = 0.1, pad_id: int = 1
) -> Tensor:
    """Return the mean nats of targets, a share ε of which is spread over all words (section 5.4).

    (1 − ε) · (−log p(target)) + ε · the mean over V of −log p. Being surer than 1 − ε + ε/V costs
    more than it gains: perplexity suffers, translations gain (Szegedy et al. 2016, section 7).

    logits   (B, T, V) or (…, V)    targets   (B, T) or (…) int64; padding does not count
    smoothing   ε. The whole vocabulary shares it, the target too, as PyTorch's cross_entropy has it
    Returns a scalar, 0 where every target is padding. Raises UserError for targets that do not fit.
    """
    require(0 <= smoothing <= 1, f"smoothing is {smoothing}: it must lie between 0 and 1")
    require(
        logits.shape[:-1] == targets.shape,
        f"logits are of shape {tuple(logits.shape)}, targets {tuple(targets.shape)}: "
        "give a row of logits for each target",
    )
    counts = targets != pad_id  # (B, T): the mask of the loss
    # pad_id need not be in the vocabulary: any other id stands in where nothing counts.
    targets = targets.masked_fill(~counts, 0)
    _require_ids("targets", targets.reshape(1, -1), logits.size(-1))
    log_probs = logits.log_softmax(dim=-1)
    nats_of_target = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (B, T)
    nats = (1 - smoothing) * nats_of_target
    # Where a word is impossible the mean is infinite, and a share of 0 of it no number at all.
    if smoothing > 0:
        nats = nats - smoothing * log_probs.mean(dim=-1)
    return nats.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1)


def paper_rate(step: int, d_model: int = 512, warmup_steps: int = 4_000) -> float:
    """Return the learning rate of a step, counted from 1   — section 5.3, equation 3.

    d_model^−0.5 · min(step^−0.5, step · warmup_steps^−1.5): up in a straight line, then down as one
    over the root of the step. The rise is what post-norm layers need (`PostNorm`), and Adam too: it
    divides by a mean of squares that few steps have gone into yet.
    """
    require(step >= 1, f"step is {step}: steps are counted from 1")
    require(
        d_model >= 1 and warmup_steps >= 1,
        f"d_model is {d_model} and warmup_steps {warmup_steps}: both must be at least 1",
    )
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


@contextmanager
def _not_learning(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off inside the `with`; then each part has its mode again."""
    # Part by part: whoever trains a decoder on a frozen encoder has that one in the other mode.
    training = [part for part in model.modules() if part.training]
    model.eval()
    # Put back even where an error leaves the `with`: a training loop may catch it and go on.
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def _most_words(model: Transformer, source: Tensor, eos_id: int, max_len: int | None) -> int:
    """Return how many words may be written: max_len, or the paper's "input length + 50"."""
    # With an end that can never come, every output would silently have the greatest length.
    require(
        0 <= eos_id < model.output.out_features and eos_id != model.pad_id,
        f"eos_id is {eos_id}: it must be an id of the target vocabulary, other than pad_id",
    )
    require(max_len is None or max_len >= 1, f"max_len is {max_len}: it must be at least 1")
    n_words = (source != model.pad_id).sum(dim=1)  # (B,), without the padding
    return int(n_words.max()) + 50 if max_len is None else max_len


def _next_log_probs(model: Transformer, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
    """Return log P (B, V) of the word that follows target (B, T).

    All of target is read again for each word, since it shows the equation plainly; Mini-GPT has a
    `KeyValueCache` instead, and the same could be had here.
    """
    logits = model.decode(target, memory, source)[:, -1].float()  # (B, V)
    # In half precision log-probabilities near -9 tie by the dozen, and sums of them drift.
    log_probs = logits.log_softmax(dim=-1)
    # A word that was given -inf is banned, and log P says so; NaN means that no word is known.
    require(
        not log_probs.isnan().any(),
        "the model's logits are not finite: its training has diverged, train it at a lower rate",
    )
    # Padding says that nothing stands here. Written as a word it would be hidden from the next.
    log_probs[:, model.pad_id] = -math.inf
    return log_probs


def greedy_decode(
    model: Transformer, source: Tensor, bos_id: int, eos_id: int, max_len: int | None = None
) -> Tensor:
    """Return, for source (B, S), the likeliest next word again and again: (B, at most max_len).

    The start, `<bos>`, is not returned. A row ends with `<eos>` and goes on with padding until the
    last has ended. Dropout is off meanwhile, whatever mode the model is in.

    max_len   None: as many words as the longest source has, and 50 more (section 6.1)
    Raises UserError for ids outside their vocabulary and for max_len below 1.
    """
    with _not_learning(model):
        memory = model.encode(source)
        target = source.new_full((source.size(0), 1), bos_id)
        ended = torch.zeros_like(source[:, 0], dtype=torch.bool)  # (B,)
        for _ in range(_most_words(model, source, eos_id, max_len)):
            next_ids = _next_log_probs(model, target, memory, source).argmax(dim=-1)  # (B,)
            next_ids = next_ids.masked_fill(ended, model.pad_id)
            target = torch.cat((target, next_ids.unsqueeze(1)), dim=1)  # (B, T + 1)
            ended |= next_ids == eos_id
            if ended.all():
                break
    return target[:, 1:]


def beam_search(
    model: Transformer,
    source: Tensor,
    bos_id: int,
    eos_id: int,
    max_len: int | None = None,
    *,
    n_beams: int = 4,
    length_penalty: float = 0.6,
) -> list[tuple[list[int], float]]:
    """Return the n_beams best outputs for source (1, S), each with its score (section 6.1).

    The likeliest first word need not begin the likeliest sentence. So the n_beams likeliest
    beginnings are kept at each step, until as many have ended: "terminate early when possible".
    With one beam this is `greedy_decode`; with as many as there are sentences it misses none.

    A score is log P / lp(n), lp(n) = ((5 + n) / 6)^α, with α = length_penalty and n words, `<eos>`
    among them (Wu et al. 2016, equation 14). Every word makes log P smaller, so without it, at
    α = 0, short outputs would win. Neither `<bos>` nor `<eos>` is returned. Best first; what did
    not end within max_len stands behind all that did.

    max_len   None: as many words as the source has, and 50 more
    Raises UserError as `greedy_decode` does, and for n_beams below 1 and more than one source.
    """
    require(n_beams >= 1, f"n_beams is {n_beams}: it must be at least 1")
    require(length_penalty >= 0, f"length_penalty is {length_penalty}: it must be at least 0")
    require(
        source.dim() == 2 and source.size(0) == 1,
        f"source is of shape {tuple(source.shape)}: beam_search takes one sequence, (1, S)",
    )

    def score(ids: list[int], log_p: float) -> float:
        n_words = len(ids) - 1  # <bos> was given, not written
        return float(log_p / ((5 + n_words) / 6) ** length_penalty)

    running: list[tuple[list[int], float]] = [([bos_id], 0.0)]  # beginnings and their log P
    ended: list[tuple[list[int], float]] = []  # outputs and their scores
    with _not_learning(model):
        memory = model.encode(source)
        for _ in range(_most_words(model, source, eos_id, max_len)):
            n = len(running)
            target = source.new_tensor([ids for ids, _ in running])  # (n, T)
            log_probs = _next_log_probs(
                model, target, memory.expand(n, -1, -1), source.expand(n, -1)
            )
            # log P of a beginning and one more word is the sum of both, for all V words at once.
            totals = log_probs + log_probs.new_tensor([[log_p] for _, log_p in running])  # (n, V)
            # Twice as many as are kept, since up to n_beams of them may end here.
            best = totals.flatten().topk(min(2 * n_beams, totals.numel()))
            candidates = [
                ([*running[i // totals.size(1)][0], i % totals.size(1)], log_p)
                for i, log_p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                if log_p > -math.inf
            ]
            for ids, log_p in candidates[:n_beams]:
                if ids[-1] == eos_id:
                    ended.append((ids[1:-1], score(ids, log_p)))
            running = [(ids, log_p) for ids, log_p in candidates if ids[-1] != eos_id][:n_beams]
            if len(ended) >= n_beams or not running:
                break
    cut = [(ids[1:], score(ids, log_p)) for ids, log_p in running]
    ended.sort(key=lambda output: -output[1])
    return (ended + sorted(cut, key=lambda output: -output[1]))[:n_beams]
