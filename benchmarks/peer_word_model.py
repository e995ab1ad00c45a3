"""The PyTorch word language model: its tied LSTM and its Transformer, taught as its main.py does.

In: model.py of its checkout, imported, and `Words`. Out: a `Peer`.

B batch · T sequence · V vocabulary · N words in a column
"""

import math
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peer import Ids, Words

# main.py's defaults (--emsize, --nhid, --nlayers, --nhead, --dropout, --batch_size, --bptt, --clip)
WIDTH, N_LAYERS, N_HEADS, DROPOUT, COLUMNS, ROWS, CLIP = 200, 2, 2, 0.2, 20, 35, 0.25
SCORED_COLUMNS = 10  # main.py: eval_batch_size


class WordModel:
    """A model of the PyTorch word language model, taught as its main.py does.

    The text is cut into 20 columns, read side by side 35 words at a time; the LSTM carries its
    state from one piece to the next, and the rate falls to a quarter after an epoch without gain.
    """

    def __init__(self, name: str, module: ModuleType, words: Words, *, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.words, self.recurrent = words, name == "lstm"
        vocab_size, self.rate = words.vocab_size, 20.0 if self.recurrent else 5.0
        if self.recurrent:
            sizes = (vocab_size, WIDTH, WIDTH, N_LAYERS, DROPOUT, True)
            self.model = module.RNNModel("LSTM", *sizes)
        else:
            self.model = module.TransformerModel(
                vocab_size, WIDTH, N_HEADS, WIDTH, N_LAYERS, DROPOUT
            )
        self.adamw = None
        if name.endswith("adamw"):
            self.rate = 0.001
            self.adamw = torch.optim.AdamW(self.model.parameters(), lr=self.rate)
        self.columns = torch.from_numpy(_columns(words.train, COLUMNS))  # (N, 20)
        self.place, self.state, self.epoch_ended = 0, None, False
        self.best = math.inf
        self.tokens_per_step = COLUMNS * ROWS
        self.batches_per_epoch = math.ceil((len(self.columns) - 1) / ROWS)
        self.n_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.model.train()
        self.settings = {
            "width": WIDTH,
            "n_layers": N_LAYERS,
            "dropout": DROPOUT,
            "batch_size": COLUMNS,
            "context": ROWS,
            "clip": CLIP,
            "rate": self.rate,
            "optimizer": "AdamW" if self.adamw else "SGD, a quarter after an epoch without gain",
            "tied": self.recurrent,
            "seed": seed,
        }

    def step(self, share: float) -> None:  # noqa: ARG002 - its schedule counts epochs
        """Take one step on (35, 20) words."""
        if self.place == 0:
            self.state = self.model.init_hidden(COLUMNS) if self.recurrent else None
        end = min(self.place + ROWS, len(self.columns) - 1)
        inputs, targets = self.columns[self.place : end], self.columns[self.place + 1 : end + 1]
        self.model.zero_grad()
        log_probs, self.state = self._read(inputs, self.state)
        loss = F.nll_loss(log_probs, targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if self.adamw is not None:
            self.adamw.step()
        else:
            for parameter in self.model.parameters():
                parameter.data.add_(parameter.grad, alpha=-self.rate)
        loss.item()
        self.epoch_ended = end == len(self.columns) - 1
        self.place = 0 if self.epoch_ended else end

    def _read(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return log-probabilities (T·B, V) for inputs (T, B), and the state after them."""
        if not self.recurrent:
            return self.model(inputs).flatten(0, 1), None
        # Cut off from how it came about, or gradients would run back to the start of the text.
        return self.model(inputs, tuple(part.detach() for part in state))  # type: ignore[no-any-return]

    @torch.no_grad()
    def score(self, ids: Ids) -> float:
        """Return the nats of ids in ten columns, each word once: main.py leaves out the last few.

        A column begins with no state, on the word before its first: what main.py does, and dearer
        for the peer by a hair than one row of 217,646 would be.
        """
        n_rows = math.ceil(len(ids) / SCORED_COLUMNS)
        row = np.full(SCORED_COLUMNS * n_rows + 1, self.words.eos_id, dtype=np.int64)
        row[1 : len(ids) + 1] = ids
        inputs, targets = (
            torch.from_numpy(_columns(r, SCORED_COLUMNS)) for r in (row[:-1], row[1:])
        )
        real = torch.from_numpy(_columns(np.arange(len(row) - 1), SCORED_COLUMNS) < len(ids))
        self.model.eval()
        state = self.model.init_hidden(SCORED_COLUMNS) if self.recurrent else None
        nats = 0.0
        for begin in range(0, n_rows, ROWS):
            piece = slice(begin, begin + ROWS)
            log_probs, state = self._read(inputs[piece], state)
            costs = F.nll_loss(log_probs, targets[piece].flatten(), reduction="none")
            nats += costs[real[piece].flatten()].sum(dtype=torch.float64).item()
        self.model.train()
        return nats

    def hear(self, nats: float) -> None:
        """Lower the rate where valid got no better (SGD alone, as in main.py)."""
        if nats < self.best:
            self.best = nats
        else:
            self.rate /= 4.0


def _columns(ids: Ids, n_columns: int) -> Ids:
    """Return ids as n_columns columns side by side, (N, n_columns), without what is left over."""
    n_rows = len(ids) // n_columns
    cut = np.asarray(ids[: n_rows * n_columns])
    cut = cut if cut.dtype == bool else cut.astype(np.int64)
    return np.ascontiguousarray(cut.reshape(n_columns, n_rows).T)
