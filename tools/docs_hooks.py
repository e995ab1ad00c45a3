"""What mkdocs calls while it builds the site: pages from outside docs/, includes, links.

README, CONTRIBUTING, CHANGELOG and the notebooks stand where a repository has them, and become
pages here; so does each module, in reading order. A page that names what is not there ends the
build.
"""

import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

TOOLS = str(Path(__file__).parent)
sys.path.insert(0, TOOLS)

import docs_notebooks  # noqa: E402
import docs_pages as pages  # noqa: E402

# Where files of the repository's root are found on the site.
FROM_ROOT = {
    "README.md": "readme.md",
    "README.zh-CN.md": "readme.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = ("en", "zh-CN")
# What mkdocs.yml writes where a part of the navigation is filled in here.
REFERENCE, NOTEBOOKS = "(reference)", "(notebooks {})"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that follow from what the repository holds."""
    modules: list[Any] = [{name: _module_uri(name)} for name in pages.reading_order()]
    parts: dict[str, list[Any]] = {REFERENCE: ["reference/index.md", *modules]}
    for language in LANGUAGES:
        found = [_notebook_uri(path, language) for path in docs_notebooks.notebooks(language)]
        parts[NOTEBOOKS.format(language)] = list(found)
    config.nav = _filled(config.nav, parts)
    return config


def _filled(tree: Any, parts: dict[str, list[Any]]) -> Any:
    if isinstance(tree, list):
        return [_filled(branch, parts) for branch in tree]
    if isinstance(tree, dict):
        return {title: _filled(branch, parts) for title, branch in tree.items()}
    return parts.get(tree, tree)


def _module_uri(name: str) -> str:
    return f"reference/{name.replace('.', '/')}.md"


def _notebook_uri(path: Path, language: str) -> str:
    return f"notebooks/{language}/{path.stem}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not stand in docs/."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for name, uri in FROM_ROOT.items():
        add(uri, (pages.ROOT / name).read_text(encoding="utf-8"))
    add("reference/index.md", pages.reference_index())
    for name in pages.reading_order():
        add(_module_uri(name), pages.reference_page(name))
    for language in LANGUAGES:
        for path in docs_notebooks.notebooks(language):
            text, pictures = docs_notebooks.read_notebook(path)
            add(_notebook_uri(path, language), text)
            for picture, content in pictures.items():
                add(f"notebooks/{language}/{picture}", content)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in source and figures, and let every link lead somewhere."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    site = pages.Site(_pages(files), config.repo_url or "")
    path = next(file for file, target in site.pages.items() if target == uri)
    try:
        return site.rewrite(pages.expand(markdown, _trace(uri)), path)
    except pages.DocsError as error:
        raise PluginError(f"{path}: {error}") from None


def _pages(files: Files) -> dict[str, str]:
    """Return where each file of the repository is on the site."""
    own = [
        f.src_uri
        for f in files
        if f.generated_by is None and f.inclusion != InclusionLevel.EXCLUDED
    ]
    found = {f"docs/{uri}": uri for uri in own}
    found |= FROM_ROOT
    found |= {
        f"src/minigpt/{name.replace('.', '/')}.py": _module_uri(name)
        for name in pages.reading_order()
    }
    # The pictures of notebooks, which no file of the repository holds.
    found |= {
        f.src_uri: f.src_uri for f in files if re.match(r"notebooks/.*\.(png|svg)$", f.src_uri)
    }
    for language in LANGUAGES:
        for path in docs_notebooks.notebooks(language):
            uri = _notebook_uri(path, language)
            found |= {f"notebooks/{language}/{path.stem}{end}": uri for end in (".ipynb", ".py")}
    return found


def _trace(uri: str) -> Any:
    language = "zh-CN" if uri.endswith(".zh-CN.md") else "en"

    def section(name: str) -> str:
        sys.path.insert(0, TOOLS)  # mkdocs has taken it away again
        try:
            import walkthrough  # only a page that asks for figures waits for a model to learn
        finally:
            sys.path.remove(TOOLS)
        return walkthrough.section(name, language)

    return section


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Say of a Chinese page that it is one: fonts, line breaks and readers aloud depend on it."""
    if "zh-CN" in page.file.src_uri:
        return re.sub(r'<html lang="\w+"', '<html lang="zh-CN"', output, count=1)
    return output


class Docstrings(griffe.Extension):
    """Shows docstrings as they are laid out in the source; mkdocs.yml names it to mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was just read."""
        if obj.docstring:
            obj.docstring.value = pages.docstring_markdown(obj.docstring.value)
