"""The pages of the site, made of the repository: source, links, docstrings, modules.

In: Markdown as it stands in the repository, where GitHub shows it. Out: Markdown as the site needs
it. Plain text in, plain text out; `docs_hooks` puts these functions where mkdocs asks for them.

    <!-- source: minigpt.layers.attention.attention -->   becomes the source of that object
    <!-- trace: embedding -->                             becomes figures of a real batch
    [text](../src/minigpt/layers/attention.py)            leads to the page of that module

Whatever leads nowhere raises `DocsError`, so that no page can say what is no longer so.
"""

import ast
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

_INCLUDE = re.compile(r"^<!-- (source|trace): (.+?) -->$", re.M)
_ALMOST_INCLUDE = re.compile(r"<!--\s*(?:source|trace)\b.*")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.M)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
CODE = r"(?P<code>`+)(?!`).+?(?<!`)(?P=code)(?!`)"
_CODE_OR_LINK = re.compile(rf"{CODE}|{_LINK.pattern}", re.S)
# Columns, or a line that is set in: laid out by hand, to be shown as it stands.
_LAID_OUT = re.compile(r"^\s+\S|\S {2,}\S")
_EQUATION = re.compile(r" {2,}— ")


class DocsError(Exception):
    """A page names something that is not there."""


@dataclass(frozen=True)
class Source:
    """A named piece of a file, with the lines that it fills."""

    path: str  # from the repository's root
    first: int
    last: int
    text: str


def find_source(name: str) -> Source:
    """Return the source of the object with this full name: minigpt.model.MiniGPT.hidden.

    A module is its whole file. Found in the text, so nothing is imported. Raises DocsError for what
    is not there.
    """
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:n])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file():
            break
    else:
        raise DocsError(f"{name} is in no module under src")
    text = path.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    first, last = 1, len(text.splitlines())
    for part in parts[n:]:
        found = [child for child in ast.iter_child_nodes(node) if part in _names(child)]
        if not found:
            raise DocsError(f"{name}: there is no {part} in {path.relative_to(ROOT)}")
        node = found[-1]  # what a later definition replaced nobody can call
        decorators = getattr(node, "decorator_list", [])
        first = min(child.lineno for child in [node, *decorators])
        last = node.end_lineno or first
    lines = text.splitlines()[first - 1 : last]
    return Source(path.relative_to(ROOT).as_posix(), first, last, textwrap.dedent("\n".join(lines)))


def _names(node: ast.AST) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return {target.id for target in targets if isinstance(target, ast.Name)}


def source_block(name: str) -> str:
    """Return the source of an object as a code block with its file and its real line numbers."""
    found = find_source(name)
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", found.text)), default=0))
    title = f"{found.path}, lines {found.first}-{found.last}"
    return f'{fence}python linenums="{found.first}" title="{title}"\n{found.text}\n{fence}'


