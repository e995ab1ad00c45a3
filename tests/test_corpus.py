"""Text is found where the user says, in the splits that were promised, or one line says why not."""

import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from minigpt import corpus as corpus_module
from minigpt import downloads
from minigpt.corpus import SPLITS, available_offline, cache_folder, corpus_names, open_corpus
from minigpt.errors import UserError


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with no data given and nothing in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_DATA", raising=False)
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    return tmp_path


def written(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def texts(name: str) -> list[str]:
    corpus = open_corpus(name)
    return ["\n".join(corpus.lines(split)) for split in SPLITS]


# A file of one's own


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


def test_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    lines = [f"Zeile {i} ä" for i in range(23)]
    plain = texts(written(tmp_path / "a.txt", "\n".join(lines)))
    assert texts(written(tmp_path / "b.txt", "\ufeff" + "\r\n".join(lines) + "\r\n")) == plain
    assert texts(written(tmp_path / "c.txt", "\r".join(lines))) == plain


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
def test_unknown_names(elsewhere: Path, name: str, message: str) -> None:
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
        assert corpus.sha256(split) == downloads.TEXTS["wikitext-2"].parts[split].proof
    assert available_offline("wikitext-2")
    assert "wikitext-2" in corpus_names()


@pytest.mark.parametrize("place", ["given", "data", "cache"])
def test_where_wikitext2_is_looked_for(
    elsewhere: Path, place: str, small_wikitext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIGPT_DATA", str(elsewhere / "given"))
    monkeypatch.setattr(downloads, "require_network", refuse)
    assert not available_offline("wikitext-2")
    for split in SPLITS:
        written(elsewhere / place / f"wikitext-2/wiki.{split}.tokens", small_wikitext)
    assert available_offline("wikitext-2")
    assert texts("wikitext-2")[2] + "\n" == small_wikitext
    written(elsewhere / place / "wikitext-2/wiki.test.tokens", small_wikitext.replace("\n", "\r\n"))
    message = "no network today" if place == "cache" else "is not the official file .sha256 differs"
    with pytest.raises(UserError, match=message.replace(".sha256", r".its sha256")):
        open_corpus("wikitext-2")


def refuse(*_: object, **__: object) -> None:
    raise ConnectionError("no network today\nand a second line")


# Downloads


@pytest.fixture
def small_wikitext(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a small text be the whole of WikiText-2: each split, verified by the hash it has."""
    text = " \n = Title = \n \n The text of an <unk> article . \n"
    proof = hashlib.sha256(text.encode()).hexdigest()
    real = downloads.TEXTS["wikitext-2"]
    parts = {split: part._replace(proof=proof) for split, part in real.parts.items()}
    monkeypatch.setitem(downloads.TEXTS, "wikitext-2", real._replace(parts=parts))
    return text


def rows_of(text: str) -> list[str]:
    """Return the rows as the hub has them: a blank line is an empty row."""
    return ["" if line == " \n" else line for line in text.splitlines(keepends=True)]


def saved_parquet(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"text": rows_of(text)}), path)
    return path


@pytest.fixture
def hub(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[str], Path]]:
    """Stand in for the hub: `hub["give"]` says what comes for a file."""
    given: dict[str, Callable[[str], Path]] = {}
    monkeypatch.setattr(downloads, "require_network", lambda: None)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repository, source, **_: str(given["give"](source)),
    )
    return given


def test_a_download_gives_the_official_bytes(
    elsewhere: Path, hub: dict[str, Callable[[str], Path]], small_wikitext: str
) -> None:
    hub["give"] = lambda source: saved_parquet(elsewhere / "hub" / source, small_wikitext)
    corpus = open_corpus("wikitext-2")
    assert corpus.source == "downloaded"
    files = sorted((elsewhere / "cache/wikitext-2").iterdir())
    assert [f.name for f in files] == [f"wiki.{s}.tokens" for s in ("test", "train", "valid")]
    assert all(f.read_bytes() == small_wikitext.encode() for f in files)
    assert open_corpus("wikitext-2").source == str(elsewhere / "cache/wikitext-2")


def forbidden(source: str) -> Path:
    raise RuntimeError("403 Forbidden: None.\nCannot access content at …")


@pytest.mark.parametrize("fault", ["403", "cut", "wrong", "page", "column"])
def test_a_failed_download_is_one_line_and_leaves_nothing(
    elsewhere: Path, hub: dict[str, Callable[[str], Path]], small_wikitext: str, fault: str
) -> None:
    def give(source: str) -> Path:
        if fault == "403":
            return forbidden(source)
        text = small_wikitext + "more\n" if fault == "wrong" else small_wikitext
        path = saved_parquet(elsewhere / "hub" / source, text)
        if fault == "cut":
            path.write_bytes(path.read_bytes()[:-99])
        if fault == "page":
            path.write_text("<html>log in to the hotel</html>")
        if fault == "column":
            parquet.write_table(pyarrow.table({"words": ["a"]}), path)
        return path

    hub["give"] = give
    says = {
        "403": "403 Forbidden",
        "cut": "cut short",
        "page": "no parquet",
        "wrong": "other bytes",
    }
    with pytest.raises(UserError, match=says.get(fault, "wikitext-2 could not")) as error:
        open_corpus("wikitext-2")
    message = str(error.value)
    assert message.startswith("wikitext-2 could not be downloaded (")
    assert (
        "put wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens into data/wikitext-2" in message
    )
    assert "\n" not in message
    assert not [path for path in (elsewhere / "cache").rglob("*") if path.is_file()]
    assert not available_offline("wikitext-2")


def test_what_a_proxy_left_in_the_hubs_cache_is_fetched_anew(
    elsewhere: Path, small_wikitext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(repository: str, source: str, force_download: bool, **_: object) -> str:
        path = saved_parquet(elsewhere / "hub" / source, small_wikitext)
        if not force_download:
            path.write_text("<html>log in to the hotel</html>")
        return str(path)

    monkeypatch.setattr(downloads, "require_network", lambda: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", give)
    assert texts("wikitext-2")[0] + "\n" == small_wikitext


def test_tinystories_has_no_test_of_its_own(
    elsewhere: Path, hub: dict[str, Callable[[str], Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    story = "Once upon a time .\n<|endoftext|>\n"
    proof = hashlib.sha256(story.encode()).hexdigest()
    real = downloads.TEXTS["tinystories"]
    parts = {split: part._replace(proof=proof) for split, part in real.parts.items()}
    monkeypatch.setitem(downloads.TEXTS, "tinystories", real._replace(parts=parts))
    hub["give"] = lambda source: Path(written(elsewhere / "hub" / source, story))
    assert texts("tinystories") == [story[:-1], "Once upon a time .", "<|endoftext|>"]


@pytest.fixture
def server() -> Iterator[str]:
    """Answer 403 to everything, as the old address of WikiText-2 does."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815, the name that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{refusing.server_port}"
        refusing.shutdown()


@pytest.mark.parametrize("name", ["wikitext-2", "hf:someone/something"])
@pytest.mark.parametrize("network", ["refuses", "none"])
def test_the_real_client_gives_up_within_seconds(
    tmp_path: Path, server: str, name: str, network: str
) -> None:
    program = (
        "from minigpt.corpus import *\n"
        f"try: open_corpus({name!r})\n"
        "except ValueError as e: print(e)"
    )
    endpoint = server if network == "refuses" else "http://127.0.0.1:9"
    started_at = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "MINIGPT_CACHE": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert time.perf_counter() - started_at < 20
    message = result.stdout.decode()
    assert message.count("\n") == 1
    why = {"refuses": "(the hub answers 403)", "none": "(no connection to http://127.0.0.1:9)"}
    assert why[network] in message
    assert not list(tmp_path.rglob("*.tokens*"))


# Data sets of the hub


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"train": 101, "validation": 7, "test": 5}, [101, 7, 5]),
        ({"train": 101}, [91, 5, 5]),
        ({"train": 101, "test": 11}, [101, 5, 6]),
        ({"train": 101, "validation": 11}, [101, 5, 6]),
    ],
)
def test_a_data_set_of_the_hub(
    given: dict[str, int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {
        s: {"id": [*range(n)], "story": [f"{s} {i}\n" for i in range(n)]} for s, n in given.items()
    }
    found = {split: datasets.Dataset.from_dict(column) for split, column in columns.items()}
    monkeypatch.setattr(downloads, "require_network", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: found)
    corpus = open_corpus("hf:someone/stories:small")
    lines = [list(corpus.lines(split)) for split in SPLITS]
    assert [len(split) for split in lines] == sizes
    assert len({line for split in lines for line in split}) == sum(sizes)
    assert lines[0][3] == "train 3"


def test_a_data_set_without_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(downloads, "require_network", lambda: None)
    for columns in ({"label": [1, 2, 3]}, {"question": ["a"] * 3, "answer": ["b"] * 3}):
        found = {"train": datasets.Dataset.from_dict(columns)}
        monkeypatch.setattr(datasets, "load_dataset", lambda name, config, found=found: found)
        with pytest.raises(UserError, match=f"its columns are {', '.join(columns)}"):
            open_corpus("hf:someone/numbers")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {"test": None})
    with pytest.raises(UserError, match="has no train split, only test"):
        open_corpus("hf:someone/numbers")


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
