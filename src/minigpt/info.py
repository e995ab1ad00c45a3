"""What a model costs, before or after it is trained.

In: a `Config` and the size of its vocabulary, or a run's report. Out: `Sizes`, and either as rows
of a table.

Costs are counted from the real model on PyTorch's meta device, where tensors have a shape but no
numbers: it takes no memory and no time, and cannot drift from the code.

B batch · T context_length · D d_model · H heads · K d_head · F d_ff · V vocabulary · L layers
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minigpt.config import Config, TokenizerConfig
from minigpt.layers.attention import KeyValueCache
from minigpt.model import MiniGPT
from minigpt.optim import hidden_matrices
from minigpt.output import LOGITS_PER_CHUNK, AdaptiveSoftmax, SampledSoftmax

BYTES_PER_NUMBER = 4  # weights, gradients and optimizer states are float32

# Entries of the tokenizers that keep every word, on WikiText-2: what --plan assumes.
_EVERY_WORD = {"wikitext": 33_278, "basic_english": 28_785}
_EVERY_CHARACTER = 1_300  # the characters of WikiText-2 and 256 bytes, roughly


@dataclass(frozen=True)
class Sizes:
    """The costs of one model. FLOPs count a multiplication and an addition as two."""

    vocab_size: int
    parts: dict[str, int]
    """Parameters by part: word tables, positions, token shift, attention, feed-forward, norms,
    pointer, output."""
    n_parameters: int
    """All of them, a tied table counted once."""
    n_embedding: int
    """Those of word tables, in and out, and of learned positions."""
    forward_flops: float
    """FLOPs to read one token at full context."""
    training_flops: float
    """FLOPs of one token in training: forward, and twice as much backward."""
    training_bytes: dict[str, int]
    """Memory of a training step: weights, gradients, optimizer, activations (an estimate)."""
    cache_bytes: int
    """Keys and values of one text that fills the context, and what a pointer keeps of it."""

    @property
    def n_non_embedding(self) -> int:
        """Parameters apart from tables: the N of the scaling laws (Kaplan et al. 2020)."""
        return self.n_parameters - self.n_embedding


def planned_vocab_size(tokenizer: TokenizerConfig, vocab_size: int = 0) -> int:
    """Return the entries that a tokenizer will have, as far as that is known before it is trained.

    vocab_size   the model's own setting, which wins
    """
    size = vocab_size or tokenizer.vocab_size
    return size or _EVERY_WORD.get(tokenizer.kind, _EVERY_CHARACTER)


def sizes(config: Config, vocab_size: int) -> Sizes:
    """Return the costs of the model that config describes, with vocab_size entries."""
    resolved = config.model.resolved(vocab_size)
    with torch.device("meta"):
        model = MiniGPT(resolved)
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part_of(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    n_parameters = sum(parts.values())
    n_targets = config.batch_size // config.accumulation * resolved.context_length
    forward = _forward_flops(model, n_targets)
    return Sizes(
        vocab_size=vocab_size,
        parts=parts,
        n_parameters=n_parameters,
        n_embedding=parts.get("word tables", 0) + parts.get("positions", 0),
        forward_flops=forward,
        # Backward needs the gradient of both factors of each product: two products for one.
        training_flops=3 * forward,
        training_bytes=_training_bytes(model, config, n_parameters),
        cache_bytes=_cache_bytes(model.new_cache(1)),
    )


def _cache_bytes(cache: KeyValueCache) -> int:
    held = (value if isinstance(value, list) else [value] for value in vars(cache).values())
    return sum(part.nbytes for parts in held for part in parts if isinstance(part, Tensor))


def _part_of(name: str) -> str:
    """Return the part that a parameter belongs to, by its name in the model."""
    if "norm" in name.split(".")[-2:][0]:
        return "norms"
    if name.startswith("blocks."):
        return "attention" if ".attention." in name else "feed-forward"
    for part in ("positions", "token_shift", "pointer"):
        if name.startswith(f"{part}."):
            return part.replace("_", " ")
    if "table" in name or name == "embedding.weight":
        return "word tables"
    return "output"  # of the adaptive softmax: projections and the rows that name clusters


def _forward_flops(model: MiniGPT, n_targets: int) -> float:
    """Return the FLOPs of one token: 2 per weight it meets, and what attention adds.

    blocks      2 · (their matrices)
    attention   2 · L · H · K · (T + 1): scores and mixing are 2 H K FLOPs each per visible
                position, of which there are (T + 1) / 2 on average
    output      2 · D · V, or the expected share of it under the adaptive softmax, and under the
                sampled one in training on n_targets at once
    pointer     D · (T − 1): a cosine for each earlier place
    """
    config = model.config
    matrices = 2.0 * sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    attention = 2.0 * config.n_layers * config.n_heads * config.d_head * (config.context_length + 1)
    pointer = config.d_model * (config.context_length - 1) if config.pointer else 0
    return matrices + attention + _output_flops(model, n_targets) + pointer


def _output_flops(model: MiniGPT, n_targets: int) -> float:
    """Return the FLOPs of one target's logits, and of widening the narrow embeddings of rare words.

    A cluster is worked through only for the targets that lie in it. How many do is taken from
    Zipf's law, share ~ 1 / rank: 25.6 % beyond id 2,000 of WikiText-2, where 23 % are counted.
    """
    output, config = model.output, model.config
    if isinstance(output, SampledSoftmax):
        # The few draws that are targets as well, or drawn twice, are counted twice.
        n_rare = _distinct_targets(n_targets, output.n_frequent, config.vocab_size)
        n_candidates = min(output.n_frequent + output.n_sampled + n_rare, config.vocab_size)
        return 2.0 * config.d_model * n_candidates
    if not isinstance(output, AdaptiveSoftmax):
        return 2.0 * config.d_model * config.vocab_size
    bounds, tables = output.bounds, list(output.tables)
    flops = 2.0 * config.d_model * (bounds[1] + len(tables) - 1)
    for start, end, table in zip(bounds[1:], bounds[2:], tables[1:], strict=False):
        share = math.log(end / start) / (math.log(bounds[-1]) + 0.5772)
        projection = config.d_model * table.size(1)
        flops += share * 2 * (2 * projection + table.numel())
    return flops


def _distinct_targets(n_targets: int, first: int, vocab_size: int) -> float:
    """Return how many different ids from `first` on stand among n_targets, by Zipf's law.

    An id of share p is there with the probability 1 − (1 − p)^n. Words of one text repeat each
    other, so there are fewer: from 500 on, 1,107 in a batch of 4,096 of WikiText-2, where this
    gives 1,443. No text is at hand before training, and a fifth of the output is near enough.
    """
    ranks = torch.arange(first + 1, vocab_size + 1, dtype=torch.float64, device="cpu")
    shares = 1 / ranks / (math.log(vocab_size) + 0.5772)
    return float((1 - (1 - shares) ** n_targets).sum())


def _training_bytes(model: MiniGPT, config: Config, n_parameters: int) -> dict[str, int]:
    """Return the memory of one training step by what it holds.

    Muon keeps one number per weight, AdamW two. Activations are what the blocks save for the
    backward pass, then the embedded text and the last hidden vectors with their gradients, then one
    chunk of logits with its own. PyTorch's working space and allocator come on top.
    """
    muon = config.optim.matrix_rate > 0
    n_muon = sum(p.numel() for p in hidden_matrices(model).values()) if muon else 0
    n_windows = config.batch_size // config.accumulation
    n_tokens = n_windows * model.config.context_length
    blocks = len(model.blocks) * _saved_bytes(model, n_windows)
    outside = BYTES_PER_NUMBER * (4 * n_tokens * model.config.d_model + 2 * LOGITS_PER_CHUNK)
    if model.config.pointer:  # directions, scores, shares, and which of them offer the target
        outside += (
            BYTES_PER_NUMBER * n_tokens * (model.config.d_model + 3 * model.config.context_length)
        )
    return {
        "weights": BYTES_PER_NUMBER * n_parameters,
        "gradients": BYTES_PER_NUMBER * n_parameters,
        "optimizer": BYTES_PER_NUMBER * (n_muon + 2 * (n_parameters - n_muon)),
        "activations": blocks + outside,
    }


class _FastAttentionShape(torch.autograd.Function):
    """Keep for the backward pass what the fast attention keeps; the numbers do not matter here.

    On the meta device PyTorch would take the slow path, whose (T, T) weights are never held really.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return something of the right shape."""
        mixed = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, mixed)
        return mixed


def _attend_shape(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:  # noqa: ARG001
    return _FastAttentionShape.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]


def _saved_bytes(model: MiniGPT, n_windows: int) -> int:
    """Return the bytes that one block keeps for the backward pass of n_windows windows."""
    block: Any = model.blocks[0]
    own = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Views of one storage (a transposed weight, a split into heads) are kept once.
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    shape = (n_windows, model.config.context_length, model.config.d_model)
    x = torch.empty(shape, device="meta", requires_grad=True)
    attend = block.attention.attend
    block.attention.attend = _attend_shape
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            _ = block.train()(x, None)
    finally:
        block.attention.attend = attend
    return sum(saved.values())


Rows = list[tuple[str, str]]


def size_rows(sizes: Sizes, config: Config) -> Rows:
    """Return what `sizes` says as rows of a table, for people."""
    n_tokens = config.batch_size * config.model.context_length
    total = sum(sizes.training_bytes.values())
    return [
        ("vocabulary", f"{sizes.vocab_size:,} entries"),
        ("parameters", f"{sizes.n_parameters:,}"),
        *((f"  {part}", f"{count:,}") for part, count in sizes.parts.items()),
        ("embedding", f"{sizes.n_embedding:,} of them, in tables of words and positions"),
        ("non-embedding", f"{sizes.n_non_embedding:,}, the N of the scaling laws"),
        ("FLOPs per token", f"{_spoken(sizes.forward_flops)} forward"),
        ("", f"{_spoken(sizes.training_flops)} in training, forward and backward"),
        ("FLOPs per step", f"{_spoken(sizes.training_flops * n_tokens)} for {n_tokens:,} tokens"),
        ("training memory", f"{_mib(total)}, an estimate"),
        *((f"  {what}", _mib(count)) for what, count in sizes.training_bytes.items()),
        ("cache", f"{_mib(sizes.cache_bytes)} for a text of {config.model.context_length} tokens"),
    ]


def _spoken(number: float) -> str:
    """Return a large number with a prefix: 35026944 is 35.0 M."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {prefix}"
    return f"{number:.0f} "


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:,.1f} KiB"


def report_rows(report: Mapping[str, Any], prefix: str = "") -> Rows:
    """Return the tree of report.json as rows, an inner name behind its outer one.

    Without the config, which stands in config.json and is long.
    """
    rows: Rows = []
    for name, value in report.items():
        if isinstance(value, Mapping):
            rows += report_rows(value, f"{prefix}{name}.") if name != "config" else []
        elif isinstance(value, float):
            rows.append((f"{prefix}{name}", f"{value:,.2f}" if value >= 1 else f"{value:.3g}"))
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
