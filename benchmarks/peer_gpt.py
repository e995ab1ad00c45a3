"""The GPTs of others: nanoGPT's `GPT` and transformers' `GPT2LMHeadModel`, at a preset's sizes.

In: a preset, for its sizes, and `Words`. Out: a `Peer`. Both have the full softmax over all words,
and both are taught as nanoGPT's train.py teaches: AdamW, warm-up, a cosine, windows from anywhere.

B batch · T sequence · V vocabulary
"""

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import Config
from minigpt.errors import UserError
from peer import Ids, Words, checkout_of, imported

Checkouts = dict[str, Path | None]

# nanoGPT's settings for small models (config/train_shakespeare_char.py: "with baby networks can
# afford to go a bit higher"); no dropout, as its README has it on a CPU and for few epochs. Only
# the rate is tuned for them, by whoever runs `quality` with several.
GPT_RATE, GPT_BETAS, GPT_DECAY, GPT_CLIP, GPT_WARM_UP_STEPS = 1e-3, (0.9, 0.99), 0.1, 1.0, 100
GPT_FINAL_RATE = 0.1  # of the highest, by a cosine (train.py: min_lr)


def nanogpt(
    like: Config, vocab_size: int, checkouts: Checkouts
) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return nanoGPT's model at the sizes of a preset, how to call it, and its own optimizer."""
    module = imported(checkout_of(checkouts, "nanogpt") / "model.py", "--nanogpt")
    sizes = module.GPTConfig(
        block_size=like.model.context_length,
        vocab_size=vocab_size,
        n_layer=like.model.n_layers,
        n_head=like.model.n_heads,
        n_embd=like.model.d_model,
        dropout=0.0,
        bias=False,
    )
    with contextlib.redirect_stdout(sys.stderr):  # it tells of itself; results go to stdout
        model = module.GPT(sizes)
        # Each step sets its own rate.
        optimizer = model.configure_optimizers(GPT_DECAY, GPT_RATE, GPT_BETAS, "cpu")

    def loss(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
        return model(ids, targets)[1]  # type: ignore[no-any-return]

    return model, loss, optimizer


def gpt2(
    like: Config,
    vocab_size: int,
    checkouts: Checkouts,  # noqa: ARG001 - an installed package has none
) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return GPT2LMHeadModel at the sizes of a preset, how to call it, and an AdamW for it."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise UserError("transformers is not installed: pip install transformers") from None
    sizes = GPT2Config(
        vocab_size=vocab_size,
        n_positions=like.model.context_length,
        n_embd=like.model.d_model,
        n_layer=like.model.n_layers,
        n_head=like.model.n_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        # The default names an id of GPT-2's own vocabulary.
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(sizes)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": GPT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=GPT_RATE, betas=GPT_BETAS, fused=True)

    def loss(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())

    return model, loss, optimizer


class WindowedGPT:
    """A GPT of others, taught on windows that begin anywhere, as nanoGPT's train.py draws them.

    AdamW, warm-up and cosine are that script's; its step count is replaced by the share of the
    budget, so that the rate has fallen when the time is up: better than a guess beforehand.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        words: Words,
        like: Config,
        *,
        rate: float = GPT_RATE,
        compiled: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
    ) -> None:
        self.model, self.loss, self.optimizer, self.words = model.train(), loss, optimizer, words

        def taught(ids: Tensor, targets: Tensor) -> Tensor:
            return loss(model, ids, targets)

        # With the loss in the graph, whether or not the model computes it itself.
        self.taught = torch.compile(taught) if compiled else taught
        self.rate, self.dtype = rate, dtype
        self.batch_size, self.context = like.batch_size, like.model.context_length
        self.tokens_per_step = self.batch_size * self.context
        self.n_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.n_steps, self.epoch_ended = 0, False
        self.random = np.random.default_rng(seed)
        self.settings = {
            "d_model": like.model.d_model,
            "n_layers": like.model.n_layers,
            "n_heads": like.model.n_heads,
            "context": self.context,
            "batch_size": self.batch_size,
            "rate": rate,
            "betas": GPT_BETAS,
            "weight_decay": GPT_DECAY,
            "clip": GPT_CLIP,
            "warm_up_steps": GPT_WARM_UP_STEPS,
            "schedule": f"cosine to {GPT_FINAL_RATE} of the rate, by the share of the budget",
            "dropout": 0.0,
            "seed": seed,
            "compiled": compiled,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def step(self, share: float) -> None:
        """Take one step of AdamW on windows (B, T)."""
        warm = min(1.0, (self.n_steps + 1) / (GPT_WARM_UP_STEPS + 1))
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * warm * (GPT_FINAL_RATE + (1 - GPT_FINAL_RATE) * cosine)
        starts = self.random.integers(len(self.words.train) - self.context, size=self.batch_size)
        windows = self.words.train[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
        ids = torch.from_numpy(windows)  # (B, T + 1)
        with self._autocast():
            loss = self.taught(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), GPT_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()  # both training loops look at it
        self.n_steps += 1

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def score(self, ids: Ids) -> float:
        """Return the nats of ids, in disjoint windows of the context, eagerly."""
        self.model.eval()
        row = torch.from_numpy(np.concatenate(([self.words.eos_id], ids)).astype(np.int64))
        rows, nats = 4, 0.0  # windows at a time: their logits are 4 · T · V numbers
        whole = len(ids) // self.context * self.context
        pieces = [(at, min(rows * self.context, whole - at)) for at in
                  range(0, whole, rows * self.context)]  # fmt: skip
        pieces += [(whole, len(ids) - whole)] if whole < len(ids) else []
        for begin, length in pieces:
            shape = (-1, min(self.context, length))
            inputs = row[begin : begin + length].view(shape)
            targets = row[begin + 1 : begin + length + 1].view(shape)
            nats += length * self.loss(self.model, inputs, targets).item()
        self.model.train()
        return nats

    def hear(self, nats: float) -> None:
        """Do nothing: the schedule knows no valid."""
