"""Rows and lanes: what stands above what inside one frame, and what stands beside it.

In: the items of a frame and their sizes. Out: the row of each (`Rows`) and the x of its axis
(`Lanes`). An item stands straight above the one that it mainly continues; what has several equals
below it spans them all; whatever else an item needs stands in a lane beside.
"""

from typing import NamedTuple

from diagram_graph import Edge, Item, Picture
from diagram_measure import Layout, Rect, label_width, up, values_out
from diagram_notation import joins_equals

LANE = 30  # between neighbours in a row, for lines to pass


def leaf_order(picture: Picture) -> dict[Item, int]:
    """Return the number of every leaf, in the order in which they ran."""
    return {leaf: n for n, leaf in enumerate(picture.leaves())}


class Rows:
    """Which row each item of a frame stands in, and what it continues."""

    def __init__(self, picture: Picture, frame: Item) -> None:
        """Rank what is inside frame, whose items stand in the order in which they ran."""
        self.items = frame.inside
        order = leaf_order(picture)
        leaves = {item: set(item.leaves()) for item in self.items}
        self.into: dict[Item, list[tuple[Edge, Item | None]]] = {}
        for item in self.items:
            outside = [e for e in picture.edges if e.target in leaves[item]]
            outside = [e for e in outside if e.source not in leaves[item]]
            outside.sort(key=lambda e: order[e.target])
            self.into[item] = [
                (e, next((s for s in self.items if e.source in leaves[s]), None)) for e in outside
            ]
        self.row: dict[Item, int] = {}
        self.below: dict[Item, list[Item]] = {}
        for item in self.items:
            sources = list(dict.fromkeys(s for _, s in self.into[item] if s is not None))
            # What enters a frame at its side does not lift the frame.
            lifting = self._main(item, sources) if item.kind == "frame" else sources
            self.row[item] = 1 + max((self.row[s] for s in lifting), default=-1)
            self.below[item] = sources if joins_equals(item) else self._main(item, sources)
        last = max(self.row.values())
        for item in self.items:
            if item.kind == "output":
                self.row[item] = last

    def _main(self, item: Item, sources: list[Item]) -> list[Item]:
        """Return the one source that item stands on: a frame its first, an op its latest."""
        if item.kind == "frame":
            first = self.into[item][0][1] if self.into[item] else None
            return [first] if first is not None else []
        return sorted(sources, key=lambda s: -self.row[s])[:1]


class _Block(NamedTuple):
    """An item and all that stands below and beside it; its axis is at 0."""

    left: float
    right: float
    at: dict[Item, float]


def _beside(block: _Block, other: _Block, shift: float) -> _Block:
    """Join two blocks, the other one moved by shift."""
    at = block.at | {item: x + shift for item, x in other.at.items()}
    left, right = other.left + shift, other.right + shift
    return _Block(min(block.left, left), max(block.right, right), at)


