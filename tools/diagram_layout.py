"""Where everything stands: rows from bottom to top, as in the paper's figures.

In: a `Picture`. Out: a `Layout` with a rectangle for every item. Frames are laid out by the same
rule as the whole picture (diagram_lanes), from the inside out.
"""

from diagram_graph import Item, Picture
from diagram_lanes import Lanes, Rows
from diagram_measure import HEADER, NOTE, Layout, Rect, label_width, leaf_size, up, values_out
from diagram_notation import Letters, sign, text_width, texts


def lay_out(picture: Picture, letters: Letters) -> Layout:
    """Place every item of a picture; where edges end, `diagram_ports` says."""
    layout = Layout(picture, letters)
    layout.rects = _Placer(layout).place(picture.frame)
    return layout


class _Placer:
    """Places the items of frames."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.picture = layout, layout.picture

    def place(self, frame: Item) -> dict[Item, Rect]:
        """Return the rectangles of frame and all inside, the frame's own axis and bottom at 0."""
        inner = {i: self.place(i) for i in frame.inside if i.kind == "frame"}
        rows = Rows(self.picture, frame)
        sizes: dict[Item, Rect] = {}
        for item in frame.inside:
            if item in inner:
                sizes[item] = inner[item][item]
            else:
                wide, high = leaf_size(self.layout, item)
                sizes[item] = Rect(-wide / 2, 0, wide / 2, high, 0)
        at = Lanes(self.layout, rows, sizes).positions()
        bottoms = self._bottoms(frame, rows, sizes)
        placed: dict[Item, Rect] = {}
        for item in frame.inside:
            if item in inner:
                moved = {i: r.moved(at[item], bottoms[item]) for i, r in inner[item].items()}
                placed |= moved
            else:
                placed[item] = sizes[item].moved(at[item], bottoms[item])
        return placed | {frame: self._around(frame, placed)}

    def _bottoms(self, frame: Item, rows: Rows, sizes: dict[Item, Rect]) -> dict[Item, float]:
        """Return the y of every item's bottom, row upon row."""
        first = [item for item in frame.inside if rows.row[item] == 0]
        y: float = 10
        if frame.parent is not None:
            y = max(20 if i.kind == "frame" else self._room_below(i, 0) + 10 for i in first)
        bottoms: dict[Item, float] = {}
        for n in range(max(rows.row.values()) + 1):
            members = [item for item in frame.inside if rows.row[item] == n]
            above = [item for item in frame.inside if rows.row[item] == n + 1]
            bottoms |= dict.fromkeys(members, y)
            bare = all(item.kind == "frame" for item in members)
            room = [self._room_below(item, len(rows.below[item])) for item in above]
            gap = 20 if bare else max(room, default=0)
            y += max(sizes[item].top for item in members) + gap
        return bottoms

    def _room_below(self, item: Item, n_straight: int) -> int:
        """Return the height below an item that one shape and the bends of its lines need."""
        if item.kind == "frame" or sign(item):
            return 40
        into = self.picture.into(item)
        n_bent = len({edge.value for edge in into}) - max(n_straight, 1)
        forks = len(into) > n_bent + max(n_straight, 1)
        return 40 + 10 * forks + 10 * max(n_bent, 0)

    def _around(self, frame: Item, placed: dict[Item, Rect]) -> Rect:
        """Return the rectangle of a frame around what it holds."""
        rects = [placed[item] for item in frame.inside]
        left, right = min(r.left for r in rects), max(r.right for r in rects)
        for item in frame.inside:
            if item.kind != "frame":
                labels = [
                    label_width(self.layout.letters, v) for v in values_out(self.picture, item)
                ]
                right = max(right, placed[item].axis + max(labels, default=0))
        top = max(r.top for r in rects)
        if frame.parent is None:
            return Rect(-up(30 - left), 0, up(right + 30), top + 10, 0)
        passing = any(e.carries_past and e.target in frame.inside for e in self.picture.edges)
        pad = 30 if passing else 20
        name, kind = texts(frame, self.layout.letters)
        title = text_width(f"{name} · {kind}", NOTE, bold=True) + 25
        half = up(max(-left + pad, right + pad, title, 60), 20)
        label = 0 if any(i.kind == "frame" and placed[i].top == top for i in frame.inside) else 20
        return Rect(-half, 0, half, top + label + HEADER + 10, 0)
