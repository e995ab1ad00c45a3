"""What a picture shows: boxes for the parts that stay closed, frames for those that are opened.

In: a `Trace`, and which scopes to open. Out: a `Picture`, whose boxes and edges are those that the
trace found. Four things make it readable, none of which knows what model it is looking at:

    closed    a scope that is not opened is one box, whatever runs inside
    views     a transposed or reshaped tensor is the same tensor to a reader: edges pass through
    unheard   what no output depends on (a check of the arguments) is left out
    folded    members of one ModuleList that compute alike, each upon the last, are drawn once, × N
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from diagram_trace import Op, Scope, Trace, Value

ATTENDS = {"softmax", "scaled_dot_product_attention"}
NEGATIONS = {"__invert__", "logical_not"}


@dataclass(eq=False)
class Item:
    """Something drawn. A frame has items inside; all others are leaves, between which edges run."""

    kind: str  # input, output, box (a closed scope), op, frame
    scope: Scope
    parent: "Item | None" = None
    name: str = ""
    ops: list[Op] = field(default_factory=list)  # what ran inside a box; the one that an op is
    inside: "list[Item]" = field(default_factory=list)
    times: int = 1
    learned: bool = False  # has weights
    attends: bool = False  # holds a softmax over positions

    def leaves(self) -> "Iterator[Item]":
        """Yield the items that edges end at, in the order in which they ran."""
        if self.kind != "frame":
            yield self
        for item in self.inside:
            yield from item.leaves()

    @property
    def op(self) -> Op | None:
        """The operation that this item is, None for a part of several."""
        return self.ops[0] if self.kind == "op" else None

    def above(self) -> "list[Item]":
        """Return the frames around this item, innermost first."""
        return [self.parent, *self.parent.above()] if self.parent else []


@dataclass(eq=False)
class Edge:
    """A tensor on its way from one leaf to another."""

    source: Item
    target: Item
    value: Value
    port: str  # the name of the argument it arrives as; "" where there is none
    carries_past: bool = False  # it goes around a part and is added to what that part makes


@dataclass(eq=False)
class Picture:
    """All items, within one frame, and all edges."""

    frame: Item
    edges: list[Edge]

    def leaves(self) -> list[Item]:
        """Return all items that edges end at."""
        return list(self.frame.leaves())

    def into(self, item: Item) -> list[Edge]:
        """Return the edges that end at item."""
        return [edge for edge in self.edges if edge.target is item]

    def out_of(self, item: Item) -> list[Edge]:
        """Return the edges that begin at item."""
        return [edge for edge in self.edges if edge.source is item]


def picture(trace: Trace, opened: Callable[[Scope], bool]) -> Picture:
    """Return what to draw of a trace; the root is always opened."""
    drawn = _Builder(trace, opened).build()
    _leave_out_unheard(drawn)
    _fold(drawn)
    for edge in drawn.edges:
        edge.carries_past = _carries_past(edge, drawn)
    return drawn


class _Builder:
    def __init__(self, trace: Trace, opened: Callable[[Scope], bool]) -> None:
        self.trace, self.opened = trace, opened
        self.frame = Item("frame", trace.root)
        self.scopes: dict[Scope, Item] = {trace.root: self.frame}
        self.ops: dict[Op, Item] = {}
        self.inputs: dict[Value, Item] = {}
        self.edges: list[Edge] = []

    def build(self) -> Picture:
        for value in self.trace.inputs:
            self.inputs[value] = self._item("input", self.trace.root, self.frame, name=value.name)
        for op in self.trace.ops:
            self._add_op(op)
        for item in list(self.frame.leaves()):
            self._connect(item)
        for value in self.trace.outputs:
            item = self._item("output", self.trace.root, self.frame, name=value.name)
            self._edge(value, item, "")
        return Picture(self.frame, self.edges)

    def _item(self, kind: str, scope: Scope, parent: Item, name: str = "") -> Item:
        item = Item(kind, scope, parent, name=name)
        parent.inside.append(item)
        return item

    def _add_op(self, op: Op) -> None:
        """Find the item that shows op, opening the frames on the way to it; none for a view."""
        parent = self.frame
        for scope in op.scope.chain()[1:]:
            if scope not in self.scopes:
                kind = "frame" if self.opened(scope) else "box"
                self.scopes[scope] = self._item(kind, scope, parent, name=scope.name)
            parent = self.scopes[scope]
            if parent.kind == "box":
                break
        if parent.kind == "frame":
            if op.is_view or op.function in NEGATIONS:
                return
            parent = self._item("op", op.scope, parent)
        self.ops[op] = parent
        parent.ops.append(op)
        parent.attends |= op.function in ATTENDS
        parent.learned |= parent.kind == "op" and any(v.is_weight for v in op.operands)
        module = parent.scope.module
        if parent.kind == "box" and module is not None:
            parent.learned = any(True for _ in module.parameters())

    def _origin(self, value: Value) -> tuple[Item | None, Value]:
        """Return the leaf that value comes out of, behind all views, and the value there."""
        while value.maker is not None and value.maker not in self.ops:
            value = value.maker.operands[0]
        if value.maker is not None:
            return self.ops[value.maker], value
        return self.inputs.get(value), value

    def _edge(self, value: Value, target: Item, port: str) -> None:
        source, value = self._origin(value)
        if source is not None and source is not target:
            self.edges.append(Edge(source, target, value, port))

    def _connect(self, item: Item) -> None:
        """Draw edges into item: its arguments, and what else it takes from outside."""
        if item.op is not None:
            for operand in item.op.operands:
                self._edge(operand, item, "")
        if item.kind != "box":
            return
        for name, value in item.scope.arguments:
            self._edge(value, item, name)
        seen = {edge.value for edge in self.edges if edge.target is item}
        for operand in (operand for op in item.ops for operand in op.operands):
            value = self._origin(operand)[1]
            if value not in seen:
                seen.add(value)
                self._edge(value, item, "")


def _leave_out_unheard(drawn: Picture) -> None:
    heard = {item for item in drawn.leaves() if item.kind in ("input", "output")}
    while more := {edge.source for edge in drawn.edges if edge.target in heard} - heard:
        heard |= more
    drawn.edges = [edge for edge in drawn.edges if edge.target in heard]
    _keep_only(drawn.frame, heard)


def _keep_only(frame: Item, kept: set[Item]) -> None:
    frame.inside = [item for item in frame.inside if any(leaf in kept for leaf in item.leaves())]
    for item in frame.inside:
        _keep_only(item, kept)


def _fold(drawn: Picture) -> None:
    """Keep the first of each run of items that compute alike, each upon the one before."""
    frames = [drawn.frame]
    while frames:
        frame = frames.pop()
        frames += [item for item in frame.inside if item.kind == "frame"]
        i = 0
        while i < len(frame.inside):
            run = _run_from(drawn, frame.inside[i:])
            if len(run) > 1:
                _replace_by_first(drawn, run)
            i += 1


def _run_from(drawn: Picture, items: list[Item]) -> list[Item]:
    """Return the longest run of items that repeats the first of them."""
    run = items[:1]
    if not _list_name(items[0]) or items[0].kind not in ("frame", "box"):
        return run
    for item in items[1:]:
        same_list = _list_name(item) == _list_name(items[0])
        if not same_list or not _repeats(drawn, run[-1], item, first=run[0]):
            break
        run.append(item)
    return run


def _list_name(item: Item) -> str:
    """Return the name of the ModuleList that item is a member of, "" for none."""
    name, _, number = item.name.rpartition(".")
    return name if number.isdigit() else ""


def _repeats(drawn: Picture, before: Item, item: Item, first: Item) -> bool:
    """Tell whether item computes what `first` does, with its inputs from the item before it.

    What enters must be either the very tensor that entered the one before, such as a mask, or what
    the one before made; shapes must agree throughout.
    """
    one, two = list(first.leaves()), list(item.leaves())
    if [_looks(leaf) for leaf in one] != [_looks(leaf) for leaf in two]:
        return False
    chained = 0
    for a, b in zip(one, two, strict=True):
        into_a, into_b = drawn.into(a), drawn.into(b)
        if [(e.value.shape, e.port) for e in into_a] != [(e.value.shape, e.port) for e in into_b]:
            return False
        for e, f in zip(into_a, into_b, strict=True):
            if e.source in one:
                if f.source not in two or one.index(e.source) != two.index(f.source):
                    return False
            elif f.source in list(before.leaves()):
                chained += 1
            elif e.value is not f.value:
                return False
    return chained > 0


def _looks(leaf: Item) -> tuple[object, ...]:
    constants = tuple(leaf.op.constants) if leaf.op else ()
    inside = [(op.function, [value.shape for value in op.results]) for op in leaf.ops]
    return leaf.kind, leaf.name, leaf.scope.kind, constants, inside, leaf.learned


def _replace_by_first(drawn: Picture, run: list[Item]) -> None:
    first, parent = run[0], run[0].parent
    assert parent is not None
    first.times = len(run)
    gone = {leaf for item in run[1:] for leaf in item.leaves()}
    # What the last of them made, in the words of the first.
    leaf_of: dict[Item, Item] = {}
    value_of: dict[Value, Value] = {}
    for a, z in zip(first.leaves(), run[-1].leaves(), strict=True):
        leaf_of[z] = a
        for one, other in zip(a.ops, z.ops, strict=True):
            value_of |= dict(zip(other.results, one.results, strict=True))
    drawn.edges = [edge for edge in drawn.edges if edge.target not in gone]
    for edge in drawn.edges:
        if edge.source in gone:
            edge.source, edge.value = leaf_of[edge.source], value_of[edge.value]
    parent.inside = [item for item in parent.inside if item not in run[1:]]


def _carries_past(edge: Edge, drawn: Picture) -> bool:
    """Tell whether edge is a residual connection, whose sum its tensor reaches by work as well."""
    if edge.target.op is None or edge.target.op.function != "add":
        return False
    others = [e.source for e in drawn.into(edge.target) if e is not edge]
    seen: set[Item] = set()
    while others:
        item = others.pop()
        if any(e.value is edge.value for e in drawn.into(item)):
            return True
        if item not in seen:
            seen.add(item)
            others += [e.source for e in drawn.into(item)]
    return False
