"""Where text comes from: a name, a file, a folder or a data set of the hub, in three splits.

In: what the user calls it. Out: a `Corpus`, which reads its lines one by one, as often as it is
asked to. `downloads` brings what is not there yet.
"""

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

from minigpt import downloads, python_docs
from minigpt.catalogue import TEXTS
from minigpt.errors import UserError, closest

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Read = Callable[[], Iterator[str]]

# How a folder may name its three splits.
_LAYOUTS = ("wiki.{}.tokens", "wiki.{}.raw", "{}.txt")
# A text of fewer lines is cut between words: the last 5 % of its lines would be none.
_MIN_LINES = 20
_ROWS = 1_000  # of a data set, read at once


@dataclass(frozen=True)
class Corpus:
    """A text in three splits."""

    name: str
    """What `open_corpus` finds the same text by; a data set's has its revision."""
    source: str
    """Where it was found, for the user to read."""
    readers: Mapping[Split, Read] = field(repr=False)

    def lines(self, split: Split) -> Iterator[str]:
        """Return the lines of `split`, each without its line end. UserError for another split."""
        if split not in tuple(self.readers):  # whatever it is, a list too
            near = closest(str(split), SPLITS)
            raise UserError(f"split {split} is not known{near}: take train, valid or test")
        return self.readers[split]()

    def sha256(self, split: Split) -> str:
        """Return the hash of the text of `split` in UTF-8, each line ended by "\\n"."""
        digest = hashlib.sha256()
        for line in self.lines(split):
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()


def corpus_names() -> list[str]:
    """Return the corpora that have a name."""
    return [*TEXTS, "python-docs"]


def open_corpus(name: str) -> Corpus:
    """Return the corpus that `name` names: one of `corpus_names`, `hf:NAME`, a file or a folder.

    A text file is read through once, to know that it is one and how many lines it has. Raises
    UserError for what does not exist, is empty, is not UTF-8 or cannot be downloaded.
    """
    if name in TEXTS:
        return _hub_text(name)
    if name == "python-docs":
        return _python_docs()
    if name.startswith("hf:"):
        return _dataset(name)
    path = _expanded(Path(name))
    if path.is_dir():
        return _folder(name, path)
    if path.is_file():
        return _file(name, path)
    if path.exists():  # a pipe or a device may never end
        raise UserError(f"data {name} is not a regular file: save the text to a .txt file first")
    names = corpus_names()
    if "/" in name or os.sep in name or path.suffix:
        raise UserError(f"data {name} does not exist: check the path")
    raise UserError(
        f"data {name} is not known{closest(name, names)}: take {', '.join(names)}, hf:NAME, "
        "a .txt file or a folder"
    )


def open_text(path: Path) -> Corpus:
    """Return the whole of a text file as a corpus of one split, test: it is there to be scored.

    Raises UserError for what does not exist, is empty or is not UTF-8.
    """
    file = _expanded(path)
    if not file.is_file():
        what = "is not a regular file" if file.exists() else "does not exist"
        raise UserError(f"text {path} {what}: give the path of a text file")
    _n_lines(file)
    return Corpus(str(path), str(file), {"test": partial(_read, file)})


def available_offline(name: str) -> bool:
    """Can the corpus called `name` be opened without a download?"""
    if name not in TEXTS:
        return not name.startswith("hf:")
    return any(_has_all(name, place) for place in _places(name)) or downloads.is_cached(name)


