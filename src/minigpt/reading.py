"""Reading: files that anyone may have made, within limits that hold before their content counts.

In: the path of a file, and how large such a file may be. Out: its text, or the tree of its JSON.

A file may be a pipe that never ends, or a device; it may be larger than memory; JSON may be nested
deeper than Python can follow, or say one thing twice and mean the second. None of it gets past
here, and whoever reads through here may take what comes out for plain, finite and unambiguous.
"""

import json
import stat
from pathlib import Path
from typing import Any

# Deeper than anything the package writes, and far from what Python can follow.
MOST_NESTED = 50


class UnreadableError(ValueError):
    """No file that can be read: what stands at the path is something else, or too large."""


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a file in UTF-8, of most_bytes at most; a link to a file is one.

    Raises OSError where there is none to read, UnreadableError for a folder, a pipe or a device and
    for a file that is too large, and UnicodeDecodeError for what is no UTF-8.
    """
    # Before it is opened: a pipe would wait there for whoever writes to it.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableError("it is no file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnreadableError(f"it has more than {most_bytes:,} bytes")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """Return what `text` says in JSON.

    Raises ValueError where it is not JSON, names a key twice in one place, or is nested too deep.
    """
    try:
        tree = json.loads(text, object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [tree]
    for _ in range(MOST_NESTED):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return tree
    raise ValueError("it is nested too deep")


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        # Python takes the last one, other readers the first.
        raise ValueError("it names a key twice")
    return tree


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
