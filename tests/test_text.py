"""The classic names behave as torchtext did."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt.errors import UserError
from minigpt.text import Vocab, WikiText2, build_vocab_from_iterator, get_tokenizer, vocab

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
    # torchtext would load these libraries; here one passes their function.
    for library in ("spacy", "moses", "toktok", "revtok", "subword"):
        with pytest.raises(UserError, match=f"tokenizer {library} is not known: .* a function"):
            get_tokenizer(library, language="de")
    with pytest.raises(UserError, match="tokenizer 7 is not known"):
        get_tokenizer(7)  # type: ignore[arg-type]


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


def test_min_freq_is_for_words_alone() -> None:
    lines = [["b"] * 3, ["a"] * 2, ["c", "<pad>"]]
    for min_freq, words in [(4, []), (3, ["b"]), (2, ["b", "a"]), (1, ["b", "a", "c"])]:
        for first in (True, False):
            built = build_vocab_from_iterator(lines, min_freq, ["<pad>", "<unk>"], first)
            specials = ["<pad>", "<unk>"]
            assert built.get_itos() == (specials + words if first else words + specials)
    for min_freq in (0, -1):  # not an error there either: every word was counted once at least
        assert len(build_vocab_from_iterator(lines, min_freq)) == 4
    # The most frequent are taken first, then the rare ones among them fall away.
    assert build_vocab_from_iterator(lines, 3, max_tokens=2).get_itos() == ["b"]


def test_what_an_iterator_may_yield() -> None:
    assert build_vocab_from_iterator([]).get_itos() == []
    assert build_vocab_from_iterator([[], None, ["a"]]).get_itos() == ["a"]  # type: ignore[list-item]
    assert build_vocab_from_iterator(iter(["ab", "b"])).get_itos() == ["b", "a"]  # letters
    assert build_vocab_from_iterator([{"a": 2, "b": 5}]).get_itos() == ["b", "a"]  # counts
    with pytest.raises(TypeError, match="7 is no token: a token is text, not int"):
        build_vocab_from_iterator([[7]])  # type: ignore[list-item]


def test_a_vocabulary_of_counts_keeps_their_order() -> None:
    counts = OrderedDict([("hello", 4), ("<pad>", 9), ("world", 3), ("rare", 2), ("never", 0)])
    assert vocab(counts).get_itos() == ["hello", "<pad>", "world", "rare"]
    built = vocab(counts, min_freq=3, specials=["<unk>", "<pad>"])
    assert built.get_itos() == ["<unk>", "<pad>", "hello", "world"]
    last = vocab(counts, 3, ["<unk>", "<pad>"], special_first=False)
    assert last.get_itos() == ["hello", "world", "<unk>", "<pad>"]
    assert list(counts) == ["hello", "<pad>", "world", "rare", "never"], "they are left alone"
    assert len(vocab(counts, 0)) == 5
    with pytest.raises(RuntimeError, match="Duplicate token found in tokens list: <unk>"):
        vocab(counts, specials=["<unk>", "<unk>"])


@pytest.mark.parametrize(
    "ask",
    [
        lambda words: words("ab"),  # would be two letters
        lambda words: words.lookup_indices("ab"),
        lambda words: words([["a"], ["b"]]),
        lambda words: words(["a", 1]),
        lambda words: words([None]),
        lambda words: words[0],
        lambda words: 0 in words,
        lambda words: words.append_token(7),
        lambda words: words.insert_token(7, 0),
        lambda words: words.set_default_index("<unk>"),
        lambda words: words.set_default_index(0.5),
        lambda words: Vocab(["a", 7]),
    ],
)
def test_what_is_no_token_is_never_an_unknown_word(ask: Callable[[Vocab], object]) -> None:
    words = build_vocab_from_iterator([["a", "b"]])
    words.set_default_index(0)
    with pytest.raises(TypeError):
        ask(words)
    assert words.get_itos() == ["a", "b"]
    assert words.get_default_index() == 0


def test_indices_outside() -> None:
    words = build_vocab_from_iterator([["a", "b"]])
    words.set_default_index(-1)  # any number will do
    assert words(["b", "?"]) == [1, -1]
    assert words([]) == []
    assert words(("a", "b")) == words(iter("ab")) == [0, 1]
    for outside in (-1, 2):
        with pytest.raises(RuntimeError, match=f"index {outside} at position 1 is out of bounds"):
            words.lookup_tokens([0, outside])
    assert words.lookup_tokens([]) == []


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


def test_wikitext2_is_found_where_torchtext_put_it(wikitext2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "datasets" / "WikiText2" / "wikitext-2"
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(f" the {split} text \n" * 7)
    assert list(WikiText2(root=tmp_path, split="valid")) == [" the valid text \n"] * 7


def test_wikitext2_refuses_other_splits() -> None:
    with pytest.raises(UserError, match=r"split validation is not known .*did you mean valid"):
        WikiText2(split="validation")
    with pytest.raises(UserError, match=r'write WikiText2\(split="train"\)'):
        WikiText2("train")
