"""Console: what the commands print, results on stdout and notes on stderr.

In: lines, rows, tables, values. Out: nothing but what stands on the terminal or in the pipe.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from minigpt.spelling import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

    from minigpt.tokenizer import Tokenizer


def note(text: str) -> None:
    """Print a line on stderr: a note, or how far something is."""
    print(text, file=sys.stderr)


def say(text: str, end: str = "\n") -> None:
    """Print a text at once: exactly in a pipe, without control characters at a terminal."""
    print(harmless(text) if sys.stdout.isatty() else text, end=end, flush=True)


def in_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that takes colours, and its reader wants them."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and stream.isatty()


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print rows as columns, each as wide as it must be; the last may be of any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        say("  ".join([*cells, row[-1]]).rstrip())


def print_table(table: "RenderableType") -> None:
    """Print what rich draws: as wide as the terminal, and elsewhere no line is broken."""
    from rich.console import Console

    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else 1_000,
        force_jupyter=False,
        no_color=not in_color(sys.stdout),
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_json(value: Any) -> None:
    """Print a JSON object or list; what is no finite number is null."""
    print(json.dumps(_writable(value), indent=2, ensure_ascii=False, allow_nan=False))


def _writable(value: Any) -> Any:
    """Return value with None for the numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, dict):
        return {key: _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note_unknown(ids: Sequence[int], tokenizer: "Tokenizer") -> None:
    """Tell on stderr how much of a text the model will read as <unk>."""
    n_unknown = ids.count(tokenizer.unk_id) if tokenizer.unk_id is not None else 0
    if n_unknown:
        note(f"note: {n_unknown} of {len(ids)} tokens are not in the vocabulary: <unk>")
