"""The shape of the package: who imports whom, who prints, and what nobody does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "minigpt"

READING_ORDER = [
    "errors",
    "sampling",
    "config",
    "changes",
    "files",
    "reading",
    "text",
    "vocabulary",
    "spelling",
    "tokenizer_file",
    "tokenizer",
    "python_docs",
    "catalogue",
    "downloads",
    "corpus",
    "data",
    "unknown_words",
    "layers.norm",
    "layers.positions",
    "layers.token_shift",
    "layers.attention",
    "layers.pointer",
    "layers.feed_forward",
    "output",
    "transformer",
    "model",
    "first_weights",
    "optim",
    "machine",
    "compilation",
    "distributed",
    "evaluate",
    "articles",
    "temperature",
    "neural_cache",
    "dynamic_evaluation",
    "tensor_files",
    "run_folder",
    "checkpoint",
    "events",
    "training_state",
    "train",
    "filters",
    "one_row",
    "decoding",
    "beams",
    "generate",
    "attention_picture",
    "attention_page",
    "attention_text",
    "attention_maps",
    "sentences",
    "head_scores",
    "head_picture",
    "head_roles",
    "metrics",
    "report",
    "hub",
    "info",
    "figures",
    "measurement",
    "evaluation_table",
    "comparison",
    "check",
    "quickstart",
    "api",
    "serve",
    "prompt_loop",
    "console",
    "command_options",
    "command_line",
    "cli_generate",
    "cli",
]
# The front doors: they open any room, and only when somebody knocks.
DOORS = {"__init__", "__main__", "cli", "cli_generate", "api"}
# WikiText2 reads the corpus, but nothing else among the classic names needs one.
EXCEPTIONS = {("text", "corpus")}
# The first line of their errors is for users; they may be read without any of the others.
NO_TORCH = {
    "errors",
    "sampling",
    "config",
    "files",
    "spelling",
    "prompt_loop",
    "text",
    "tokenizer",
    "corpus",
    "console",
    "command_options",
    "command_line",
    "cli_generate",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of every module imported anywhere, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield node.module or ""
            if node.module in ("minigpt", "minigpt.layers"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> Iterator[str]:
    """Yield the package's modules that module `name` imports."""
    for full in imports(TREES[name]):
        own = full.removeprefix("minigpt.")
        if full.startswith("minigpt.") and own in MODULES:
            yield own


def test_every_module_has_its_place_in_the_reading_order() -> None:
    assert set(MODULES) - {"__init__", "__main__", "layers"} <= set(READING_ORDER)


@pytest.mark.parametrize("name", [name for name in READING_ORDER if name in MODULES])
def test_a_module_imports_only_modules_above_it(name: str) -> None:
    above = set(READING_ORDER[: READING_ORDER.index(name)])
    for imported in own_imports(name):
        if imported in DOORS | {"layers"} or (name, imported) in EXCEPTIONS:
            continue
        assert imported in above, f"{name} imports {imported}, which is read after it"


@pytest.mark.parametrize("name", sorted(NO_TORCH & set(MODULES)))
def test_what_starts_at_once_imports_no_torch(name: str) -> None:
    top = ast.Module([node for node in TREES[name].body if not isinstance(node, ast.If)], [])
    at_start = [node for node in top.body if isinstance(node, ast.Import | ast.ImportFrom)]
    heavy = {"torch", "datasets", "matplotlib", "transformers"}
    loaded = {full.split(".")[0] for full in imports(ast.Module(at_start, []))}
    assert not loaded & heavy


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with its name as it is written: print, torch.load, …"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_the_command_line_prints(name: str) -> None:
    printing = {"print", "sys.stdout.write", "sys.stderr.write"}
    used = {called for called, _ in calls(TREES[name])} & printing
    assert name in ("cli", "cli_generate", "console") or not used


# PyTorchStepByStep#61: pickles that PyTorch 2.6 refuses.
@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_executes_what_it_reads(name: str) -> None:
    unpickling = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    assert not {full.split(".")[0] for full in imports(TREES[name])} & unpickling
    for called, call in calls(TREES[name]):
        assert called not in ("eval", "exec", "torch.load", "torch.save", "compile", "__import__")
        for keyword in call.keywords:
            if keyword.arg in ("allow_pickle", "trust_remote_code"):
                assert ast.unparse(keyword.value) == "False", called


def public_definitions(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            yield f"{inside}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{node.name}.")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_public_name_is_explained(name: str) -> None:
    assert ast.get_docstring(TREES[name]), "the module has no docstring"
    for what, node in public_definitions(TREES[name].body):
        assert ast.get_docstring(node), f"{what} has no docstring"  # type: ignore[arg-type]


def written_for_others() -> list[Path]:
    found = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml")]
    found += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "docs").rglob("*.md")]
    return sorted([*found, *ROOT.glob("Makefile"), *ROOT.glob(".ci/*")])


def test_nothing_names_a_path_of_one_machine() -> None:
    home, here = Path.home(), ROOT.parent
    own = [str(path) for path in (home, here) if len(path.parts) > 1]
    pattern = re.compile("|".join([*map(re.escape, own), r"(?<![\w.~])/(?:home|Users|root)/\w"]))
    for path in written_for_others():
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} names {found[0]}"