def expand(markdown: str, trace: Callable[[str], str]) -> str:
    """Put source and figures where the page asks for them; `trace` gives the figures of a name.

    Raises DocsError for an object that is not there, a figure that `trace` raises
    KeyError for, and a line that was meant as one of the two but is neither.
    """

    def included(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "source":
            return source_block(name)
        try:
            return trace(name)
        except KeyError:
            raise DocsError(f"there is no trace {name}") from None

    def outside(text: str) -> str:
        expanded: str = _INCLUDE.sub(included, text)
        if almost := _ALMOST_INCLUDE.search(_INCLUDE.sub("", text)):
            raise DocsError(f"{almost[0]} is not a line of its own, or not spelt as includes are")
        return expanded

    return outside_fences(markdown, outside)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Change what stands outside code blocks."""
    return "".join(text if fenced else change(text) for fenced, text in _split_at_fences(markdown))


def _split_at_fences(markdown: str) -> Iterator[tuple[bool, str]]:
    """Yield the text in pieces, each a code block (True) or what stands between two (False)."""
    begin, fence = 0, ""
    for match in _FENCE.finditer(markdown):
        if not fence:
            yield False, markdown[begin : match.start()]
            begin, fence = match.start(), match[1]
        elif match[1].startswith(fence) and not markdown[match.end() :].split("\n", 1)[0].strip():
            yield True, markdown[begin : match.end()]
            begin, fence = match.end(), ""
    yield bool(fence), markdown[begin:]


@dataclass(frozen=True)
class Site:
    """Where what stands in the repository is found on the site."""

    pages: dict[str, str]  # file of the repository → page or picture of the site
    repo_url: str = ""  # where the repository can be read; empty while it has no public address

    def rewrite(self, markdown: str, path: str) -> str:
        """Let the links of a page, which stands at `path` in the repository, work on the site.

        A link to something that is not on the site leads to the repository's page, or is plain text
        where there is none. Raises DocsError for a link that leads nowhere.
        """

        def link(match: re.Match[str]) -> str:
            if match["code"]:
                return match[0]
            picture, text, target = match[2], match[3], match[4]
            text = self.rewrite(text, path) if "](" in text else text  # a picture that is a link
            return self._link(picture, text, target, path)

        return outside_fences(markdown, lambda text: _CODE_OR_LINK.sub(link, text))

    def _link(self, picture: str, text: str, target: str, path: str) -> str:
        if re.match(r"[a-z]+:|#|/", target):
            return f"{picture}[{text}]({target})"
        bare, hash_mark, anchor = target.partition("#")
        # Where the page stands, then where the link goes from there.
        file = normpath((Path(path).parent / bare).as_posix())
        if file not in self.pages:
            if file.startswith("..") or not (ROOT / file).exists():
                raise DocsError(f"[{text}]({target}) leads nowhere")
            address = f"{self.repo_url.rstrip('/')}/blob/main/{file}"
            return f"{picture}[{text}]({address}{hash_mark}{anchor})" if self.repo_url else text
        if file.endswith(".py"):
            anchor = object_anchor(file, text)
        page = relpath(self.pages[file], Path(self.pages[path]).parent.as_posix())
        return f"{picture}[{text}]({page}{'#' + anchor if anchor else ''})"


def module_name(file: str) -> str:
    """Return the module of a file: src/minigpt/layers/norm.py is minigpt.layers.norm."""
    name = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def object_anchor(file: str, text: str) -> str:
    """Return the anchor of the object that a link's text names in backticks, or none."""
    named = re.fullmatch(r"`([A-Za-z_][\w.]*)`", text)
    if not named or not file.startswith("src/"):
        return ""
    name = f"{module_name(file)}.{named[1]}"
    try:
        find_source(name)
    except DocsError:
        return ""  # it names the module, or several things
    is_private = any(part.startswith("_") for part in named[1].split("."))
    return "" if is_private else name


def fenced(text: str, language: str) -> str:
    """Return text as a code block, whatever fences stand in it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip("\n")  # a page has no terminal's colours
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def docstring_markdown(text: str) -> str:
    """Return a docstring as Markdown that looks as it does in the source.

    Columns and what is set in become blocks of their own, in which every blank counts. The rest is
    prose, in which what Markdown or HTML would take for a mark is one only inside backticks.
    """
    blocks: list[tuple[str, list[str]]] = []
    for line in textwrap.dedent(_EQUATION.sub(" — ", text)).splitlines():
        kind = _kind(line, blocks[-1][0] if blocks else "")
        if not blocks or blocks[-1][0] != kind:
            blocks.append((kind, []))
        blocks[-1][1].append(line)
    return "\n\n".join(
        fenced("\n".join(lines), "text")
        if kind == "laid out"
        else "\n".join(lines)
        if kind == "table"
        else _escaped("\n".join(lines))
        for kind, lines in blocks
        if kind != "blank"
    )


def _kind(line: str, before: str) -> str:
    if not line.strip():
        return "laid out" if before == "laid out" else "blank"
    if line.startswith("|"):
        return "table"
    # A legend of letters, B batch · T sequence, keeps its lines too.
    is_laid_out = _LAID_OUT.search(line) or line.count(" · ") > 1
    return "laid out" if is_laid_out else "prose"


def _escaped(prose: str) -> str:
    """Take their meaning from the marks of Markdown and HTML that stand outside backticks."""
    pieces = re.split(r"(`+[^`]+`+)", prose)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([*<\[\]])", r"\\\1", piece)
        for piece in pieces
    )


def reading_order() -> list[str]:
    """Return the modules in reading order, as the architecture test holds it: config, files, …"""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if "READING_ORDER" in _names(node) and isinstance(node, ast.Assign):
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if _module_path(name).is_file()]
    raise DocsError("tests/test_architecture.py has no READING_ORDER")


def _module_path(name: str) -> Path:
    return SOURCE.joinpath("minigpt", *name.split(".")).with_suffix(".py")


def summary_of(name: str) -> str:
    """Return the first line of a module's docstring."""
    tree = ast.parse(_module_path(name).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def reference_index() -> str:
    """Return the page that lists all modules in reading order."""
    rows = [
        f"| [`{name}`]({name.replace('.', '/')}.md) | {_escaped(summary_of(name))} |"
        for name in reading_order()
    ]
    return "\n".join(
        [
            "# Reference",
            "",
            "Every module, in the order in which to read them: each imports only what stands above",
            "it. The code of each function is one click below its signature.",
            "",
            "| module | |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def reference_page(name: str) -> str:
    """Return the page of a module, which mkdocstrings fills in."""
    return f"# minigpt.{name}\n\n::: minigpt.{name}\n"
