"""Small models that write: for the tests of filters, decoding and generation."""

import torch
from torch import Tensor

from minigpt.config import ModelConfig, TokenizerConfig
from minigpt.model import MiniGPT
from minigpt.sampling import Sampling
from minigpt.tokenizer import Tokenizer

B, T, H, K, F, V = 5, 17, 3, 14, 31, 89  # T is the context
SINES = ModelConfig(
    vocab_size=V,
    context_length=T,
    d_model=22,
    n_heads=H,
    d_head=K,
    d_ff=F,
    n_layers=2,
    position="sinusoidal",
    norm="layer",
    norm_placement="post",
    feed_forward="relu",
    bias=True,
    dropout=0.5,
)
CONFIGS = {
    "sinusoidal": SINES,
    "learned": ModelConfig(
        V, T, 23, H, 0, K, F, 2, position="learned", norm_placement="pre", dropout=0.5
    ),
    "grouped": ModelConfig(V, T, 23, H, 1, K, F, 2, qk_norm=True, dropout=0.5),
    "pointer": ModelConfig(
        V,
        T,
        23,
        H,
        0,
        K,
        F,
        2,
        pointer=True,
        token_shift=True,
        output="sampled",
        n_frequent=11,
        n_sampled=13,
        output_bias=True,
        edge_dropout=0.5,
    ),
    "adaptive": ModelConfig(
        V, T, 23, H, 0, K, F, 2, output="adaptive", cutoffs=(29, 61), tail_divisor=2
    ),
}
GREEDY = Sampling(temperature=0, max_new_tokens=T)
LINES = [
    "The river ran past the old mill , and nobody knew where it went .",
    "",
    " = A title = ",
    "A mill by a river : the smile of a 😊 and the word 语 , twice : 语 😊",
] * 7


def make_model(config: ModelConfig = SINES, seed: int = 1) -> MiniGPT:
    torch.manual_seed(seed)
    model = MiniGPT(config)
    with torch.no_grad():  # fresh weights say nearly the same of everything: make them opinionated
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model


def make_even(model: MiniGPT) -> None:
    """Make every word as likely as any other."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def make_tokenizer(kind: str) -> Tokenizer:
    size = {"basic_english": 19, "wikitext": 17, "bpe": 300, "char": 300}[kind]
    return Tokenizer.train(TokenizerConfig(kind, size), lambda: LINES)


def text_model(kind: str) -> tuple[MiniGPT, Tokenizer]:
    tokenizer = make_tokenizer(kind)
    config = ModelConfig(tokenizer.vocab_size, T, 23, H, 0, K, F, 2)
    return make_model(config), tokenizer


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_logits(seed: int, *, ties: bool) -> Tensor:
    logits = 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits
