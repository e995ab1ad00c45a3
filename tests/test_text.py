"""The classic names behave as torchtext did."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt.config import UserError
from minigpt.text import WikiText2, build_vocab_from_iterator, get_tokenizer

SPECIALS = ["<unk>", "<pad>", "<bos>", "<eos>"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("You can now install TorchText using pip!", "you can now install torchtext using pip !"),
        ("It's", "it ' s"),
        ('"Homer", (he said); now: "1,000.5"?', "homer , ( he said ) now 1 , 000 . 5 ?"),
        ("a<br />b <BR /> c<br/>d", "a b c<br/>d"),
        ('a<b"r />b', "a b"),  # the quotation mark goes before line breaks are looked for
        ("x@-@y <unk>'s ÉCOLE", "x@-@y <unk> ' s école"),
        ("ΣΑΣ\x1c\x1fa\xa0b\u2003c", "σας a b c"),
        (" \t\n", ""),
    ],
)
def test_basic_english(line: str, words: str) -> None:
    assert get_tokenizer("basic_english")(line) == words.split()


def test_get_tokenizer_takes_none_and_functions() -> None:
    assert get_tokenizer(None)("A b") == ["A", "b"]
    assert get_tokenizer(str.splitlines)("A\nb") == ["A", "b"]
    with pytest.raises(UserError, match=r"basic_englsh .*did you mean basic_english"):
        get_tokenizer("basic_englsh")
    with pytest.raises(UserError, match="language is de"):
        get_tokenizer("basic_english", language="de")


def test_vocab_as_in_the_classic_tutorial() -> None:
    vocab = build_vocab_from_iterator([["a", "b", "a"], ["c", "b", "a"]], specials=["<unk>"])
    assert vocab.get_itos() == ["<unk>", "a", "b", "c"]
    assert vocab.get_stoi() == {"<unk>": 0, "a": 1, "b": 2, "c": 3}
    assert "b" in vocab
    assert "d" not in vocab
    assert vocab.get_default_index() is None
    for ask in (lambda: vocab["d"], lambda: vocab(["a", "d"])):
        with pytest.raises(RuntimeError, match="Token d not found and default index is not set"):
            ask()
    vocab.set_default_index(vocab["<unk>"])
    assert vocab(["a", "d"]) == vocab.forward(["a", "d"]) == vocab.lookup_indices(["a", "d"])
    assert vocab(["a", "d"]) == [1, 0]
    assert vocab.lookup_tokens([3, 0]) == ["c", "<unk>"]
    vocab.set_default_index(None)
    with pytest.raises(RuntimeError):
        vocab["d"]


def test_vocab_can_grow() -> None:
    vocab = build_vocab_from_iterator([["a", "b"]])
    vocab.set_default_index(0)
    vocab.insert_token("<new>", 0)
    vocab.append_token("z")
    assert vocab.get_itos() == ["<new>", "a", "b", "z"]
    assert vocab(["z", "b", "<new>", "?"]) == [3, 2, 0, 0]
    for grow in (lambda: vocab.append_token("a"), lambda: vocab.insert_token("a", 1)):
        with pytest.raises(RuntimeError, match="already exists in the Vocab with index: 1"):
            grow()
    for index in (-1, 4, 5):
        with pytest.raises(RuntimeError, match="out of bounds for vocab of size 4"):
            vocab.lookup_token(index)
    with pytest.raises(RuntimeError, match="out of bounds"):
        vocab.insert_token("y", 5)


def test_oddities_of_build_vocab() -> None:
    lines = [["<unk>"] * 5, ["b"] * 3, ["a"] * 3, ["c"]]
    first = build_vocab_from_iterator(lines, specials=["<pad>", "<unk>"])
    assert first.get_itos() == ["<pad>", "<unk>", "a", "b", "c"]  # a special keeps its place
    last = build_vocab_from_iterator(lines, specials=["<pad>", "<unk>"], special_first=False)
    assert last.get_itos() == ["a", "b", "c", "<pad>", "<unk>"]
    # Counted before the special is taken out: one entry less than asked for.
    cut = build_vocab_from_iterator(lines, specials=["<pad>", "<unk>"], max_tokens=4)
    assert cut.get_itos() == ["<pad>", "<unk>", "a"]
    rare = build_vocab_from_iterator(lines, min_freq=3, specials=["<pad>"])
    assert rare.get_itos() == ["<pad>", "<unk>", "a", "b"]
    with pytest.raises(AssertionError, match="entirely special"):
        build_vocab_from_iterator(lines, specials=["<pad>", "<unk>"], max_tokens=2)
    with pytest.raises(RuntimeError, match="Duplicate token"):
        build_vocab_from_iterator(lines, specials=["<pad>", "<pad>"])


@given(st.lists(st.lists(st.text("abc", max_size=2))), st.integers(1, 3))
def test_frequent_first_then_alphabet(lines: list[list[str]], min_freq: int) -> None:
    counts = Counter(word for line in lines for word in line)
    words = build_vocab_from_iterator(iter(lines), min_freq=min_freq).get_itos()
    assert {*words} == {word for word, n in counts.items() if n >= min_freq}
    keys = [(-counts[word], word) for word in words]
    assert keys == sorted(keys)


def test_classic_figures(wikitext2: Path) -> None:
    tokenizer = get_tokenizer("basic_english")
    train, valid, test = ([tokenizer(line) for line in lines] for lines in WikiText2())
    assert [sum(map(len, split)) for split in (train, valid, test)] == [2049990, 214417, 241859]
    vocab = build_vocab_from_iterator(train, specials=SPECIALS)
    assert len(vocab) == 28785
    assert vocab.get_itos()[:8] == [*SPECIALS, "the", ",", ".", "of"]
    cut = build_vocab_from_iterator(train, specials=SPECIALS, max_tokens=10000)
    assert len(cut) == 9999
    assert cut.get_itos() == vocab.get_itos()[:9999]


def test_wikitext2_gives_lines_with_their_ends(wikitext2: Path) -> None:
    train = WikiText2(split="train")
    assert not isinstance(train, tuple)
    lines = list(train)
    assert len(lines) == 36718
    assert "".join(lines).encode() == (wikitext2 / "wiki.train.tokens").read_bytes()
    assert len(list(train)) == 36718, "a second pass starts again"
    assert [next(train), next(train)] == lines[:2]
    valid, test = WikiText2(root=wikitext2, split=("valid", "test"))
    assert (len(list(valid)), len(list(test))) == (3760, 4358)


def test_wikitext2_refuses_other_splits() -> None:
    with pytest.raises(UserError, match=r"split validation is not known .*did you mean valid"):
        WikiText2(split="validation")
    with pytest.raises(UserError, match=r'write WikiText2\(split="train"\)'):
        WikiText2("train")
