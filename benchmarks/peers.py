"""The peers by name: the language models that a user would pick instead.

Nothing of theirs stands in this project: model classes are imported from checkouts that the user
names, and taught with the settings of their own training scripts.

    nanogpt                 nanoGPT's `GPT` at a preset's sizes            its train.py
    transformers            `GPT2LMHeadModel` at a preset's sizes          the same
    lstm                    the PyTorch word language model's tied LSTM    main.py --tied
    word-transformer        its Transformer               main.py --model Transformer --lr 5
    word-transformer-adamw  the same                      … --use-optimizer --lr 0.001
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from minigpt.config import Config
from minigpt.errors import UserError, closest
from peer import Peer, Words, checkout_of, imported
from peer_gpt import Checkouts, WindowedGPT, gpt2, nanogpt
from peer_word_model import WordModel

GPTS = {"nanogpt": nanogpt, "transformers": gpt2}
WORD_MODELS = ("lstm", "word-transformer", "word-transformer-adamw")
PEERS = (*GPTS, *WORD_MODELS)


def make_peer(
    name: str,
    words: Words,
    like: Config,
    checkouts: Checkouts,
    *,
    seed: int = 1,
    **choices: Any,
) -> Peer:
    """Return the peer called name, fresh.

    like        the preset whose sizes nanogpt and transformers take
    checkouts   nanogpt and pytorch_examples: folders
    seed        of weights, dropout and windows, in place of the script's own
    choices     rate, compiled and dtype, for nanogpt and transformers
    Raises UserError for a name that is not known and for a checkout that is missing.
    """
    if name in GPTS:
        torch.manual_seed(seed)
        made = GPTS[name](like, words.vocab_size, checkouts)
        return WindowedGPT(*made, words, like, seed=seed, **choices)
    if name not in WORD_MODELS:
        near = closest(name, PEERS)
        raise UserError(f"peer {name} is not known{near}: take one of {', '.join(PEERS)}")
    folder = checkout_of(checkouts, "pytorch_examples") / "word_language_model"
    return WordModel(name, imported(folder / "model.py", "--pytorch-examples"), words, seed=seed)


def compiling_pays(make: Callable[[bool], Peer], rounds: int = 3) -> bool:
    """Return whether a step of a peer is faster compiled, by a trial of peers that `make` makes.

    It is a favour to the peer, whose clock does not run meanwhile.
    """
    seconds = {True: math.inf, False: math.inf}
    contestants = {compiled: make(compiled) for compiled in seconds}
    for _ in range(1 + rounds):
        for compiled, peer in contestants.items():
            began_at = time.perf_counter()
            try:
                peer.step(0.0)
            except Exception as error:  # no compiler here, or one that cannot take this model
                if not compiled:
                    raise
                print(f"not compiled: {type(error).__name__}", file=sys.stderr)
                return False
            # The fastest counts, so the first, which compiles, does not.
            seconds[compiled] = min(seconds[compiled], time.perf_counter() - began_at)
    print(
        f"a step takes {seconds[False]:.2f} s eagerly, {seconds[True]:.2f} s compiled",
        file=sys.stderr,
    )
    return seconds[True] < seconds[False]


def faster(make: Callable[[bool], Peer], wish: str) -> Peer:
    """Return a fresh peer, compiled or not: as wished, or under auto the way that is faster.

    The trial warms the compiler's cache: `quality`, which counts compilation, tries elsewhere.
    """
    return make(compiling_pays(make) if wish == "auto" else wish == "on")
