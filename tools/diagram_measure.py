"""How large things are: rectangles on a grid, and the room that boxes and words need.

Lengths are pixels, y grows upward, and all that lines can touch is on a grid of 10.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from diagram_graph import Edge, Item, Picture
from diagram_notation import Letters, sign, text_width, texts
from diagram_trace import Value

GRID = 10
LANE = 30  # between neighbours in a row, for lines to pass
TEXT, NOTE, LABEL, PORT = 12.0, 10.0, 10.0, 9.0  # sizes of type
HEADER = 20  # the line in a frame that says what it is


class Rect(NamedTuple):
    """A rectangle; `axis` is where the line from its main input to its main output runs."""

    left: float
    bottom: float
    right: float
    top: float
    axis: float

    def moved(self, dx: float, dy: float) -> "Rect":
        """Return the same rectangle elsewhere."""
        return Rect(
            self.left + dx, self.bottom + dy, self.right + dx, self.top + dy, self.axis + dx
        )


@dataclass
class Layout:
    """Rectangles of items, and where edges leave (`stems`) and arrive (`ports`)."""

    picture: Picture
    letters: Letters
    rects: dict[Item, Rect] = field(default_factory=dict)
    stems: dict[tuple[Item, Value], float] = field(default_factory=dict)
    ports: dict[Edge, float] = field(default_factory=dict)


def up(length: float, step: int = GRID) -> int:
    """Round a length up to whole steps."""
    return math.ceil(length / step - 1e-9) * step


def values_out(picture: Picture, item: Item) -> list[Value]:
    """Return the tensors that leave item, each once."""
    return list(dict.fromkeys(edge.value for edge in picture.out_of(item)))


def label_width(letters: Letters, value: Value) -> float:
    """Return how wide the shape beside a line is, with the distance to the line."""
    short, numbers = letters.shape(value.shape)
    return 11 + text_width(short, LABEL, bold=True) + text_width(numbers, LABEL)


def port_names(picture: Picture, item: Item) -> list[str]:
    """Return the names written where edges enter a part, none where only one enters."""
    into = picture.into(item)
    named = [edge.port for edge in into if edge.port]
    return named if item.kind == "box" and len(into) > 1 and len(named) == len(into) else []


def leaf_size(layout: Layout, item: Item) -> tuple[int, int]:
    """Return width and height of a leaf, from what is written on it."""
    if sign(item):
        return 2 * GRID, 2 * GRID
    name, note = texts(item, layout.letters)
    wide = max(text_width(name, TEXT, bold=True), text_width(note, NOTE)) + 20
    if item.kind in ("input", "output"):
        return up(wide, 20), 20
    names = port_names(layout.picture, item)
    step, inset = port_spacing(names)
    ports = (len(names) - 1) * step + 2 * inset
    labels = [label_width(layout.letters, v) for v in values_out(layout.picture, item)]
    high = (40 if note else 30) + (10 if names else 0)
    return up(max(wide, 120, ports, sum(labels) if len(labels) > 1 else 0), 20), high


def port_spacing(names: list[str]) -> tuple[int, int]:
    """Return the distance between arguments named on a box, and from the last to the box's side."""
    widest = max((text_width(name, PORT) for name in names), default=0)
    return max(2 * GRID, up(widest + 6)), max(2 * GRID, up(widest / 2 + 4))
