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
    "reading",
    "config",
    "changes",
    "files",
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


# What runs text, bytes or a pickle as a program, by any of its names, and what leads there.
EXECUTING = {"eval", "exec", "compile", "__import__", "__builtins__", "__loader__", "__spec__"}
EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib"}
EXECUTING_MODULES |= {"shelve", "dbm", "marshal", "builtins", "code", "codeop", "runpy", "imp"}
EXECUTING_MODULES |= {"ctypes", "sys.modules", "importlib.reload", "importlib.machinery"}
EXECUTING_MODULES |= {f"torch.{name}" for name in ("load", "save", "serialization", "package")}
EXECUTING_MODULES |= {f"torch.{name}" for name in ("hub", "jit", "export", "multiprocessing")}
# To have a module by a name that is made up elsewhere; here it must be spelt out.
BY_NAME = {"importlib.import_module", "pkgutil.resolve_name"}
# The modules that all of this can be reached from.
ROOTS = {full.partition(".")[0] for full in EXECUTING_MODULES | BY_NAME}
REFUSED_FLAGS = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True}


def leads_to(full: str, forbidden: set[str]) -> bool:
    """Is `full`, a dotted name, one of those forbidden, or inside one?"""
    parts = full.split(".")
    return any(".".join(parts[:n]) in forbidden for n in range(1, len(parts) + 1))


def bound_names(tree: ast.AST) -> dict[str, str]:
    """Return the names that imports bind anywhere, with what each stands for."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds a, `import a.b as c` binds c to a.b.
                root = alias.name.partition(".")[0]
                bound[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def spelt_module(call: ast.Call) -> str:
    """Return the module that a call imports by name, as far as it is spelt out there."""
    given = call.args[0] if call.args else None
    if isinstance(given, ast.JoinedStr):
        start = given.values[0]
        ours = isinstance(start, ast.Constant) and str(start.value).startswith("minigpt.")
        return "minigpt" if ours else ""
    return str(given.value) if isinstance(given, ast.Constant) else ""


def reached(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield every name and chain of attributes, as what it stands for, and the node it is."""
    bound = bound_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            root, dot, rest = ast.unparse(node).partition(".")
            yield bound.get(root, root) + dot + rest, node


def executions(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module executes what it reads, or could without this test seeing it."""
    imported = [*imports(tree), *bound_names(tree).values()]
    yield from (full for full in imported if leads_to(full, EXECUTING_MODULES) or full[-1] == "*")
    # `name in sys.modules` loads nothing, nor does a module that looks at itself.
    looks = [n for n in ast.walk(tree) if isinstance(n, ast.Compare | ast.Subscript)]
    harmless = {id(n.comparators[0]) for n in looks if isinstance(n, ast.Compare)}
    harmless |= {id(n.value) for n in looks if ast.unparse(n) == "sys.modules[__name__]"}
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for full, node in reached(tree):
        # A module that is handed on has another name from then on, and any attribute in getattr.
        handed_on = full in ROOTS and id(node) not in bases and full in bound_names(tree).values()
        leads = leads_to(full, EXECUTING | EXECUTING_MODULES) and id(node) not in harmless
        if leads or handed_on or (full.split(".")[0] in ROOTS and full.endswith("__dict__")):
            yield full
    by_name = {id(node) for full, node in reached(tree) if full in BY_NAME}
    spelt = {
        id(node.func): spelt_module(node) for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    for module in (spelt.get(found, "") for found in by_name):
        if not module or leads_to(module, EXECUTING_MODULES):
            yield f"a module by the name {module!r}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in EXECUTING - {"compile"}:
            yield str(node.value)
        elif isinstance(node, ast.keyword) and node.arg in REFUSED_FLAGS:
            if ast.unparse(node.value) != str(REFUSED_FLAGS[node.arg]):
                yield f"{node.arg}={ast.unparse(node.value)}"
        elif isinstance(node, ast.Dict | ast.Assign):  # **{"allow_pickle": True}
            inside = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            yield from (flag for flag in REFUSED_FLAGS if flag in inside)


# PyTorchStepByStep#61: pickles that PyTorch 2.6 refuses.
@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_executes_what_it_reads(name: str) -> None:
    assert [*executions(TREES[name])] == []


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "run = exec",
        "compile('1', '', 'eval')",
        "__import__('os')",
        "__builtins__['open']",
        "globals()['__builtins__']",
        "getattr(x, 'eval')",
        "import builtins",
        "from builtins import eval as calculate",
        "import pickle as p",
        "def f():\n import pickle",
        "from pickle import loads",
        "from marshal import *",
        "import shelve",
        "import torch; torch.load('x')",
        "import torch as t; t.load('x')",
        "from torch import load as open_file",
        "from torch.serialization import load",
        "from torch import serialization",
        "import torch.serialization",
        "import torch; torch.serialization.load",
        "import torch; torch.hub.load('a', 'b')",
        "import torch; getattr(torch, 'lo' + 'ad')",
        "import torch; t = torch; t.load('x')",
        "import torch; torch.__dict__['load']",
        "import torch; vars(torch)",
        "import sys; sys.modules['x']",
        "import importlib; importlib.import_module('pickle')",
        "from importlib import import_module; import_module(name)",
        "from importlib import import_module; import_module(f'{name}')",
        "from importlib import import_module; f = import_module",
        "import sys; m = sys",
        "from importlib import import_module as get; get('torch.serialization')",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import numpy as np; np.load('x', allow_pickle=flag)",
        "import numpy as np; np.load('x', **{'allow_pickle': True})",
        "options = {}; options['trust_remote_code'] = True",
        "from numpy import *",
    ],
)
def test_what_executes_is_found_however_it_is_called(text: str) -> None:
    assert [*executions(ast.parse(text))]


@pytest.mark.parametrize(
    "text",
    [
        "import re; re.compile('x')",
        "model.eval()",
        "model.compile()",
        "class C:\n compile: str = 'auto'\nC.compile == 'compile'",
        "import torch; torch.compile(model); torch.no_grad()",
        "import numpy as np; np.load('x', allow_pickle=False)",
        "from importlib import import_module; import_module('minigpt.config')",
        "from importlib import import_module; import_module(f'minigpt.{name}')",
        "import sys; 'torch' in sys.modules; sys.modules[__name__]",
        "from safetensors.torch import load_file",
        "tokenizer.load(path); tokenizer.save(path)",
        "import importlib.util; importlib.util.find_spec('x')",
    ],
)
def test_what_executes_nothing_is_allowed(text: str) -> None:
    assert not [*executions(ast.parse(text))]


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
