"""Output: from the last hidden vectors to the probability of every word, or to the loss.

In: hidden (…, D), and targets (…) when the loss is wanted.
Out: logits (…, V), or the nats that the targets cost.

Three ways, all exact probabilities over the whole vocabulary. `FullSoftmax` scores all V words.
`SampledSoftmax` does too, but estimates the loss of training from the frequent words and a sample
of the rest. `AdaptiveSoftmax` scores the frequent words and one entry for each cluster of rarer
ones; for the loss it looks into a cluster only where the target lies there. Either is a fraction of
the work on WikiText-2.

The (B·T, V) matrix of logits would be the largest thing in memory by far (4,096 positions × 33,278
words are 545 MB, and as much again for its gradient), so the loss is worked off in chunks of rows.

B batch · T sequence · N rows, B·T of them in training · D d_model · V vocabulary
C candidates, the words that a sampled softmax scores
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.layers.pointer import Copied

# 2 M float32 logits are 8 MB: a chunk and its gradient stay in a processor's last cache.
LOGITS_PER_CHUNK = 2_097_152


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Return the precision of matrix products here: autocast's where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of hidden @ weightᵀ + bias, with its gradient made in the same pass, in chunks.

    The gradient of a row's logits is softmax − one-hot. With it at hand in the forward pass, the
    logits need neither be kept for the backward pass nor be computed twice. The price is that the
    gradient itself cannot be differentiated.

    With what a pointer says of a target, its probability is a mixture, g softmax + chance. Its
    logarithm has the gradient of log softmax times the share of the mixture that is softmax's.

    hidden (N, D)    weight (V, D)    bias (V,) or None    targets (N,)
    log_gate, chance   (N,) each, the log of g and the pointer's chance; both or neither
    dtype              of the matrix products; sums, softmax and nats are float32
    needs_grad         whether to make the gradients at all
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_gate: Tensor | None,
        chance: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        row_nats = torch.empty(hidden.size(0), device=hidden.device, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        grad_bias = torch.zeros_like(bias) if needs_grad and bias is not None else None
        share = torch.ones_like(row_nats)  # of each mixture that is softmax's
        states, table = hidden.to(dtype), weight.to(dtype)
        n_rows = max(1, LOGITS_PER_CHUNK // weight.size(0))
        for start in range(0, hidden.size(0), n_rows):
            rows = slice(start, start + n_rows)
            state, target = states[rows], targets[rows, None]  # (n_rows, D), (n_rows, 1)
            logits = (state @ table.T).float()  # (n_rows, V)
            if bias is not None:
                logits += bias
            log_probs = logits.log_softmax(dim=-1)  # (n_rows, V)
            row_nats[rows] = -log_probs.gather(1, target).squeeze(1)
            if log_gate is not None and chance is not None:
                log_vocabulary = log_gate[rows] - row_nats[rows]
                row_nats[rows] = -torch.logaddexp(log_vocabulary, chance[rows].log())
                share[rows] = (log_vocabulary + row_nats[rows]).exp()
                state = state * share[rows, None].to(dtype)
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = log_probs.exp_()  # in place: these are the bytes that count
                grad_logits.scatter_add_(
                    1, target, grad_logits.new_full((1, 1), -1.0).expand_as(target)
                )
                if grad_bias is not None:
                    grad_bias += share[rows] @ grad_logits
                grad_logits = grad_logits.to(dtype)
                # Rows of the gradient times their share: cheaper here than where they are V wide.
                grad_hidden[rows] = (grad_logits @ table).to(hidden.dtype) * share[rows, None]
                grad_weight += grad_logits.T @ state
        if needs_grad:
            # d(−log p) / d(log g) and d(−log p) / d(chance), p = exp(−nats). Past 80 nats 1 / p
            # would soon be infinite, and NaN where it meets a place that offers something else.
            grad_log_gate = None if log_gate is None else -share
            grad_chance = None if chance is None else -row_nats.clamp(max=80).exp()
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, grad_log_gate, grad_chance)
        ctx.mark_non_differentiable(row_nats)
        return row_nats.sum(), row_nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_nats: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # grad_nats is a scalar: 1 over what the sum of the nats was divided by.
        grads = [None if grad is None else grad * grad_nats for grad in ctx.saved_tensors]
        return *grads, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    copied: Copied | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the nats of all targets (a scalar, with a gradient) and of each one (N,), without.

    hidden (N, D)    weight (V, D)    targets (N,) int64    bias (V,)
    copied   what a pointer says of the targets, (N,) each
    −log softmax(hidden weightᵀ + bias)[target], or −log (g softmax(…)[target] + chance) beside a
    pointer, at most LOGITS_PER_CHUNK logits in memory at a time.
    """
    apply = cast(Any, _LinearCrossEntropy.apply)
    learnt = (hidden, weight, bias, *(copied or (None, None)))
    # Asked here: inside, gradients are off and the table is a parameter even under no_grad.
    learns = any(part is not None and part.requires_grad for part in learnt)
    needs_grad = torch.is_grad_enabled() and learns
    total, row_nats = apply(*learnt, targets, _matmul_dtype(hidden), needs_grad)
    return total, row_nats