class Lanes:
    """The x of every item of a frame."""

    def __init__(self, layout: Layout, rows: Rows, sizes: dict[Item, Rect]) -> None:
        """Take sizes of items with their axes at 0; those that span others come out wider."""
        self.layout, self.picture, self.rows, self.sizes = layout, layout.picture, rows, sizes
        self.order = leaf_order(layout.picture)
        self.carried: dict[Item, list[Item]] = {item: [] for item in rows.items}
        self.beside: dict[Item, list[Item]] = {item: [] for item in rows.items}
        self.roots: list[Item] = []
        for item in rows.items:
            users = [u for u in rows.items if any(s is item for _, s in rows.into[u])]
            on_it = [u for u in users if item in rows.below[u]]
            if on_it:
                self.carried[on_it[0]].append(item)
            elif users:
                self.beside[users[0]].append(item)
            else:
                self.roots.append(item)
        for user in rows.items:
            self.carried[user].sort(key=rows.below[user].index)

    def positions(self) -> dict[Item, float]:
        """Return the axis of every item; that of the first root is 0."""
        whole = self._block(self.roots[0], sides_left=False)
        for root in self.roots[1:]:
            whole = self._add_root(whole, root)
        for item in self.rows.items:
            self._centre_below_users(whole.at, item)
        return whole.at

    def _block(self, item: Item, sides_left: bool) -> _Block:
        """Place item above what it continues; lanes beside go where they part no two equals."""
        children = self.carried[item]
        several = len(children) > 1
        blocks = [
            self._block(child, sides_left=n == 0 if several else sides_left)
            for n, child in enumerate(children)
        ]
        at: dict[Item, float] = {}
        left = right = 0.0
        for n, block in enumerate(blocks):
            shift = 0.0 if n == 0 else up(right + LANE - block.left, 20)
            at |= {i: x + shift for i, x in block.at.items()}
            left, right = min(left, block.left + shift), block.right + shift
        axes = [at[child] for child in self.carried[item]]
        axis = up((min(axes) + max(axes)) / 2) if axes else 0
        at = {i: x - axis for i, x in at.items()} | {item: 0.0}
        if len(axes) > 1:
            half = max(self.sizes[item].right, up((max(axes) - min(axes)) / 2 + 40))
            self.sizes[item] = self.sizes[item]._replace(left=-half, right=half)
        own = self.sizes[item]
        left, right = min(left - axis, own.left), max(right - axis, own.right, self._label(item))
        return self._with_sides(item, _Block(left, right, at), sides_left)

    def _label(self, item: Item) -> float:
        if item.kind == "frame":
            return 0.0
        values = values_out(self.picture, item)
        widths = [label_width(self.layout.letters, value) for value in values]
        return widths[0] if len(widths) == 1 else 0.0

    def _with_sides(self, item: Item, block: _Block, sides_left: bool) -> _Block:
        """Put what item needs besides what it stands on into lanes left and right of it."""
        own = self._first_input(self.carried[item])
        for side in sorted(self.beside[item], key=self._nearness):
            first = self._first_input([side])
            # Two sequences stand in the order in which they are given: a source left of a target.
            left = first < own if item.kind == "frame" else sides_left
            other = self._block(side, sides_left=left)
            if left:
                shift = -up(other.right + LANE - block.left, 20)
            else:
                shift = up(block.right + LANE - other.left, 20)
            block = _beside(block, other, shift)
        return block

    def _nearness(self, side: Item) -> tuple[int, int]:
        """Order lanes from the near to the far: small before large, used early before used late."""
        leaves = list(side.leaves())
        users = [e.target for e in self.picture.edges if e.source in leaves]
        return len(leaves), min(self.order[u] for u in users if u not in leaves)

    def _first_input(self, items: list[Item]) -> int:
        """Return the number of the first input that any of items depends on."""
        found = {leaf for item in items for leaf in item.leaves()}
        todo = list(found)
        while todo:
            new = {edge.source for edge in self.picture.into(todo.pop())} - found
            found |= new
            todo += new
        return min((self.order[leaf] for leaf in found if leaf.kind == "input"), default=-1)

    def _add_root(self, whole: _Block, root: Item) -> _Block:
        """Put a further root above what it comes from, if nothing stands there, else beside it."""
        block = self._block(root, sides_left=False)
        edge, source = self.rows.into[root][0]
        shift = up(whole.right + LANE - block.left, 20)
        if source is not None and len(block.at) == 1:
            above = [i for i in whole.at if self.rows.row[i] > self.rows.row[source]]
            end = max(whole.at[i] + max(self.sizes[i].right, self._label(i)) for i in above)
            shift = min(shift, up(max(end + LANE - block.left, whole.at[source] + 60), 20))
            start = min(whole.at[i] + self.sizes[i].left for i in above)
            other = -up(LANE + block.right - start, 20)
            first = values_out(self.picture, edge.source)[0] is edge.value
            if first and abs(other - whole.at[source]) < abs(shift - whole.at[source]):
                shift = other
        return _beside(whole, block, shift)

    def _centre_below_users(self, at: dict[Item, float], item: Item) -> None:
        """Move an input that several parts of one kind read to below the middle one of them."""
        users = [u for u in self.rows.items if any(s is item for _, s in self.rows.into[u])]
        kinds = {user.scope.kind for user in users if user.kind == "box"}
        if item.kind != "input" or len(users) < 2 or len(kinds) != 1:
            return
        if any(user.kind != "box" for user in users):
            return
        axes = sorted(at[user] for user in users)
        half = len(axes) // 2
        middle = axes[half] if len(axes) % 2 else up((axes[half - 1] + axes[half]) / 2)
        others = [i for i in at if self.rows.row[i] == 0 and i is not item]
        reach = self.sizes[item].right + LANE
        if all(abs(at[i] - middle) > reach + self.sizes[i].right for i in others):
            at[item] = middle
