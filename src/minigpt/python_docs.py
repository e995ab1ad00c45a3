"""The built-in corpus: the prose about Python that every Python carries inside.

In: the language reference (`pydoc_data.topics`) and the docstrings of the standard library, parsed
from its source files, which are not run; nothing is downloaded. Out: documents of paragraphs, the
same ones each time under the same Python.
"""

import ast
import functools
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from minigpt.errors import UserError


class Document(NamedTuple):
    """A title and paragraphs, each one line."""

    title: str
    paragraphs: list[str]


# Jokes, packages that are tools rather than a library, and the topics, which are read apart.
_LEFT_OUT = {"antigravity", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "this", "turtledemo"}
_MARKUP = [
    (re.compile(r":[\w:]+:`~?([^`]+)`"), r"\1"),  # :meth:`close`
    (re.compile(r"``?([^`]+)``?"), r"\1"),  # ``code``
    (re.compile(r"(?<!\w)\*{1,2}(\w[\w .]*)\*{1,2}(?!\w)"), r"\1"),  # *argument*, **strong**
    (re.compile(r'"([^"\s]+)"'), r"\1"),  # "code" in the language reference
    (re.compile(r"`+"), ""),
    (re.compile(r"^[*-] |^\d+\. "), ""),  # an item of a list
]
_MIN_WORDS = 8
_MIN_LETTERS = 0.87  # of all characters, blanks counted as letters: below it stands code, not prose


@functools.cache
def documents() -> list[Document]:
    """Return the language reference by topic, then the modules by name. No paragraph comes twice.

    Raises UserError where this Python was installed without its own documentation.
    """
    seen: set[str] = set()
    found = []
    for title, texts in [*_topics(), *_modules()]:
        prose = dict.fromkeys(p for text in texts for p in _paragraphs(text) if p not in seen)
        seen.update(prose)
        if prose:
            found.append(Document(title, list(prose)))
    if len(found) < 20:
        raise UserError(
            f"the Python at {sys.prefix} has no documentation inside: give another corpus, "
            "for example a .txt file"
        )
    return found


def _topics() -> Iterator[tuple[str, list[str]]]:
    try:
        from pydoc_data.topics import topics  # some distributions leave it out
    except ImportError:
        return
    for _, text in sorted(topics.items()):
        title = text.lstrip().partition("\n")[0]
        yield _plain(title), [text]


def _modules() -> Iterator[tuple[str, list[str]]]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        for path in [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]:
            parts = path.relative_to(library).with_suffix("").parts
            if name.startswith("_") or "test" in parts or "tests" in parts or not path.is_file():
                continue
            yield ".".join(parts).removesuffix(".__init__"), list(_docstrings(path))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "\d" and the like in sources that aren't ours
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template that is no Python yet
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` that are prose, each as one line of plain words."""
    for block in re.split(r"\n\s*\n", textwrap.dedent(text)):
        line = _plain(block)
        is_sentence = line[:1].isupper() and line[-1:] in {".", ":", "?", "!"}
        n_letters = sum(c.isalpha() or c == " " for c in line)
        is_code = n_letters < _MIN_LETTERS * len(line) or ">>>" in line or "--" in line
        if is_sentence and not is_code and len(line.split()) >= _MIN_WORDS:
            yield line


def _plain(block: str) -> str:
    line = " ".join(block.split())
    for pattern, replacement in _MARKUP:
        line = pattern.sub(replacement, line)
    return line
