"""How lines run: at right angles, round every box and every word, from boxes' tops to bottoms.

In: a `Layout` with its ends. Out: for each edge the corners of its line. All lines of one tensor
are one tree: the first runs from the box, the others branch off where that makes them shortest, so
a residual leaves the column just before the part that it goes around. Lines are found one after the
other by A* on the grid; lines of two tensors may cross at right angles and share no stretch.
"""

import heapq
from collections.abc import Iterator
from itertools import pairwise

from diagram_graph import Edge, Item
from diagram_measure import GRID, HEADER, NOTE, Layout, Rect, label_width
from diagram_notation import sign, text_width, texts
from diagram_trace import Value

Point = tuple[int, int]  # in steps of the grid
Step = tuple[int, int]
State = tuple[Point, Step | None]  # a point, and the step that led there
STEPS: tuple[Step, ...] = ((0, 1), (1, 0), (-1, 0), (0, -1))
# What a line pays, in steps: for a bend, a crossing, a step beside a box, one through a frame that
# is no concern of it, one beside another line.
BEND, CROSSING, NEAR, FOREIGN, PARALLEL = 3.0, 8.0, 1.5, 3.0, 1.0
MARGIN = 3
ARRIVED: Point = (1 << 20, 1 << 20)  # no point of any grid


class NoWayError(Exception):
    """An edge cannot be drawn: the layout left no room for it."""


def routes(layout: Layout) -> dict[Edge, list[tuple[float, float]]]:
    """Return the corners of every edge's line; its last is where the arrow's tip is."""
    router = _Router(layout)
    edges = sorted(layout.picture.edges, key=router.urgency)
    for edge in edges:
        router.draw(edge)
    return {edge: _corners(router.lines[edge]) for edge in layout.picture.edges}


def arrivals(layout: Layout, edge: Edge) -> list[tuple[float, float, Step]]:
    """Return where edge may end, and in which direction: at a bottom, or at the side of a sign."""
    rect = layout.rects[edge.target]
    if sign(edge.target) and edge is not _from_below(layout, edge.target):
        middle = (rect.bottom + rect.top) / 2
        return [(rect.left, middle, (1, 0)), (rect.right, middle, (-1, 0))]
    return [(layout.ports[edge], rect.bottom, (0, 1))]


def _from_below(layout: Layout, item: Item) -> Edge:
    """Return the edge that enters a sign from below: the one that comes straightest."""
    axis = layout.rects[item].axis

    def askew(edge: Edge) -> tuple[bool, float, float]:
        aside = abs(layout.stems[edge.source, edge.value] - axis)
        return edge.carries_past, aside, -layout.rects[edge.source].top

    return min(layout.picture.into(item), key=askew)