class FullSoftmax(nn.Module):
    """A score for every word: its row of the table, times the hidden vector."""

    def __init__(self, table: Tensor, *, bias: bool = False) -> None:
        """Take the table (V, D); the model's own input table ties the two (section 3.4).

        bias   add a number to each word's score, which says how frequent it is by itself
        """
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(table.size(0))) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) for hidden (…, D)."""
        return F.linear(hidden, self.table, self.bias)

    def nats(
        self, hidden: Tensor, targets: Tensor, copied: Copied | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `linear_cross_entropy` does, for hidden (N, D) and targets (N,)."""
        return linear_cross_entropy(hidden, self.table, targets, self.bias, copied)


class SampledSoftmax(FullSoftmax):
    """A full softmax whose training loss is estimated from some of the words (Jean et al. 2015).

    The candidates of a batch are the frequent words, the batch's own targets and a few of the rest,
    drawn at random. A word that is one with probability π counts 1/π times, so its score gains
    −log π: the logQ correction (Bengio and Senécal 2008), under which the loss is least where the
    full softmax's is, if targets are independent draws. They are not: a rare word that the window
    has said before is a candidate for certain, and is made a little too unlikely.

    In evaluation all V words are scored, and the weights are a full softmax's.

    Expects ids by falling frequency, as Zipf's law has them: word i has the share
    log((i + 2) / (i + 1)) / log(V + 1) of a text. That is near enough to reckon π by.
    """

    def __init__(self, table: Tensor, *, bias: bool, n_frequent: int, n_sampled: int) -> None:
        """Score ids below n_frequent always, and n_sampled draws from the others."""
        super().__init__(table, bias=bias)
        self.n_frequent = min(n_frequent, table.size(0))
        self.n_sampled = n_sampled

    def nats(
        self, hidden: Tensor, targets: Tensor, copied: Copied | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `FullSoftmax.nats` does; while gradients are wanted in training, estimates.

        hidden (N, D)    targets (N,)    copied (N,) each
        """
        if not (self.training and torch.is_grad_enabled()):
            return super().nats(hidden, targets, copied)
        candidates, places = self._candidates(targets)
        table = self.table.index_select(0, candidates)  # (C, D)
        correction = -self._log_inclusion(len(targets), candidates)
        if self.bias is not None:
            correction = correction + self.bias[candidates]
        return linear_cross_entropy(hidden, table, places, correction, copied)

    def _candidates(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids to score (C,), ascending, and the place among them of each target (N,)."""
        n_words, device = self.table.size(0), self.table.device
        chosen = torch.zeros(n_words, dtype=torch.bool, device=device)
        chosen[: self.n_frequent] = True
        chosen[targets] = True
        if self.n_frequent < n_words:
            drawn = torch.randint(self.n_frequent, n_words, (self.n_sampled,), device=device)
            chosen[drawn] = True
        candidates = chosen.nonzero().squeeze(1)
        # How many candidates come before an id is where it stands among them.
        places = chosen.cumsum(dim=0)[targets] - 1
        return candidates, places

    def _log_inclusion(self, n_targets: int, candidates: Tensor) -> Tensor:
        """Return log π (C,), which is 0 for the frequent words.

        A word stays out only if every draw misses it, and no target is that word.
        """
        n_words, ids = self.table.size(0), candidates.cpu().double()  # no float64 on a Mac's GPU
        share = torch.log1p(1 / (ids + 1)) / math.log(n_words + 1)
        missed = (1 - share) ** n_targets
        if self.n_frequent < n_words:
            missed *= (1 - 1 / (n_words - self.n_frequent)) ** self.n_sampled
        log_inclusion = torch.log1p(-missed).masked_fill(ids < self.n_frequent, 0.0)
        return log_inclusion.float().to(candidates.device)


class AdaptiveEmbedding(nn.Module):
    """A table for each cluster of words, the rarer its words the narrower, widened to D.

    Baevski and Auli 2018, section 3. Expects ids by falling frequency. Ids below the first cut-off
    have full width; a word seen three times in all cannot fill D numbers anyway.
    """

    def __init__(self, vocab_size: int, d_model: int, cutoffs: Sequence[int], divisor: int) -> None:
        super().__init__()
        self.bounds = (0, *cutoffs, vocab_size)  # cluster i has the ids bounds[i] … bounds[i+1] − 1
        sizes = [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]
        widths = [max(1, d_model // divisor**i) for i in range(len(sizes))]
        self.d_model = d_model
        self.tables = nn.ParameterList(
            torch.empty(size, width) for size, width in zip(sizes, widths, strict=True)
        )
        self.projections = nn.ModuleList(
            nn.Linear(width, d_model, bias=False) for width in widths[1:]
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (…, D) of ids (…)."""
        flat = ids.flatten()  # (N,)
        # A rare id reads some frequent word's vector first; the loop puts its own in the place.
        vectors = F.embedding(flat.clamp(max=self.bounds[1] - 1), self.tables[0])  # (N, D)
        for i, projection in enumerate(self.projections, start=1):
            start, end = self.bounds[i], self.bounds[i + 1]
            rows = ((flat >= start) & (flat < end)).nonzero().squeeze(1)
            rare = projection(F.embedding(flat[rows] - start, self.tables[i]))
            vectors = vectors.index_copy(0, rows, rare.to(vectors.dtype))
        return vectors.view(*ids.shape, self.d_model)


class AdaptiveSoftmax(nn.Module):
    """P(word) = P(its cluster) · P(word within the cluster)   — Grave et al. 2017, section 4.

    Exact and normalised: the probabilities of all V words sum to 1. On WikiText-2 the 2,000 most
    frequent words are 77 % of the text, so most rows stop after the first, small softmax.
    """

    def __init__(self, embedding: AdaptiveEmbedding) -> None:
        """Take the tables to score with; those of the model's input tie the two.

        Only the tables: a projection that widens is of no use here.
        """
        super().__init__()
        self.tables, self.bounds = embedding.tables, embedding.bounds
        n_clusters = len(self.tables) - 1
        self.clusters = nn.Parameter(torch.zeros(n_clusters, embedding.d_model))
        self.projections = nn.ModuleList(
            nn.Linear(embedding.d_model, table.size(1), bias=False)
            for table in list(self.tables)[1:]
        )

    def _head(self) -> Tensor:
        """The rows of the frequent words, then one row a cluster: (cutoff + clusters, D)."""
        return torch.cat((self.tables[0], self.clusters))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities (…, V) for hidden (…, D). As logits they are as good as any."""
        first = self.bounds[1]
        head = F.linear(hidden, self._head()).float().log_softmax(dim=-1)  # (…, cutoff + clusters)
        parts = [head[..., :first]]
        for i, projection in enumerate(self.projections):
            tail = F.linear(projection(hidden), self.tables[i + 1])
            # log P(word) = log P(word within the cluster) + log P(the cluster)
            parts.append(tail.float().log_softmax(dim=-1) + head[..., first + i, None])
        return torch.cat(parts, dim=-1)

    def nats(
        self, hidden: Tensor, targets: Tensor, copied: Copied | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `FullSoftmax.nats` does, for hidden (N, D) and targets (N,).

        Every row is scored once in the head, where a rare target stands for its cluster; the rows
        of rare targets once more within it. The nats add up, as the probabilities multiply.
        """
        assert copied is None, "a product of two softmaxes is mixed with no pointer: see the config"
        bounds = self.bounds
        head_targets = targets.clone()  # (N,)
        for i in range(len(self.projections)):
            head_targets[targets >= bounds[i + 1]] = bounds[1] + i
        total, row_nats = linear_cross_entropy(hidden, self._head(), head_targets)
        for i, projection in enumerate(self.projections, start=1):
            rows = ((targets >= bounds[i]) & (targets < bounds[i + 1])).nonzero().squeeze(1)
            inner = projection(hidden[rows])  # (rows, width of the cluster)
            tail, tail_nats = linear_cross_entropy(inner, self.tables[i], targets[rows] - bounds[i])
            total = total + tail
            row_nats = row_nats.index_add(0, rows, tail_nats)
        return total, row_nats
