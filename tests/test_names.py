"""The tables of names: ours exist, theirs are all there, and both languages say the same."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from minigpt.layers.attention import MultiHeadAttention
from minigpt.text import Vocab
from minigpt.transformer import DecoderLayer, EncoderLayer, Transformer

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [DOCS / "names.md", DOCS / "names.zh-CN.md"]
# Parts that a class has only once it is built.
BUILT: dict[type, Any] = {
    Transformer: Transformer(5, 5, 6, 3, 1, 7),
    EncoderLayer: EncoderLayer(6, 3, 7),
    DecoderLayer: DecoderLayer(6, 3, 7),
    MultiHeadAttention: MultiHeadAttention(6, 3),
}
# Every definition of The Annotated Transformer that is about the model, its training or its data.
ANNOTATED = """
    EncoderDecoder Generator clones Encoder LayerNorm SublayerConnection EncoderLayer Decoder
    DecoderLayer subsequent_mask attention MultiHeadedAttention PositionwiseFeedForward Embeddings
    PositionalEncoding make_model Batch TrainState run_epoch rate LabelSmoothing SimpleLossCompute
    greedy_decode load_tokenizers tokenize yield_tokens build_vocabulary load_vocab collate_batch
    create_dataloaders average attn_map visualize_layer get_encoder get_decoder_self
    get_decoder_src
"""
TORCHTEXT = """
    WikiText2 get_tokenizer ngrams_iterator build_vocab_from_iterator vocab Vocab forward __call__
    __len__ __contains__ __getitem__ set_default_index get_default_index insert_token append_token
    lookup_token lookup_tokens lookup_indices get_stoi get_itos is_jitable Vectors GloVe FastText
    CharNGram
"""


def tables(page: Path) -> list[list[list[str]]]:
    """Return the rows of each table, heads and rules left out, as lists of cells."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M):
        rows = [re.split(r" \| ", line.strip("| ")) for line in block.splitlines()]
        found.append(rows[2:])
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolve(name: str) -> object:
    """Return what `transformer.Encoder` names below minigpt; raise where there is nothing."""
    parts = name.split(".")
    for n_modules in (2, 1):
        try:
            found: Any = importlib.import_module(".".join(["minigpt", *parts[:n_modules]]))
        except ModuleNotFoundError:
            continue
        for part in parts[n_modules:]:
            found = found if hasattr(found, part) else BUILT[found]
            found = getattr(found, part)
        return found
    raise LookupError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_ours_exists(page: Path) -> None:
    parameters = {
        name
        for function in (Transformer.__init__, Transformer.forward)
        for name in inspect.signature(function).parameters
    }
    n_names = 0
    for rows in tables(page):
        for row in rows:
            for name in quoted(row[-2]):
                n_names += 1
                if "." in name:
                    assert resolve(name) is not None
                else:
                    assert name in parameters, name
            assert quoted(row[-2]) or row[-2] == "—", "either a name or none"
    assert n_names > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_in_remarks_exist_too(page: Path) -> None:
    for rows in tables(page):
        for row in rows:
            for name in quoted(row[-1]):
                if re.fullmatch(r"(transformer|layers|data|text)\.[\w.]+", name):
                    resolve(name)


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert resolve("transformer.Transformer.output") is BUILT[Transformer].output
    for name in ("transformer.Nothing", "transformer.EncoderLayer.nothing", "nothing.Encoder"):
        with pytest.raises((AttributeError, KeyError, LookupError)):
            resolve(name)


def test_none_of_theirs_is_left_out() -> None:
    annotated, torchtext, pytorch = (
        {name.rpartition(".")[2] for row in rows for name in quoted(row[0])}
        for rows in tables(PAGES[0])
    )
    assert set(ANNOTATED.split()) - annotated == set()
    assert set(TORCHTEXT.split()) - torchtext == set()
    assert {name for name in vars(Vocab) if name in TORCHTEXT.split()} <= torchtext
    theirs = {
        name
        for function in (nn.Transformer.__init__, nn.Transformer.forward)
        for name in inspect.signature(function).parameters
    }
    assert theirs - {"self"} - pytorch == set()
    parts = {
        name.split(".")[0]
        for layer in (nn.TransformerDecoderLayer, nn.MultiheadAttention)
        for name, _ in layer(6, 3).named_parameters()
    }
    assert parts - pytorch == set()


def test_both_languages_have_the_same_tables() -> None:
    english, chinese = (tables(page) for page in PAGES)
    assert [len(rows) for rows in english] == [len(rows) for rows in chinese]
    assert len(english) == 3
    for ours, theirs in zip(english, chinese, strict=True):
        for row, other in zip(ours, theirs, strict=True):
            assert len(row) == len(other)
            for cell, twin in zip(row, other, strict=True):
                assert sorted(quoted(cell)) == sorted(quoted(twin)), row
    for page in PAGES:
        other = next(each for each in PAGES if each != page)
        assert f"]({other.name})" in page.read_text(encoding="utf-8")
