"""Text is found where the user says, in the splits that were promised, or one line says why not."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt import corpus as corpus_module
from minigpt.catalogue import TEXTS
from minigpt.corpus import SPLITS, available_offline, cache_folder, corpus_names, open_corpus
from minigpt.errors import UserError
from texts import texts, written

# A file of one's own


# transformers#18167: blocks of unequal length, or none, of a small file.
@pytest.mark.parametrize(
    ("n", "sizes"), [(1001, (901, 50, 50)), (20, (18, 1, 1)), (39, (37, 1, 1))]
)
def test_a_file_is_split_by_lines(tmp_path: Path, n: int, sizes: tuple[int, ...]) -> None:
    lines = [f"line {i} 语" for i in range(n)]
    corpus = open_corpus(written(tmp_path / "a.txt", "\n".join(lines)))
    splits = [list(corpus.lines(split)) for split in SPLITS]
    assert [len(split) for split in splits] == list(sizes)
    assert [line for split in splits for line in split] == lines
    text = "".join(line + "\n" for line in splits[1])
    assert corpus.sha256("valid") == hashlib.sha256(text.encode()).hexdigest()


# transformers#18167: blocks of unequal length, or none, of a small file.
@pytest.mark.parametrize("text", ["one two three\nfour five six\nseven eight nine\n", "word " * 99])
def test_few_lines_are_split_between_words(tmp_path: Path, text: str) -> None:
    splits = texts(written(tmp_path / "a.txt", text))
    assert " ".join(splits).split() == text.split()
    assert all(split.strip() for split in splits)
    assert len(splits[0]) > 5 * len(splits[1])


def test_a_huge_line_without_blanks(tmp_path: Path) -> None:
    text = "的一是不了" * 200_000
    splits = texts(written(tmp_path / "a.txt", text))
    assert "".join(splits) == text
    assert [len(split) for split in splits] == [900_000, 50_000, 50_000]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0")), min_size=20))
def test_no_line_is_lost(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    name = written(path, "".join(line + "\n" for line in [*lines, "the last"]))
    corpus = open_corpus(name)
    found = [line for split in SPLITS for line in corpus.lines(split)]
    assert found == [lines[0].removeprefix("\ufeff"), *lines[1:], "the last"]


def test_another_split_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("a b\n" * 40)
    with pytest.raises(UserError, match=r"split tset is not known \(did you mean test\?\)"):
        open_corpus(str(tmp_path / "some.txt")).lines("tset")  # type: ignore[arg-type]


# nanoGPT#401, #109: one's own text, Chinese or Bengali.
def test_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    lines = [f"Zeile {i} ä" for i in range(23)]
    plain = texts(written(tmp_path / "a.txt", "\n".join(lines)))
    assert texts(written(tmp_path / "b.txt", "\ufeff" + "\r\n".join(lines) + "\r\n")) == plain
    assert texts(written(tmp_path / "c.txt", "\r".join(lines))) == plain


# nanoGPT#711: files opened without an encoding.
def test_works_where_the_locale_is_not_utf8(tmp_path: Path) -> None:
    name = written(tmp_path / "a.txt", "语言 ä\n" * 40)
    program = (
        f"from minigpt.corpus import *; print(ascii(next(open_corpus({name!r}).lines('test'))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
    )
    assert result.stdout.decode().strip() == ascii("语言 ä")


CHINESE = "语言模型读了很多文字。\n" * 30


# nanoGPT#401, #109: one's own text, Chinese or Bengali.
# transformers#18167: blocks of unequal length, or none, of a small file.
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            CHINESE.encode("gb18030"),
            r"not UTF-8 but looks like GB18030: .*iconv -f GB18030 -t UTF-8",
        ),
        (CHINESE.encode("utf-16"), "not UTF-8 but looks like UTF-16: "),
        ("Un été à la plage\n".encode("latin-1") * 30, "not UTF-8 but looks like LATIN1: "),
        (b"\x7fELF\0\0\1\xff\n" * 30, "is not text .* give a text file in UTF-8"),
        ("plain\n".encode("utf-16-le") * 30, "is not text"),
        (b"", r"a\.txt is empty"),
        (b"\n \n\t\n" * 30, r"a\.txt is empty"),
        (b"\xef\xbb\xbf", r"a\.txt is empty"),
        (b"a b\n", "too short to be split: give at least 20 lines"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_corpus(written(tmp_path / "a.txt", content))
    assert "\n" not in str(error.value)


# Folders


@pytest.mark.parametrize("layout", ["wiki.{}.tokens", "wiki.{}.raw", "{}.txt"])
def test_a_folder_with_the_three_splits(tmp_path: Path, layout: str) -> None:
    for split in SPLITS:
        written(tmp_path / layout.format(split), f"{split} text\n")
    written(tmp_path / "notes.txt", "not part of it")
    assert texts(str(tmp_path)) == [f"{split} text" for split in SPLITS]
    (tmp_path / layout.format("valid")).unlink()
    with pytest.raises(UserError, match=r"has no \S*valid\S*: .* needs all of them"):
        open_corpus(str(tmp_path))


def test_a_folder_of_texts_is_split_by_file(tmp_path: Path) -> None:
    for i in range(43):
        written(tmp_path / f"{i:02}.txt", f"book {i}\nend")
    corpus = open_corpus(str(tmp_path))
    books = {split: [x for x in corpus.lines(split) if x != "end"] for split in SPLITS}
    assert {split: len(found) for split, found in books.items()} == {
        "train": 39,
        "valid": 2,
        "test": 2,
    }
    in_order = [book for found in books.values() for book in found]
    assert in_order == [f"book {i}" for i in range(43)]


def test_folders_that_have_too_little(tmp_path: Path) -> None:
    for n in (0, 2):
        for i in range(n):
            written(tmp_path / f"{i}.txt", "text\n" * 30)
        with pytest.raises(UserError, match=f"has {n} .txt files: give a folder of at least three"):
            open_corpus(str(tmp_path))
    (tmp_path / "0.txt").unlink()
    assert [len(split) for split in texts(str(tmp_path))] == [28 * 5 - 1, 4, 4]
    written(tmp_path / "2.txt", "")
    written(tmp_path / "3.txt", "text")
    with pytest.raises(UserError, match=r"2\.txt is empty"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wikitex-2", r"wikitex-2 is not known \(did you mean wikitext-2\?\): take wikitext-2, "),
        ("pythondocs", r"did you mean python-docs\?"),
        ("missing.txt", r"data missing\.txt does not exist: check the path"),
        ("no/such/folder", "data no/such/folder does not exist"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_corpus(name)


# The built-in corpus


def test_python_docs_is_enough_to_train_on() -> None:
    corpus = open_corpus("python-docs")
    assert available_offline("python-docs")
    paragraphs = [[line for line in corpus.lines(split) if line] for split in SPLITS]
    sizes = [sum(map(len, split)) for split in paragraphs]
    assert sizes[0] > 500_000
    assert min(sizes[1:]) > 20_000
    prose = [{line for line in split if not line.startswith(" = ")} for split in paragraphs]
    assert len(set.union(*prose)) == sum(map(len, prose)), "no paragraph is in two splits"
    assert sum(map(len, prose)) == sum(
        not x.startswith(" = ") for split in paragraphs for x in split
    )
    assert not any(
        mark in line for split in prose for line in split for mark in (">>>", "``", "\t")
    )


def test_python_docs_is_the_same_in_every_process() -> None:
    program = "from minigpt.corpus import *; print(open_corpus('python-docs').sha256('train'))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
    )
    assert result.stdout.decode().strip() == open_corpus("python-docs").sha256("train")


# WikiText-2


def test_the_official_files(wikitext2: Path) -> None:
    corpus = open_corpus("wikitext-2")
    assert corpus.source == str(wikitext2)
    for split in SPLITS:
        assert corpus.sha256(split) == TEXTS["wikitext-2"].parts[split].proof
    assert available_offline("wikitext-2")
    assert "wikitext-2" in corpus_names()


# The cache


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == Path(os.environ["MINIGPT_CACHE"])
    monkeypatch.delenv("MINIGPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "minigpt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "minigpt"
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(corpus_module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache_folder() == tmp_path / "minigpt"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a system with named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for name in (str(tmp_path / "pipe.txt"), os.devnull):
        with pytest.raises(UserError, match="is not a regular file"):
            open_corpus(name)
