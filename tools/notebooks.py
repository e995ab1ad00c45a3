"""Make the notebooks from their sources: notebooks/LANGUAGE/N_name.py → .ipynb, outputs and all.

    python tools/notebooks.py [NAMES]              take over what changed in a .py
    python tools/notebooks.py --execute [NAMES]    run them and keep what they show
    python tools/notebooks.py --check              exit 1 where an .ipynb is not that of its .py

NAMES are parts of file names: `zh-CN`, `7_mini_gpt`, `en/1_`. The .py is the source, in jupytext's
percent format; nobody edits an .ipynb. Where code changed, outputs go until it is run; a
translation takes those of the other language, whose code is the same. What would differ from run
to run without meaning anything (times of execution, ids of cells, versions) is left out, so that a
diff shows what changed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat as untyped_nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

nbformat: Any = untyped_nbformat  # its functions have no annotations

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
LANGUAGES = ("en", "zh-CN")
CELL_SECONDS = 900

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources(names: Sequence[str] = ()) -> list[Path]:
    """Return the .py of all notebooks, or of those in whose path one of `names` occurs."""
    paths = [path for language in LANGUAGES for path in sorted((NOTEBOOKS / language).glob("*.py"))]
    spelt = {path: path.relative_to(NOTEBOOKS).as_posix() for path in paths}
    return [p for p in paths if not names or any(name in spelt[p] for name in names)]


def from_source(path: Path) -> NotebookNode:
    """Return the notebook that a .py describes, without outputs; the same one every time."""
    cells = []
    for i, cell in enumerate(jupytext.read(path, fmt="py:percent").cells):
        is_code = cell.cell_type == "code"
        new = nbformat.v4.new_code_cell if is_code else nbformat.v4.new_markdown_cell
        tags = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        cells.append(new(cell.source, metadata=tags, id=f"cell-{i + 1}"))
    notebook: NotebookNode = nbformat.v4.new_notebook(cells=cells, metadata=_METADATA)
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run the code cells in a kernel of this very Python, in `folder`; outputs go into the cells.

    Raises CellExecutionError, with the traceback, where a cell raises.
    """
    with tempfile.TemporaryDirectory() as own:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            # The kernel that ipykernel brings along, whatever else is installed under its name.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(Path(own) / "kernel.json"),
            transport="ipc" if os.name == "posix" else "tcp",  # files of ours, not open ports
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        environment = {
            **os.environ,
            "IPYTHONDIR": own,  # no profile and no history is left in anybody's home
            # A library that could draw a progress bar, had it ipywidgets; no notebook needs one.
            "PYTHONWARNINGS": "ignore:IProgress not found",
        }
        client.execute(cleanup_kc=True, env=environment)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            shown = output.get("data", {})
            if {"text/html", "text/markdown"} & shown.keys():
                shown.pop("text/plain", None)  # the repr, long, behind what is shown
    notebook.metadata = nbformat.from_dict(_METADATA)


def with_outputs(notebook: NotebookNode, stored: NotebookNode) -> NotebookNode:
    """Give notebook the stored outputs, up to the first code cell that is another one now."""
    for cell, old in zip(_code(notebook), _code(stored), strict=False):
        if cell.source != old.source:
            break
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return notebook


def _code(notebook: NotebookNode) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _all_ran(notebook: NotebookNode) -> bool:
    return all(cell.execution_count for cell in _code(notebook))


def render(notebook: NotebookNode) -> str:
    """Return the text of an .ipynb."""
    return str(nbformat.writes(notebook, version=4, indent=1)) + "\n"


def _updated(path: Path) -> NotebookNode:
    """Return the notebook of a .py with the outputs that still hold.

    They are those of the .ipynb beside it or, where its code has changed, of the one in the other
    language: the code is the same, and so is what it shows.
    """
    places = [NOTEBOOKS / language / path.name for language in LANGUAGES]
    notebook = from_source(path)
    for place in sorted(places, key=lambda place: place != path):
        stored = place.with_suffix(".ipynb")
        if not _all_ran(notebook) and stored.is_file():
            notebook = with_outputs(from_source(path), nbformat.read(stored, as_version=4))
    return notebook


def is_current(path: Path) -> bool:
    """Is the .ipynb beside a .py what the .py says, with every code cell run?"""
    stored = path.with_suffix(".ipynb")
    if not stored.is_file() or stored.read_text(encoding="utf-8") != render(_updated(path)):
        return False
    return _all_ran(nbformat.read(stored, as_version=4))


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the docstring above says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAMES")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    what.add_argument("--execute", action="store_true", help="run, and keep the outputs")
    options = parser.parse_args(argv)
    found = sources(options.names)
    if not found:
        print(f"error: no notebook is called {' or '.join(options.names)}", file=sys.stderr)
        return 2
    if options.check:
        stale = [path.with_suffix(".ipynb") for path in found if not is_current(path)]
        for path in stale:
            print(f"{path.relative_to(ROOT)}: run python tools/notebooks.py --execute {path.stem}")
        return 1 if stale else 0
    for path in found:
        if options.execute:
            print(f"{path.relative_to(ROOT)} …", flush=True)
            notebook = from_source(path)
            try:
                execute(notebook, path.parent)
            except CellExecutionError as error:
                print(f"error: {path.relative_to(ROOT)}: {error}", file=sys.stderr)
                return 1
        else:
            notebook = _updated(path)
        path.with_suffix(".ipynb").write_text(render(notebook), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
