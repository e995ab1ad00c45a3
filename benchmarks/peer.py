"""A peer: what a benchmark asks of a language model that others wrote, and what it is given.

In: the folder of a checkout, the name of a text. Out: the module that stands there, imported and
not copied, and the text as `Words`.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt.config import TokenizerConfig
from minigpt.corpus import open_corpus
from minigpt.data import fit_tokenizer, prepare
from minigpt.errors import UserError

Ids = NDArray[Any]


@dataclass(frozen=True)
class Words:
    """The closed vocabulary's text as ids, the same for all."""

    train: Ids
    valid: Ids
    eos_id: int
    vocab_size: int


class Peer(Protocol):
    """What a benchmark asks of a peer."""

    settings: dict[str, Any]
    n_parameters: int
    tokens_per_step: int
    epoch_ended: bool
    """Did the step just taken end a pass through the text, after which its rate may fall?"""

    def step(self, share: float) -> None:
        """Take one step of training, at this share of the budget, 0 to 1."""

    def score(self, ids: Ids) -> float:
        """Return the nats of ids, each scored once, the first one conditioned on <eos>."""

    def hear(self, nats: float) -> None:
        """Learn what valid cost at the end of an epoch."""


def closed_vocabulary(data: str) -> Words:
    """Return the text that `data` names, in the closed vocabulary of published figures."""
    corpus = open_corpus(data)
    tokenizer = fit_tokenizer(corpus, TokenizerConfig("wikitext", 0))
    train, valid = (prepare(corpus, split, tokenizer).ids for split in ("train", "valid"))
    return Words(np.asarray(train), np.asarray(valid), tokenizer.eos_id, tokenizer.vocab_size)


def imported(path: Path, flag: str) -> ModuleType:
    """Return the module in the file at path. Raises UserError where the checkout lacks it."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the folder of a checkout with {flag}")
    name = f"peer_{path.parent.name}_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported: name another checkout with {flag}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def checkout_of(checkouts: dict[str, Path | None], name: str) -> Path:
    """Return the folder of a checkout. Raises UserError where the user named none."""
    folder, flag = checkouts.get(name), f"--{name.replace('_', '-')}"
    if folder is None:
        raise UserError(f"no checkout is named: give its folder with {flag} DIR")
    return folder