def _expanded(path: Path) -> Path:
    """Return path with a leading ~ replaced by the home it means, where there is such a home."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def cache_folder() -> Path:
    """Return the folder for what can be made again.

    $MINIGPT_CACHE, else $XDG_CACHE_HOME/minigpt, else ~/.cache/minigpt; a temporary one for a user
    without a home.
    """
    if chosen := os.environ.get("MINIGPT_CACHE"):
        return _expanded(Path(chosen))
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "minigpt"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(os.devnull)
    if home.is_dir() and os.access(home, os.W_OK):
        return home / ".cache" / "minigpt"
    return Path(tempfile.gettempdir()) / "minigpt"


def _places(name: str) -> list[Path]:
    given = os.environ.get("MINIGPT_DATA")
    return [*([Path(given) / name] if given else []), Path("data") / name, cache_folder() / name]


def _has_all(name: str, folder: Path) -> bool:
    return all((folder / part.file).is_file() for part in TEXTS[name].parts.values())


def _hub_text(name: str) -> Corpus:
    """Open a text of the hub from the first place that has it, or else download it."""
    text = TEXTS[name]
    *given, cache = _places(name)
    folder = next((place for place in given if _has_all(name, place)), cache)
    if folder == cache:
        was_there = _has_all(name, cache)
        downloads.download(name, cache)
        source = str(cache) if was_there else "downloaded"
    else:
        source = str(folder)
        for part in text.parts.values():
            if not downloads.is_whole(folder / part.file, part):
                raise UserError(
                    f"{folder / part.file} is not the official file (its bytes differ): replace "
                    "it, or take it away and it is downloaded"
                )
    readers = {split: partial(_read, folder / part.file) for split, part in text.parts.items()}
    if "test" not in readers:
        valid = folder / text.parts["valid"].file
        half = _n_lines(valid) // 2
        readers["valid"] = partial(_read, valid, 0, half)
        readers["test"] = partial(_read, valid, half)
    return Corpus(name, source, {split: readers[split] for split in SPLITS})


def _python_docs() -> Corpus:
    """Open the built-in corpus: every 20th document is valid, and another one test."""

    def read(split: Split) -> Iterator[str]:
        place: dict[int, Split] = {9: "valid", 19: "test"}
        for i, document in enumerate(python_docs.documents()):
            if place.get(i % 20, "train") == split:
                # As WikiText sets its articles, so that the same rule tells where one begins.
                yield from ("", f" = {document.title} = ", "", *document.paragraphs)

    source = f"the documentation inside Python {platform.python_version()}"
    return Corpus("python-docs", source, {split: partial(read, split) for split in SPLITS})


def _folder(name: str, folder: Path) -> Corpus:
    """Open a folder that has the three splits, or else text files to be split."""
    for layout in _LAYOUTS:
        paths = {split: folder / layout.format(split) for split in SPLITS}
        missing = [path.name for path in paths.values() if not path.is_file()]
        if len(missing) == len(SPLITS):
            continue
        if missing:
            raise UserError(
                f"data {name} has no {' and no '.join(missing)}: a folder with one of the three "
                "splits needs all of them"
            )
        for path in paths.values():
            _n_lines(path)
        readers = {split: partial(_read, path) for split, path in paths.items()}
        return Corpus(name, str(folder), readers)
    files = sorted(folder.glob("*.txt"))
    if len(files) == 1:
        return _file(name, files[0])
    if len(files) < len(SPLITS):
        raise UserError(
            f"data {name} has {len(files)} .txt files: give a folder of at least three, one with "
            "train.txt, valid.txt and test.txt, or a file"
        )
    for path in files:
        _n_lines(path)
    valid, test = _cuts(len(files))
    by_split = {"train": files[:valid], "valid": files[valid:test], "test": files[test:]}

    def read(paths: Iterable[Path]) -> Iterator[str]:
        return chain.from_iterable(map(_read, paths))

    return Corpus(name, str(folder), {split: partial(read, by_split[split]) for split in SPLITS})


def _file(name: str, path: Path) -> Corpus:
    """Open a text file: the first 90 % of its lines are train, the next 5 % valid, then test."""
    n_lines = _n_lines(path)
    if n_lines < _MIN_LINES:
        return Corpus(name, str(path), _split_between_words(name, "\n".join(_read(path))))
    valid, test = _cuts(n_lines)
    readers: dict[Split, Read] = {
        "train": partial(_read, path, 0, valid),
        "valid": partial(_read, path, valid, test),
        "test": partial(_read, path, test),
    }
    return Corpus(name, str(path), readers)


def _cuts(n: int) -> tuple[int, int]:
    """Return where valid and where test begins among `n` things, three or more of them."""
    n_held_out = max(1, n * 5 // 100)
    return n - 2 * n_held_out, n - n_held_out


def _split_between_words(name: str, text: str) -> dict[Split, Read]:
    """Split a text of few lines by characters, at the blank before where one is near."""
    text = text.strip()
    valid = test = len(text)
    for share in (95, 90):
        at = min(len(text) * share // 100, valid - 1)
        near = range(max(0, at - 1_000), at + 1)
        valid, test = max((i for i in near if text[i].isspace()), default=at), valid
    parts = [text[:valid].strip(), text[valid:test].strip(), text[test:].strip()]
    if not all(parts):
        raise UserError(f"data {name} is too short to be split: give at least {_MIN_LINES} lines")
    return {split: partial(_lines_of, part) for split, part in zip(SPLITS, parts, strict=True)}


def _lines_of(text: str) -> Iterator[str]:
    return iter(text.split("\n"))


def _dataset(name: str) -> Corpus:
    """Open a data set of the hub, a row for one line or several.

    Where valid or test is missing, the other is halved; where both are, train is cut as a file is.
    """
    found, name = downloads.open_dataset(name)
    splits: dict[str, Any] = {
        "train": found.get("train"),
        "valid": next((found[s] for s in ("validation", "valid", "dev") if s in found), None),
        "test": found.get("test"),
    }
    if splits["train"] is None:
        raise UserError(f"{name} has no train split, only {', '.join(found)}: take another one")
    column = downloads.text_column(name, splits["train"].features)

    def part(split: str, start: int, stop: int) -> Read:
        rows = splits[split].select(range(start, stop))
        return partial(_rows, rows, column)

    missing = [split for split in SPLITS if splits[split] is None]
    donor = "train" if len(missing) != 1 else {"valid": "test", "test": "valid"}[missing[0]]
    n_rows = len(splits[donor])
    if n_rows < len(SPLITS):
        raise UserError(f"{name} has {n_rows} rows in {donor}, too few to be split: take another")
    readers = {s: part(s, 0, len(rows)) for s, rows in splits.items() if rows is not None}
    if len(missing) == 1:
        readers["valid"], readers["test"] = (
            part(donor, 0, n_rows // 2),
            part(donor, n_rows // 2, n_rows),
        )
    elif missing:
        valid, test = _cuts(n_rows)
        readers = {
            "train": part("train", 0, valid),
            "valid": part("train", valid, test),
            "test": part("train", test, n_rows),
        }
    return Corpus(name, "the Hugging Face hub", {split: readers[split] for split in SPLITS})


def _rows(rows: Any, column: str) -> Iterator[str]:
    for batch in rows.iter(batch_size=_ROWS):
        for text in batch[column]:
            yield from _lines_of((text or "").replace("\r\n", "\n").removesuffix("\n"))


def _read(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the lines start … stop of a file: any kind of line end, no byte order mark."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in islice(file, start, stop):
                yield line.removesuffix("\n")
    except UnicodeDecodeError:
        raise UserError(_not_text(path)) from None
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{path} cannot be read ({why}): check its permissions") from None


def _n_lines(path: Path) -> int:
    """Return how many lines a text file has. Raises UserError where it is none, or has no text."""
    n_lines, has_text = 0, False
    for line in _read(path):
        if "\0" in line:
            raise UserError(_not_text(path))
        n_lines += 1
        has_text = has_text or bool(line.strip())
    if not has_text:
        raise UserError(f"{path} is empty: give a file with text in it")
    return n_lines


def _not_text(path: Path) -> str:
    """Return what to say about a file that is not UTF-8: what it may be, and how to convert it."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "UTF-16"
    elif b"\0" in head:
        return f"{path} is not text (it has zero bytes): give a text file in UTF-8"
    else:
        # Chinese comes in pairs of high bytes, an accented Latin letter is one among low ones.
        n_paired = 2 * len(re.findall(rb"[\xb0-\xf7][\xa1-\xfe]", head))
        n_high = sum(byte > 0x7F for byte in head)
        encoding = "GB18030" if n_paired > 0.7 * n_high else "LATIN1"
    return (
        f"{path} is not UTF-8 but looks like {encoding}: convert it, for example with "
        f"iconv -f {encoding} -t UTF-8 {path} > utf8.txt"
    )
