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

from minigpt.config import Config, UserError, closest
from peer import Peer, Words, checkout_of, imported
from peer_gpt import Checkouts, WindowedGPT, gpt2, nanogpt
from peer_word_model import WordModel

GPTS = {"nanogpt": nanogpt, "transformers": gpt2}
WORD_MODELS = ("lstm", "word-transformer", "word-transformer-adamw")
PEERS = (*GPTS, *WORD_MODELS)


def make_peer(name: str, words: Words, like: Config, checkouts: Checkouts, **choices: Any) -> Peer:
    """Return the peer called name, fresh.

    like        the preset whose sizes nanogpt and transformers take
    checkouts   nanogpt and pytorch_examples: folders
    choices     compiled and dtype, for nanogpt and transformers
    Raises UserError for a name that is not known and for a checkout that is missing.
    """
    if name in GPTS:
        torch.manual_seed(1337)  # train.py's
        return WindowedGPT(*GPTS[name](like, words.vocab_size, checkouts), words, like, **choices)
    if name not in WORD_MODELS:
        near = closest(name, PEERS)
        raise UserError(f"peer {name} is not known{near}: take one of {', '.join(PEERS)}")
    folder = checkout_of(checkouts, "pytorch_examples") / "word_language_model"
    return WordModel(name, imported(folder / "model.py", "--pytorch-examples"), words)


def faster(make: Callable[[bool], Peer], wish: str, rounds: int = 3) -> Peer:
    """Return a fresh peer, compiled or not: as wished, or under auto the way that is faster.

    The trial is a favour to the peer: its time does not count, and it warms the compiler's cache.
    """
    if wish != "auto":
        return make(wish == "on")
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
                return make(False)
            # The fastest counts, so the first, which compiles, does not.
            seconds[compiled] = min(seconds[compiled], time.perf_counter() - began_at)
    print(
        f"a step takes {seconds[False]:.2f} s eagerly, {seconds[True]:.2f} s compiled",
        file=sys.stderr,
    )
    del contestants
    return make(seconds[True] < seconds[False])