class _Router:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.lines: dict[Edge, list[Point]] = {}
        self.trees: dict[tuple[Item, Value], dict[Point, None]] = {}
        self.used: dict[Point, dict[tuple[Item, Value], set[Step]]] = {}
        self.blocked: set[Point] = set()
        self.near: set[Point] = set()
        self.frames = [i for i in layout.rects if i.kind == "frame" and i.parent is not None]
        for item in layout.picture.leaves():
            self._block_leaf(item)
        self.around: dict[Point, list[Item]] = {}
        for frame in self.frames:
            self._block_title(frame)
            for point in _points(layout.rects[frame]):
                self.around.setdefault(point, []).append(frame)
        self.near -= self.blocked
        whole = layout.rects[layout.picture.frame]
        self.low = _point(whole.left, whole.bottom - MARGIN * GRID)
        self.high = _point(whole.right, whole.top)

    def _block_leaf(self, item: Item) -> None:
        rect = self.layout.rects[item]
        self.blocked |= set(_points(rect))
        self.near |= set(_points(_grown(rect, GRID)))
        for (owner, value), x in self.layout.stems.items():
            if owner is item:
                right = x + label_width(self.layout.letters, value)
                self.blocked |= set(_points(Rect(x + 1, rect.top + 1, right + 4, rect.top + 14, 0)))

    def _block_title(self, frame: Item) -> None:
        rect = self.layout.rects[frame]
        name, kind = texts(frame, self.layout.letters)
        right = rect.left + 15 + text_width(f"{name} · {kind}", NOTE, bold=True)
        title = Rect(rect.left + 5, rect.top - HEADER - 5, right, rect.top - 5, 0)
        self.blocked |= set(_points(title))
        if frame.times > 1:
            times = Rect(rect.right - 60, rect.top - HEADER - 5, rect.right - 5, rect.top - 5, 0)
            self.blocked |= set(_points(times))

    def urgency(self, edge: Edge) -> tuple[bool, bool, float, int, float]:
        """Order edges: straight ones first; far tensors before near ones, so that they lie outside.

        Of one tensor's lines the near come first, so that the far branch off on the way.
        """
        x, port = self.layout.stems[edge.source, edge.value], self.layout.ports[edge]
        all_of_it = [e for e in self.layout.picture.edges if e.value is edge.value]
        far = max(self._distance(e) for e in all_of_it)
        number = self.layout.picture.edges.index(all_of_it[0])
        return edge.carries_past, x != port, -far, number, self._distance(edge)

    def _distance(self, edge: Edge) -> float:
        rects = self.layout.rects
        across = abs(self.layout.stems[edge.source, edge.value] - self.layout.ports[edge])
        return across + abs(rects[edge.target].bottom - rects[edge.source].top)

    def draw(self, edge: Edge) -> None:
        """Find the line of edge and occupy its points."""
        net = edge.source, edge.value
        tree = self.trees.setdefault(net, {})
        top = self.layout.rects[edge.source].top
        start = _point(self.layout.stems[net], top)
        first = not tree
        origins = {_move(start, (0, 1)): None} if first else tree
        ends = {}
        for x, y, step in arrivals(self.layout, edge):
            tip = _point(x, y)
            ends[_move(tip, (-step[0], -step[1]))] = (tip, step)
        line = self._search(edge, list(origins), ends, upward=first)
        line = ([start] if first else []) + line
        self.lines[edge] = line
        for one, other in pairwise(line):
            step = other[0] - one[0], other[1] - one[1]
            for point in (one, other):
                self.used.setdefault(point, {}).setdefault(net, set()).add(step)
        # Nothing branches off a box or an arrow's tip.
        tree |= dict.fromkeys(line[1:-1] if first else line[:-1])

    def _search(
        self,
        edge: Edge,
        origins: list[Point],
        ends: dict[Point, tuple[Point, Step]],
        upward: bool,
    ) -> list[Point]:
        """Return the cheapest way from any of origins to any of ends, the tip included."""
        net = edge.source, edge.value
        own = {*edge.source.above(), *edge.target.above()}
        steps: tuple[Step | None, ...] = ((0, 1),) if upward else (None,)
        cost: dict[State, float] = {(p, s): 0.0 for p in origins for s in steps}
        came: dict[State, State] = {}
        queue = [(self._ahead(p, ends), n, p, s) for n, (p, s) in enumerate(cost)]
        heapq.heapify(queue)
        count, closed = len(queue), set()
        while queue:
            _, _, point, step = heapq.heappop(queue)
            here = (point, step)
            if point == ARRIVED:
                return self._back(came, came[here], ends)
            if here in closed:
                continue
            closed.add(here)
            for new in STEPS:
                if step == (-new[0], -new[1]):
                    continue
                price = self._price(net, point, step, new, own)
                if price is None:
                    continue
                there = (_move(point, new), new)
                total = cost[here] + price
                if total < cost.get(there, 1e9):
                    cost[there], came[there] = total, here
                    count += 1
                    rank = total + self._ahead(there[0], ends)
                    heapq.heappush(queue, (rank, count, *there))
            if point in ends and self._may_turn(net, point, step, ends[point][1]):
                done: State = (ARRIVED, ends[point][1])
                total = cost[here] + BEND * (step != ends[point][1])
                if total < cost.get(done, 1e9):
                    cost[done], came[done] = total, here
                    count += 1
                    heapq.heappush(queue, (total, count, *done))
        raise NoWayError(f"from {edge.source.name} to {edge.target.name}")

    def _ahead(self, point: Point, ends: dict[Point, tuple[Point, Step]]) -> float:
        """Return what the rest of the way costs at least: its length, a bend if it needs one."""
        ways = [(abs(point[0] - x), abs(point[1] - y)) for x, y in ends]
        return min(across + along + BEND * (across > 0 < along) for across, along in ways)

    def _back(
        self,
        came: dict[State, State],
        last: State,
        ends: dict[Point, tuple[Point, Step]],
    ) -> list[Point]:
        line = [ends[last[0]][0], last[0]]
        while last in came:
            last = came[last]
            line.append(last[0])
        return line[::-1]

    def _price(
        self,
        net: tuple[Item, Value],
        point: Point,
        step: Step | None,
        new: Step,
        own: set[Item],
    ) -> float | None:
        """Return what the step `new` from point costs, None where it is forbidden."""
        there = _move(point, new)
        if there in self.blocked or not self._inside(there):
            return None
        if not self._may_turn(net, point, step, new):
            return None
        others = [s for n, s in self.used.get(there, {}).items() if n != net]
        if any(new in s or (-new[0], -new[1]) in s or len(s) > 1 for s in others):
            return None
        price = 1.0 + CROSSING * len(others) + BEND * (step is not None and step != new)
        price += NEAR * (there in self.near)
        price += FOREIGN * any(frame not in own for frame in self.around.get(there, ()))
        for side in ((new[1], new[0]), (-new[1], -new[0])):
            beside = self.used.get(_move(there, side), {})
            price += PARALLEL * any(n != net and new in s for n, s in beside.items())
        return price

    def _may_turn(
        self, net: tuple[Item, Value], point: Point, step: Step | None, new: Step
    ) -> bool:
        """Tell whether a line may turn at point: not on a line that it is only crossing."""
        crossed = any(n != net for n in self.used.get(point, {}))
        return step is None or step == new or not crossed

    def _inside(self, point: Point) -> bool:
        return all(a <= p <= b for a, p, b in zip(self.low, point, self.high, strict=True))


def _point(x: float, y: float) -> Point:
    assert x % GRID == y % GRID == 0, (x, y)
    return int(x) // GRID, int(y) // GRID


def _move(point: Point, step: Step) -> Point:
    return point[0] + step[0], point[1] + step[1]


def _points(rect: Rect) -> Iterator[Point]:
    """Yield the points of the grid that lie in a rectangle, its border included."""
    for x in range(int(-(-rect.left // GRID)), int(rect.right // GRID) + 1):
        for y in range(int(-(-rect.bottom // GRID)), int(rect.top // GRID) + 1):
            yield x, y


def _grown(rect: Rect, by: float) -> Rect:
    return Rect(rect.left - by, rect.bottom - by, rect.right + by, rect.top + by, rect.axis)


def _corners(line: list[Point]) -> list[tuple[float, float]]:
    """Return the points of a line at which it begins, turns and ends, in pixels."""
    kept = [line[0]]
    for before, here, after in zip(line, line[1:], line[2:], strict=False):
        if (here[0] - before[0], here[1] - before[1]) != (after[0] - here[0], after[1] - here[1]):
            kept.append(here)
    return [(float(x * GRID), float(y * GRID)) for x, y in [*kept, line[-1]]]
