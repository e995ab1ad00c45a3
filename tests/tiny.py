"""Small things that several tests are made of: sizes that cannot lie, models, a corpus, a run.

No two sizes are equal or trade places unseen: B batch · T sequence · H heads · K d_head ·
F d_ff · V vocabulary · L layers. K is even, for rotary positions turn pairs.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minigpt.checkpoint import Run, Which, checkpoint_folder
from minigpt.config import Config, ModelConfig, OptimConfig, TokenizerConfig, TokenizerKind
from minigpt.corpus import open_corpus
from minigpt.data import fit_tokenizer
from minigpt.events import Event, Stepped
from minigpt.layers.attention import taught_causal_attention
from minigpt.model import MiniGPT

B, T, H, K, F, V, L = 5, 11, 3, 14, 31, 89, 2
D = H * K

SIZES: dict[str, Any] = {
    "vocab_size": V,
    "context_length": T,
    "d_model": D,
    "n_heads": H,
    "d_ff": F,
    "n_layers": L,
}
PAPER = ModelConfig(
    **SIZES,
    position="sinusoidal",
    norm="layer",
    norm_placement="post",
    feed_forward="relu",
    bias=True,
)
GPT2 = replace(PAPER, position="learned", norm_placement="pre", feed_forward="gelu")
MODERN = ModelConfig(**SIZES, qk_norm=True, norm_eps=1e-6)
ADAPTIVE = replace(
    MODERN, feed_forward="relu2", output="adaptive", cutoffs=(29, 61), tail_divisor=2
)
SAMPLED = replace(
    MODERN,
    output="sampled",
    output_bias=True,
    n_frequent=29,
    n_sampled=17,
    embedding_norm=True,
    token_shift=True,
    pointer=True,
)
MODELS = {
    "paper": PAPER,
    "gpt2": GPT2,
    "modern": MODERN,
    "adaptive": ADAPTIVE,
    "sampled": SAMPLED,
    "grouped-query": replace(MODERN, n_heads=6, n_kv_heads=3, d_head=10, d_model=47),
    "rotary, post-norm": replace(MODERN, norm_placement="post", norm="layer"),
    "sines, adaptive": replace(PAPER, output="adaptive", cutoffs=(29,), norm_placement="pre"),
    "untied": replace(GPT2, tie_embeddings=False),
    "untied, adaptive": replace(ADAPTIVE, tie_embeddings=False, cutoffs=(53,)),
}


def make_model(config: ModelConfig, seed: int = 1) -> MiniGPT:
    """Return a model of which every number is random: biases of 0 and norms of 1 hide faults."""
    torch.manual_seed(seed)
    return randomised(MiniGPT(config).eval())


def randomised(module: Any) -> Any:
    """Return module with weights about as large as they are in training, biases and norms too."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return module


def random_ids(*shape: int, vocab_size: int = V, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, shape, generator=generator)


@contextmanager
def taught(model: MiniGPT) -> Iterator[None]:
    """Within it, model computes the taught equation instead of the fast path."""
    before = [block.attention.attend for block in model.blocks]
    for block in model.blocks:
        block.attention.attend = lambda *args: taught_causal_attention(*args)[0]
    try:
        yield
    finally:
        for block, attend in zip(model.blocks, before, strict=True):
            block.attention.attend = attend


class LargestTensor(TorchDispatchMode):
    """Within it, `numel` is how many numbers the largest tensor had that any operation made.

    Views of what was there before do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        old = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.numel = max(self.numel, tensor.numel())
        return made


def write_corpus(path: Path, n_lines: int = 400, n_words: int = 83) -> Path:
    """Write lines of five words, each of which tells something about the next one."""
    draw = random.Random(7)
    lines = []
    for _ in range(n_lines):
        word = draw.randrange(n_words)
        line = []
        for _ in range(5):
            line.append(f"w{word}")
            word = (3 * word + draw.randrange(2)) % n_words
        lines.append(" ".join(line) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def run_config(data: Path, **changes: Any) -> Config:
    """Return a run of ten steps that takes a tenth of a second, with dropout and all."""
    model = ModelConfig(
        context_length=T, d_model=D, n_heads=H, d_ff=F, n_layers=L, qk_norm=True, dropout=0.1
    )
    config = Config(
        data=str(data),
        steps=10,
        batch_size=6,
        validations=2,
        device="cpu",
        threads=1,
        compile="off",
        precision="float32",
        tokenizer=TokenizerConfig("wikitext", 0),
        model=model,
        optim=OptimConfig(matrix_rate=0.01, rate=1e-2),
    )
    return replace(config, **changes)


def write_articles(folder: Path, n_articles: int = 7, n_words: int = 83) -> Path:
    """Write articles as WikiText sets them, each of another length: 3 n, n and n + 1 of them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(11)
    for split, n in (("train", 3 * n_articles), ("valid", n_articles), ("test", n_articles + 1)):
        lines = []
        for i in range(n):
            lines += ["", f" = Title w{i} = ", ""]
            for _ in range(2 + i % 5):
                words = [f"w{draw.randrange(n_words)}" for _ in range(3 + i % 7)]
                lines.append(f" {' '.join(words)} <unk> . ")
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_run(path: Path, data: Path, kind: TokenizerKind, vocab_size: int = 0, **model: Any) -> Run:
    """Return a run that learned nothing: every weight is random, but its tokenizer knows train."""
    config = run_config(data, tokenizer=TokenizerConfig(kind, vocab_size))
    tokenizer = fit_tokenizer(open_corpus(config.data), config.tokenizer)
    sizes = replace(config.model, **model).resolved(tokenizer.vocab_size)
    model_of_run = make_model(sizes, seed=len(path.name))
    report = {"elapsed_seconds": 90.0, "epochs": 1.5}
    return Run(path, replace(config, model=sizes), tokenizer, model_of_run, 0, report)


class Recorder:
    """A callback that keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class StopAfter(Recorder):
    """A callback that presses Ctrl-C, or sends another signal, once a step is done."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.step, self.number = step, number

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, Stepped) and event.step == self.step:
            os.kill(os.getpid(), self.number)


def bytes_of(run_dir: Path, which: Which | int = "last") -> list[bytes]:
    """Return a checkpoint's weights, and its optimizers and generators, as they are on the disk."""
    folder = checkpoint_folder(run_dir, which)
    return [(folder / name).read_bytes() for name in ("model.safetensors", "trainer.safetensors")]
