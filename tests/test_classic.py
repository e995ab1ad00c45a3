"""Classic code for three things runs here with nothing but its imports changed.

ATTENTION calls the attention classes as tutorials do; WIKITEXT2 is after the PyTorch tutorial on
language modelling, with four specials for its one and without its annotations and devices;
ANNOTATED calls what The Annotated Transformer and we call alike. What is executed is a snippet with
the lines of IMPORTS exchanged, as the first test shows, and no other line.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

ATTENTION = """
import torch
from attention import MultiHeadAttention, ScaledDotProductAttention

batch_size, num_heads, seq_len, d_k = 2, 8, 10, 64
d_model = num_heads * d_k

Q = torch.randn(batch_size, num_heads, seq_len, d_k)
K = torch.randn(batch_size, num_heads, seq_len, d_k)
V = torch.randn(batch_size, num_heads, seq_len, d_k)

attention = ScaledDotProductAttention(dropout=0.1)
attention.eval()
output, attention_weights = attention(Q, K, V)
print("Output shape:", output.shape)
print("Attention weights shape:", attention_weights.shape)
print("Rows sum to 1:", torch.allclose(attention_weights.sum(dim=-1), torch.tensor(1.0)))

mask = torch.tril(torch.ones(seq_len, seq_len)).unsqueeze(0).unsqueeze(0)
masked_output, masked_weights = attention(Q, K, V, mask=mask)
print("Future weight:", masked_weights.triu(1).sum().item())

x = torch.randn(batch_size, seq_len, d_model)
multi_head = MultiHeadAttention(d_model=512, n_heads=8, dropout=0.1)
multi_head.eval()
out, weights = multi_head(x, x, x, mask)
print("Multi-head output shape:", out.shape)
print("Multi-head weights shape:", weights.shape)
"""

WIKITEXT2 = """
import torch
from torchtext.datasets import WikiText2
from torchtext.data.utils import get_tokenizer
from torchtext.vocab import build_vocab_from_iterator

train_iter = WikiText2(split="train")
tokenizer = get_tokenizer("basic_english")
vocab = build_vocab_from_iterator(
    map(tokenizer, train_iter), specials=["<unk>", "<pad>", "<bos>", "<eos>"]
)
vocab.set_default_index(vocab["<unk>"])


def data_process(raw_text_iter):
    data = [torch.tensor(vocab(tokenizer(item)), dtype=torch.long) for item in raw_text_iter]
    return torch.cat(tuple(filter(lambda t: t.numel() > 0, data)))


# The first iterator is used up, so there have to be new ones.
train_iter, val_iter, test_iter = WikiText2()
train_data = data_process(train_iter)
val_data = data_process(val_iter)
test_data = data_process(test_iter)


def batchify(data, bsz):
    seq_len = data.size(0) // bsz
    data = data[: seq_len * bsz]
    return data.view(bsz, seq_len).t().contiguous()


batch_size, eval_batch_size = 20, 10
train_batches = batchify(train_data, batch_size)
val_batches = batchify(val_data, eval_batch_size)
"""

ANNOTATED = """
import torch
from the_annotated_transformer import PositionalEncoding, PositionwiseFeedForward

pe = PositionalEncoding(20, 0)
y = pe.forward(torch.zeros(1, 100, 20))

d_model, d_ff, dropout = 512, 2048, 0.1
ff = PositionwiseFeedForward(d_model, d_ff, dropout)
position = PositionalEncoding(d_model, dropout)
z = ff(position(torch.zeros(2, 10, d_model)))
"""

IMPORTS = {
    "from attention import MultiHeadAttention, ScaledDotProductAttention": (
        "from minigpt.layers.attention import MultiHeadAttention, ScaledDotProductAttention"
    ),
    "from torchtext.datasets import WikiText2": "from minigpt.text import WikiText2",
    "from torchtext.data.utils import get_tokenizer": "from minigpt.text import get_tokenizer",
    "from torchtext.vocab import build_vocab_from_iterator": (
        "from minigpt.text import build_vocab_from_iterator"
    ),
    "from the_annotated_transformer import PositionalEncoding, PositionwiseFeedForward": (
        "from minigpt.layers import PositionalEncoding, PositionwiseFeedForward"
    ),
}


def ported(snippet: str) -> str:
    return "\n".join(IMPORTS.get(line, line) for line in snippet.splitlines())


def run(snippet: str) -> dict[str, Any]:
    """Execute the snippet with our imports and return the names that it defined."""
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    exec(ported(snippet), names)
    return names


@pytest.mark.parametrize("snippet", [ATTENTION, WIKITEXT2, ANNOTATED])
def test_nothing_but_imports_changes(snippet: str) -> None:
    before, after = snippet.splitlines(), ported(snippet).splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed
    for old, new in changed:
        *_, old_names = old.partition(" import ")
        assert old.startswith("from ")
        assert new.startswith("from minigpt.")
        assert new.endswith(f" import {old_names}"), "the same names, from another place"


def test_the_attention_class_on_random_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(ATTENTION)
    assert capsys.readouterr().out.splitlines() == [
        "Output shape: torch.Size([2, 8, 10, 64])",
        "Attention weights shape: torch.Size([2, 8, 10, 10])",
        "Rows sum to 1: True",
        "Future weight: 0.0",
        "Multi-head output shape: torch.Size([2, 10, 512])",
        "Multi-head weights shape: torch.Size([2, 8, 10, 10])",
    ]
    ones = torch.ones(2, 8, 10)
    for weights in ("attention_weights", "masked_weights", "weights"):
        torch.testing.assert_close(names[weights].sum(dim=-1), ones)
    # With all of the past visible, and with none of it but itself.
    torch.testing.assert_close(names["masked_output"][:, :, -1], names["output"][:, :, -1])
    torch.testing.assert_close(names["masked_output"][:, :, 0], names["V"][:, :, 0])


def test_the_preparation_of_wikitext2(wikitext2: Path) -> None:
    names = run(WIKITEXT2)
    vocab = names["vocab"]
    assert len(vocab) == 28_785
    assert vocab.get_default_index() == 0
    assert vocab(["<unk>", "<pad>", "<bos>", "<eos>", "the", "xyzzy"]) == [0, 1, 2, 3, 4, 0]
    sizes = {"train_data": 2_049_990, "val_data": 214_417, "test_data": 241_859}
    for name, size in sizes.items():
        data = names[name]
        assert (data.dtype, data.shape) == (torch.int64, (size,))
        assert 0 <= data.min() < data.max() < 28_785
    assert (
        " ".join(vocab.lookup_tokens(names["train_data"][:4].tolist()))
        == "= valkyria chronicles iii"
    )
    assert names["train_batches"].shape == (2_049_990 // 20, 20)
    assert names["val_batches"].shape == (214_417 // 10, 10)
    # A column is a stretch of the text.
    assert torch.equal(names["val_batches"][:, 1], names["val_data"][21_441 : 2 * 21_441])


def test_what_the_annotated_transformer_calls_alike() -> None:
    names = run(ANNOTATED)
    positions = torch.arange(100)
    assert names["y"].shape == (1, 100, 20)
    for i in (0, 7):
        angle = positions / 10_000 ** (2 * i / 20)
        torch.testing.assert_close(names["y"][0, :, 2 * i], angle.sin(), atol=1e-5, rtol=0)
        torch.testing.assert_close(names["y"][0, :, 2 * i + 1], angle.cos(), atol=1e-5, rtol=0)
    assert names["z"].shape == (2, 10, 512)
