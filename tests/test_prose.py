"""The prose inside the code: it names what is there, and there is as much of it as a reader needs.

Prose rots faster than code. What stands in backticks must be a name in the code, what a docstring
explains as a parameter must be one, and a letter that stands for a size must be in the legend.
"""

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "minigpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {path: path.read_text(encoding="utf-8") for path in MODULES}
TREES = {path: ast.parse(source) for path, source in SOURCES.items()}
ATTENTION = PACKAGE / "layers" / "attention.py"

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef
# What is quoted in backticks and no name of ours: the package itself, two words of sentences.
FOREIGN = {"minigpt", "wrote", "queen"}


def docstrings(tree: ast.AST) -> Iterator[tuple[_Documented, ast.Expr]]:
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node) is not None:
            assert isinstance(node.body[0], ast.Expr)
            yield node, node.body[0]


def comments(source: str) -> Iterator[tokenize.TokenInfo]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token


def prose(path: Path) -> str:
    """Return all docstrings and comments of a module, those under fields too."""
    texts = [
        node.value.value
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return "\n".join([*texts, *(token.string for token in comments(SOURCES[path]))])


def names_in(path: Path) -> set[str]:
    """Return every name that a module's code has; of its texts, the choices of a Literal alone."""
    found: set[str] = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(part for alias in node.names for part in alias.name.split("."))
            found.update((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
            found.update(
                str(value.value) for value in ast.walk(node) if isinstance(value, ast.Constant)
            )
    return found


NAMES = {path: names_in(path) for path in MODULES}
MODULE_NAMES = {path.stem for path in MODULES} | {path.parent.name for path in MODULES}
EVERYWHERE = set.union(*NAMES.values()) | MODULE_NAMES | FOREIGN | {*dir(builtins), *keyword.kwlist}


def identifiers(text: str) -> Iterator[str]:
    """Yield the identifiers that stand in backticks."""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        # What is no name: a line of text, a token such as <eos>, a command and its flags.
        if re.fullmatch(r"[\w.]+(\([\w, =.*…]*\))?", quoted):
            yield from (part for part in re.findall(r"[A-Za-z_]\w*", quoted) if len(part) > 1)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_names_in_prose_are_names_in_code(path: Path) -> None:
    assert [name for name in identifiers(prose(path)) if name not in EVERYWHERE] == []


def test_attention_speaks_of_what_it_has_itself() -> None:
    """The file that is read beside the paper: what it names stands in it, or says where it is."""
    text = prose(ATTENTION)
    own = NAMES[ATTENTION] | FOREIGN
    elsewhere = {
        name
        for name, module in re.findall(r"`(\w+)` in minigpt\.(\w+)", text)
        if name in NAMES[PACKAGE / f"{module}.py"]
    }
    assert len(set(identifiers(text))) >= 8
    assert {*identifiers(text)} - own - elsewhere == set()
    # The paper's own names, spelt without backticks, that the text leans on.
    for spoken in ("W^O", "W_i^Q", "Concat", "softmax", "√d_k", "equation 1"):
        assert spoken in text


def explained(line: str) -> list[str]:
    """Return the names that a line explains, each with blanks behind: `q   …    k, v   …`."""
    found = re.findall(r"(?:^ *| {2,})((?:[a-z_]\w*, )*[a-z_]\w*) {2,}(?=\S)", line)
    return [name for names in found for name in names.split(", ")]


def test_a_line_may_explain_several() -> None:
    assert explained("    q   (B, H, T, K)    k, v   (B, H, S, K)") == ["q", "k", "v"]
    assert explained("source   (B, S)") == ["source"]
    assert explained("    a sentence, with a name in it.  And another.") == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_explained_parameters_exist(path: Path) -> None:
    """A line `name   what it is` in a docstring is about a parameter, or a field, of that name."""
    for node, expression in docstrings(TREES[path]):
        if isinstance(node, ast.Module) or re.match("_(?!_init__)", node.name):
            continue
        inside = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
        inside |= {
            child.target.id
            for child in ast.walk(node)
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
        }
        for line in ast.literal_eval(expression.value).splitlines():
            for name in explained(line):
                assert name in inside, f"{node.name} explains {name}: {line.strip()}"


def shapes(text: str) -> Iterator[str]:
    """Yield what looks like a shape: (B, T, D), (…, K/2), but not the arguments of f(Q, K)."""
    for inside in re.findall(r"(?<!\w)\(([^()\n]+, [^()\n]+)\)", text):
        if all(
            re.fullmatch(r"…|\d+|[A-Z]'?(/2)?|[A-Z]·[A-Z]", size) for size in inside.split(", ")
        ):
            yield inside


LAYERS = [path for path in MODULES if path.parent.name == "layers" and path.stem != "__init__"]
WITH_SHAPES = [path for path in MODULES if any(shapes(prose(path)))]


def legend(module: str) -> set[str]:
    """Return the letters that the last paragraph of a module's docstring explains.

    Its lines go `B batch · T sequence` and end without a full stop: "A head looks." is none.
    """
    paragraph = module.rpartition("\n\n")[2]
    if paragraph.endswith("."):
        return set()
    entries = [entry for line in paragraph.splitlines() for entry in line.split(" · ")]
    return {entry[0] for entry in entries if re.match(r"[A-Z] \w", entry)}


def test_a_legend_is_no_sentence() -> None:
    assert legend("A map.\n\nB batch · T queries, of S\nG key heads · L layers") == {*"BTGL"}
    assert legend("A map.\n\nWithout a legend.\nA head · T sequence.") == set()


@pytest.mark.parametrize("path", WITH_SHAPES, ids=lambda path: path.stem)
def test_every_letter_of_a_shape_is_in_the_legend(path: Path) -> None:
    used = {letter for shape in shapes(prose(path)) for letter in re.findall(r"[A-Z]", shape)}
    assert used - legend(ast.get_docstring(TREES[path]) or "") == set()


def test_shapes_are_found() -> None:
    assert {*LAYERS} | {PACKAGE / f"{name}.py" for name in ("model", "train", "output")} <= {
        *WITH_SHAPES
    }


def share_of_prose(path: Path) -> float:
    """Return which part of a module's lines, blank ones apart, is docstring or comment."""
    lines = SOURCES[path].splitlines()
    of_prose = {
        number
        for _, expression in docstrings(TREES[path])
        for number in range(expression.lineno, (expression.end_lineno or 0) + 1)
    }
    of_prose |= {t.start[0] for t in comments(SOURCES[path]) if not t.line[: t.start[1]].strip()}
    written = {number for number, line in enumerate(lines, start=1) if line.strip()}
    return len(of_prose & written) / len(written)


@pytest.mark.parametrize(
    "path", [*LAYERS, PACKAGE / "model.py", PACKAGE / "transformer.py"], ids=lambda path: path.stem
)
def test_what_is_read_beside_the_paper_is_annotated(path: Path) -> None:
    assert 0.35 <= share_of_prose(path) <= 0.45


def test_attention_is_read_from_top_to_bottom() -> None:
    """Whatever a definition uses of its own module stands above it."""
    defined: set[str] = set()
    tree = TREES[ATTENTION]
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        used = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} & own
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert used - defined - {node.name} == set(), node.name
            defined.add(node.name)
