"""Notebooks as pages of the site: cells, outputs, formulas.

In: the executed .ipynb files under notebooks/. Out: Markdown, and the pictures that it shows.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from docs_math import MathError, mathml
from docs_pages import CODE, ROOT, DocsError, fenced, outside_fences

_CODE_OR_MATH = re.compile(
    rf"{CODE}|\$\$(?P<display>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$(?!\w)",
    re.S,
)


def notebooks(language: str) -> list[Path]:
    """Return the executed notebooks of a language, in their order."""
    return sorted((ROOT / "notebooks" / language).glob("[0-9]*.ipynb"))


def read_notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook file and its pictures."""
    return notebook_page(json.loads(path.read_text(encoding="utf-8")), path.stem)


def notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, outputs included, and its pictures by file name.

    notebook   the JSON of an .ipynb      name   what the names of its pictures begin with
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(with_formulas(text))
        elif cell["cell_type"] == "code" and text.strip():
            parts.append(fenced(text, "python"))
            for output in cell["outputs"]:
                parts.append(_output(output, name, pictures))
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def with_formulas(markdown: str) -> str:
    """Put MathML in the place of $…$ and $$…$$. Raises DocsError for TeX that is not known."""

    def formula(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        try:
            if match["display"]:
                shown = mathml(match["display"].strip(), display=True)
                return f'<div class="formula">{shown}</div>'
            return mathml(match["inline"], display=False)
        except MathError as error:
            raise DocsError(f"a formula cannot be shown: {error}") from None

    return outside_fences(markdown, lambda text: _CODE_OR_MATH.sub(formula, text))


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    """Return one output of a cell, in the richest form that a page can show."""
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text")
    if output["output_type"] == "error":
        raise DocsError(f"{name}: a cell ended with {output['ename']}: run the notebook again")
    data = output["data"]
    if "image/png" in data:
        picture = f"{name}-{len(pictures) + 1}.png"
        pictures[picture] = base64.b64decode("".join(data["image/png"]))
        return f"![]({picture})"
    if "image/svg+xml" in data:
        picture = f"{name}-{len(pictures) + 1}.svg"
        pictures[picture] = "".join(data["image/svg+xml"]).encode()
        return f"![]({picture})"
    if "text/html" in data:
        # A blank line would end the block, and what follows would be read as Markdown.
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]).strip())
        return f'<div class="output">\n{html}\n</div>'
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    return fenced("".join(data["text/plain"]), "text")
