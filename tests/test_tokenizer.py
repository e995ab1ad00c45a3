"""Text to ids and back: exact where exactness is promised, the same in every process."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt import vocabulary
from minigpt.config import TokenizerConfig, TokenizerKind
from minigpt.corpus import SPLITS, open_corpus
from minigpt.errors import UserError
from minigpt.text import basic_english
from minigpt.tokenizer import Tokenizer

KINDS = get_args(TokenizerKind)
EXACT = ("bpe", "char")
LINES = [
    " ",
    " = The cat = ",
    " ",
    ' The cat , the <unk> , and the " mat " sat ; the cat ate : it \'s a <unk> . ',
    " ",
    " = Die Käse = ",
    " ",
    " Der Käse ist gut , der Käse ist alt . The cat sat . ",
]
# Letters that are newer than this Python's Unicode have a small form for the library alone.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn"]))


def trained(kind: str, size: int = 300, lines: Iterable[str] = LINES) -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(kind, size), lambda: lines)  # type: ignore[arg-type]


TOKENIZERS = {kind: trained(kind) for kind in KINDS}


def stream(tokenizer: Tokenizer, lines: Iterable[str]) -> list[int]:
    return [i for ids in tokenizer.encode_lines(lines) for i in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_by_frequency_then_alphabet(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    counts = Counter(stream(tokenizer, LINES))
    first = 4 if kind == "basic_english" else 0
    tokens = tokenizer.decode(range(tokenizer.vocab_size), raw=True)
    names = [tokenizer._library.id_to_token(i) for i in range(tokenizer.vocab_size)]
    keys = [(-counts[i], names[i]) for i in range(first, tokenizer.vocab_size)]
    assert keys == sorted(keys), tokens
    assert [tokenizer.token_to_id(name) for name in names] == list(range(tokenizer.vocab_size))


def test_specials() -> None:
    tokenizer = TOKENIZERS["basic_english"]
    ids = [tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    assert ids == [tokenizer.token_to_id(t) for t in ("<unk>", "<pad>", "<bos>", "<eos>")]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.special_ids == {0, 1, 2}
    for kind in ("wikitext", "bpe", "char"):
        tokenizer = TOKENIZERS[kind]
        assert tokenizer.pad_id is tokenizer.bos_id is None
        assert tokenizer.eos_id not in tokenizer.special_ids
        assert tokenizer.token_to_id("<unk>") in tokenizer.special_ids
        assert (tokenizer.unk_id is None) == (kind in EXACT)


@given(ANY_TEXT)
def test_basic_english_gives_the_classic_words(text: str) -> None:
    line = text.replace("\n", " ")
    words = basic_english(line)
    tokenizer = trained("basic_english", 0, [line])
    assert [tokenizer.pieces([i])[0] for i in tokenizer.encode(line)] == tokenizer.pieces(
        tokenizer.token_to_id(word) or 0 for word in words
    )
    assert tokenizer.n_spelt_unknown(line) == words.count("<unk>")
    assert tokenizer.vocab_size == 4 + len({*words} - {"<unk>", "<pad>", "<bos>", "<eos>"})


@given(st.text("<unk>'.\" ;Σσa\x1c", max_size=40))
def test_basic_english_at_its_corners(line: str) -> None:
    test_basic_english_gives_the_classic_words.hypothesis.inner_test(line)  # type: ignore[attr-defined]


# LLMs-from-scratch#558, #944: “Hello,” and leading blanks did not come back.
@pytest.mark.parametrize("kind", EXACT)
@given(ANY_TEXT)
def test_bytes_come_back(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, raw=True) == text
    assert tokenizer.eos_id not in ids


# LLMs-from-scratch#558, #944: “Hello,” and leading blanks did not come back.
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(
    "text",
    ["Hello,", "  two blanks", "<eos>", "a <unk>b<unk>", "😊语", "\r\n\n \n\n", "\0", "<0x41>", ""],
)
def test_texts_that_others_lose(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


# nanoGPT#434, #169, #273: KeyError on an unseen character.
@pytest.mark.parametrize("kind", KINDS)
@given(st.text(st.characters()))
def test_no_text_raises(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)  # lone surrogates, letters of no known script and all
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert all(piece.isprintable() for piece in tokenizer.pieces(ids))
    whole = tokenizer.decode(ids)
    if kind not in EXACT:  # what is streamed word by word adds up to the whole
        assert all(whole.startswith(tokenizer.decode(ids[:n])) for n in range(len(ids)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_read_as_training_was(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    lines = ["The cat", "", "", " sat .", "the mat"]
    whole = stream(tokenizer, lines)
    prompt = tokenizer.encode("\n".join(lines) + "\n")
    assert prompt == (whole[:-1] if kind in EXACT else whole)
    last = tokenizer.encode("mat")
    assert tokenizer.encode("cat\nmat")[-len(last) :] == last


def test_where_eos_stands() -> None:
    lines = ["a b", "", " ", '"', "c"]
    words = {
        "wikitext": 'a b <eos> <eos> <eos> " <eos> c <eos>',
        "basic_english": "a b <eos> c <eos>",
    }
    for kind, expected in words.items():
        tokenizer = trained(kind, 0, lines)
        assert tokenizer.decode(stream(tokenizer, lines), raw=True) == expected
        assert (
            tokenizer.decode(stream(tokenizer, lines)).lower().split()
            == expected.replace("<eos>", "").split()
        )
    documents = ["", " = A = ", "", "x", " = B = ", " = = C = = ", "<|endoftext|>", "y", "z"]
    documents += ["", " = D = ", ""]
    for kind in EXACT:
        tokenizer = TOKENIZERS[kind]
        # Neither a title without blank lines around it nor a second-level one opens a document.
        assert tokenizer.decode(stream(tokenizer, documents), raw=True) == (
            "\n = A = \n\nx\n = B = \n = = C = = \n<eos>y\nz\n\n<eos> = D = \n\n<eos>"
        )
        assert stream(tokenizer, []) == []


def test_words_unseen_have_somewhere_to_go() -> None:
    for lines in (["a a b"], ["a <unk> <unk> <unk> b"]):
        tokenizer = trained("wikitext", 0, lines)
        assert tokenizer.decode(tokenizer.encode("a zebra b"), raw=True) == "a <unk> b"
    tokenizer = trained("wikitext", 0, ["a a b"])
    assert tokenizer.pieces(range(4)) == ["a", "<eos>", "b", "<unk>"]
    # When cut, <unk> takes what is left out, and its rank with it.
    cut = trained("wikitext", 5, ["a a a b b b c c d d e e f"])
    assert cut.pieces(range(cut.vocab_size)) == ["<unk>", "a", "b", "c", "<eos>"]


def test_sizes_are_met_exactly() -> None:
    lines = [" ".join(f"w{i}" for i in range(n)) + " <unk>" for n in range(50)]
    for kind, size in (("basic_english", 11), ("wikitext", 13), ("bpe", 271), ("char", 261)):
        assert trained(kind, size, lines).vocab_size == size
    with pytest.raises(UserError, match="vocab_size is 200: char needs at least 259"):
        trained("char", 200, lines)


def test_text_spells_unknown_as_one_piece() -> None:
    assert TOKENIZERS["bpe"].pieces(TOKENIZERS["bpe"].encode("a <unk>")) == ["a", "␣<unk>"]
    assert TOKENIZERS["char"].pieces(TOKENIZERS["char"].encode("a <unk>")) == ["a", "␣", "<unk>"]
    assert not trained("bpe", 300, ["no such word"]).special_ids
    assert not trained("char", 300, ["no such word"]).special_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_line_gives_the_same_ids(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[kind]
    line = (" ".join(LINES) * 7).strip()
    whole = tokenizer.encode(line)
    monkeypatch.setattr(vocabulary, "_BATCH_CHARACTERS", 61)
    assert tokenizer.encode(line) == whole
    assert stream(tokenizer, [line, line])[: len(whole)] == whole
    monkeypatch.setattr(vocabulary, "_BATCH_CHARACTERS", 7)
    assert kind not in EXACT or tokenizer.decode(tokenizer.encode("语" * 41)) == "语" * 41


@pytest.mark.parametrize("kind", KINDS)
def test_saved_is_loaded(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokenizer.json"
    tokenizer = TOKENIZERS[kind]
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert (loaded.kind, loaded.fingerprint) == (kind, tokenizer.fingerprint)
    text = "The ΚΑΣ <eos> cat\n\n<unk> "
    assert loaded.encode(text) == tokenizer.encode(text)
    assert {p.name for p in path.parent.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(path)
    TOKENIZERS["wikitext"].save(path)
    whole = path.read_text(encoding="utf-8")
    no_eos = json.loads(whole)
    no_eos["model"]["vocab"] = {"<unk>": 0, "a": 1}
    unigram = {**no_eos, "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]}}
    for damaged in (whole[:-99], "{}", "", json.dumps(no_eos), json.dumps(unigram)):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged: .") as error:
            Tokenizer.load(path)
        assert "\n" not in str(error.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what transformers imports
def test_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokenizer = TOKENIZERS[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs, transformers.PreTrainedTokenizerFast)
    text = "The cat , it 's a <unk> zebra. Käse!"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.unk_token_id == tokenizer.unk_id
    assert len(theirs) == tokenizer.vocab_size
    if kind in EXACT:
        assert theirs.decode(tokenizer.encode(text)) == text


def test_same_ids_in_every_process() -> None:
    program = (
        "import test_tokenizer as t\n"
        "print([t.TOKENIZERS[k].fingerprint for k in t.KINDS])\n"
        "print([t.stream(t.TOKENIZERS[k], t.LINES) for k in t.KINDS])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            cwd=Path(__file__).parent,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert TOKENIZERS["bpe"].fingerprint in outputs.pop().decode()


def test_wikitext_figures(wikitext2: Path) -> None:
    corpus = open_corpus("wikitext-2")
    tokenizer = Tokenizer.train(TokenizerConfig("wikitext", 0), lambda: corpus.lines("train"))
    assert tokenizer.vocab_size == 33278
    assert tokenizer.pieces(range(5)) == ["the", ",", ".", "of", "<unk>"]
    counts = [Counter(stream(tokenizer, corpus.lines(split))) for split in SPLITS]
    assert [n.total() for n in counts] == [2088628, 217646, 245569]
    assert len(counts[0]) == 33278
    for split, n in zip(SPLITS, counts, strict=True):
        spelt = sum(map(tokenizer.n_spelt_unknown, corpus.lines(split)))
        assert n[tokenizer.unk_id or 0] == spelt, "no word is out of vocabulary"


def test_basic_english_figures(wikitext2: Path) -> None:
    corpus = open_corpus("wikitext-2")
    config = TokenizerConfig("basic_english", 0)
    tokenizer = Tokenizer.train(config, lambda: corpus.lines("train"))
    assert tokenizer.vocab_size == 28785
    for split, n_words in zip(SPLITS, (2049990, 214417, 241859), strict=True):
        ids = [i for i in stream(tokenizer, corpus.lines(split)) if i != tokenizer.eos_id]
        classic = [word for line in corpus.lines(split) for word in basic_english(line)]
        assert len(ids) == len(classic) == n_words
        assert ids == [tokenizer.token_to_id(word) or 0 for word in classic]


# minbpe#82: hours.
@pytest.mark.slow
def test_8000_merges_in_a_minute(wikitext2: Path) -> None:
    corpus = open_corpus("wikitext-2")
    started_at = time.perf_counter()
    size = 256 + 8000 + 3
    tokenizer = Tokenizer.train(TokenizerConfig("bpe", size), lambda: corpus.lines("train"))
    assert time.perf_counter() - started_at < 60
    assert tokenizer.vocab_size == size
    lines = list(corpus.lines("valid"))
    ids = stream(tokenizer, lines)
    assert tokenizer.decode(ids) == "".join(line + "\n" for line in lines)
    assert ids.count(tokenizer.eos_id) == 60
    again = Tokenizer.train(TokenizerConfig("bpe", size), lambda: corpus.lines("train"))
    assert again.fingerprint == tokenizer.fingerprint
