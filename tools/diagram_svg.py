"""Write a laid-out picture as SVG: one self-contained file, the same bytes every time.

It carries its own light and dark colours (those of the attention pictures), asks for no font but a
sans-serif, and says in <title> and <desc> what it shows. Boxes and lines carry what they stand for
as data-… attributes; a box's docstring appears under the mouse.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from diagram_graph import Edge, Item
from diagram_measure import GRID, HEADER, LABEL, NOTE, PORT, TEXT, Layout, Rect, port_names
from diagram_notation import MEANING, sign, text_width, texts
from diagram_routes import arrivals, routes
from diagram_trace import Value
from minigpt.attention_picture import BLUES, FRAME, INK

MARGIN, TITLE, LINE = 20, 44, 18
LIGHT = {
    "paper": BLUES[0],
    "ink": INK,
    "quiet": "#5c6675",
    "plain": BLUES[0],
    "learned": BLUES[1],
    "attends": BLUES[2],
    "edge": BLUES[4],
    "past": FRAME,
}
DARK = {
    "paper": "#10151c",
    "ink": "#e9edf3",
    "quiet": "#a3aebd",
    "plain": "#1b222c",
    "learned": "#173a5e",
    "attends": BLUES[4],
    "edge": BLUES[2],
    "past": "#ff9d4d",
}
STYLE = """\
text{{font-family:sans-serif;fill:{ink}}}
.paper{{fill:{paper}}}
.quiet{{fill:{quiet}}}
.box rect,.sign circle{{fill:{plain};stroke:{edge}}}
.learned rect{{fill:{learned}}}
.attends rect{{fill:{attends}}}
.attends .quiet{{fill:{ink}}}
.frame rect{{fill:{edge};stroke:{edge}}}
.line{{stroke:{ink}}}
.tip,.dot{{fill:{ink}}}
.past .line{{stroke:{past}}}
.past .tip,.past .dot{{fill:{past}}}
.mark{{stroke:{ink}}}
"""
SIGN_PATHS = {
    "+": "M-5 0H5M0 -5V5",
    "−": "M-5 0H5",
    "⊙": "M-4 -4L4 4M-4 4L4 -4",
    "÷": "M-5 0H5M0 -4V-3M0 3V4",
}


def svg(layout: Layout, title: str, description: str, meaning: dict[str, str]) -> str:
    """Return the picture as the text of an SVG file.

    meaning   what letters stand for where it is not what they usually do
    """
    return _Page(layout, title, description, MEANING | meaning).text()


class _Page:
    def __init__(
        self, layout: Layout, title: str, description: str, meaning: dict[str, str]
    ) -> None:
        self.layout, self.title, self.description = layout, title, description
        self.lines = routes(layout)
        self.numbers = {item: n for n, item in enumerate(layout.picture.leaves())}
        frame = layout.rects[layout.picture.frame]
        bottom = min([0.0, *(y for line in self.lines.values() for _, y in line)])
        right = max([frame.right, *(x for line in self.lines.values() for x, _ in line)])
        left = min([frame.left, *(x for line in self.lines.values() for x, _ in line)])
        inner = max(right - left, text_width(title, 15, bold=True), 360)
        self.x0 = MARGIN - left + (inner - (right - left)) / 2
        self.y0 = TITLE + frame.top
        self.width = inner + 2 * MARGIN
        self.legend = _rows(self._legend(meaning), inner)
        self.keys = self._keys()
        self.foot = self.y0 - bottom + 14
        rows = len(self.legend) + bool(self.keys)
        self.height = self.foot + LINE * rows + MARGIN - 6

    def text(self) -> str:
        w, h = _n(self.width), _n(self.height)
        light, dark = STYLE.format(**LIGHT), STYLE.format(**DARK)
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" '
            f'height="{h}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="desc">{escape(self.description)}</desc>',
            f"<style>\n{light}.frame rect{{fill-opacity:.035;stroke-opacity:.35}}",
            ".line,.mark{fill:none;stroke-width:1.3}",
            f"@media(prefers-color-scheme:dark){{\n{dark}}}\n</style>",
            f'<rect class="paper" width="{w}" height="{h}" rx="10"/>',
            f'<text x="{MARGIN}" y="30" font-size="15" font-weight="bold">'
            f"{escape(self.title)}</text>",
        ]
        frames = [i for i in self.layout.rects if i.kind == "frame" and i.parent is not None]
        frames.sort(key=lambda frame: len(frame.above()))
        body = [line for frame in frames for line in self._frame(frame)]
        body += [line for edge in self.layout.picture.edges for line in self._edge(edge)]
        body += [line for leaf in self.numbers for line in self._leaf(leaf)]
        body += [self._shape(item, value, x) for (item, value), x in self.layout.stems.items()]
        return "\n".join([*head, *body, *self._footer(), "</svg>\n"])

    def _at(self, x: float, y: float) -> tuple[str, str]:
        """Return a point of the layout, whose y grows upward, on the page."""
        return _n(self.x0 + x), _n(self.y0 - y)

    def _rect(self, rect: Rect, radius: int, inset: float = 0) -> str:
        x, y = self._at(rect.left + inset, rect.top - inset)
        wide, high = rect.right - rect.left - 2 * inset, rect.top - rect.bottom - 2 * inset
        return f'<rect x="{x}" y="{y}" width="{_n(wide)}" height="{_n(high)}" rx="{radius}"/>'

    def _write(
        self, at: tuple[float, float], text: str, size: float, extra: str = "", middle: bool = True
    ) -> str:
        x, y = self._at(*at)
        anchor = ' text-anchor="middle"' * middle
        return f'<text x="{x}" y="{y}" font-size="{_n(size)}"{anchor}{extra}>{escape(text)}</text>'

    def _frame(self, frame: Item) -> Iterator[str]:
        rect = self.layout.rects[frame]
        name, kind = texts(frame, self.layout.letters)
        yield f'<g class="frame" data-name={quoteattr(name)} data-kind={quoteattr(kind)}>'
        if frame.scope.doc:
            yield f"<title>{escape(frame.scope.doc)}</title>"
        yield self._rect(rect, 9, inset=GRID / 2)
        x, y = self._at(rect.left + 15, rect.top - HEADER)
        yield (
            f'<text x="{x}" y="{y}" font-size="{_n(NOTE)}"><tspan font-weight="bold">{escape(name)}'
            f'</tspan><tspan class="quiet"> · {escape(kind)}</tspan></text>'
        )
        if frame.times > 1:
            at = (rect.right - 35, rect.top - HEADER - 4)
            yield self._write(at, f"× {frame.times}", 16, ' font-weight="bold"')
        yield "</g>"

    def _edge(self, edge: Edge) -> Iterator[str]:
        corners = self.lines[edge]
        ends = arrivals(self.layout, edge)
        (dx, dy), (x, y) = next((e[2], e[:2]) for e in ends if e[:2] == corners[-1])
        past = " past" * edge.carries_past
        ids = f'data-from="n{self.numbers[edge.source]}" data-to="n{self.numbers[edge.target]}"'
        shape = " ".join(map(str, edge.value.shape))
        yield f'<g class="edge{past}" {ids} data-shape="{shape}">'
        begins = (self.layout.stems[edge.source, edge.value], self.layout.rects[edge.source].top)
        if corners[0] != begins:
            px, py = self._at(*corners[0])
            yield f'<circle class="dot" cx="{px}" cy="{py}" r="2.2"/>'
        # The line stops inside the arrow, so that its blunt end does not show at the tip.
        yield f'<path class="line" d="{self._path([*corners[:-1], (x - 4 * dx, y - 4 * dy)])}"/>'
        wings = [(x - 7 * dx - 3.2 * dy, y - 7 * dy + 3.2 * dx)]
        wings += [(x - 7 * dx + 3.2 * dy, y - 7 * dy - 3.2 * dx)]
        tip = "L".join(" ".join(self._at(*point)) for point in [(x, y), *wings])
        yield f'<path class="tip" d="M{tip}Z"/></g>'

    def _path(self, corners: list[tuple[float, float]]) -> str:
        """Return path data with every corner rounded."""
        parts = ["M" + " ".join(self._at(*corners[0]))]
        for before, here, after in zip(corners, corners[1:], corners[2:], strict=False):
            one, other = _towards(here, before), _towards(here, after)
            points = (" ".join(self._at(*point)) for point in (one, here, other))
            parts.append("L{}Q{} {}".format(*points))
        return "".join([*parts, "L" + " ".join(self._at(*corners[-1]))])

    def _leaf(self, item: Item) -> Iterator[str]:
        rect, number = self.layout.rects[item], self.numbers[item]
        name, note = texts(item, self.layout.letters)
        mark = sign(item)
        kind = "sign" if mark else item.kind if item.kind in ("input", "output") else "box"
        looks = " attends" * item.attends or " learned" * item.learned
        data = f"data-name={quoteattr(name)} data-kind={quoteattr(note)}"
        yield f'<g id="n{number}" class="{kind}{looks}" {data}>'
        if item.op is None and kind == "box" and item.scope.doc:
            yield f"<title>{escape(item.scope.doc)}</title>"
        if mark:
            x, y = self._at(rect.axis, (rect.top + rect.bottom) / 2)
            yield f'<circle cx="{x}" cy="{y}" r="{GRID}"/>'
            yield f'<path class="mark" transform="translate({x} {y})" d="{SIGN_PATHS[mark]}"/></g>'
            return
        if kind == "box":
            yield self._rect(rect, 6)
        yield from self._leaf_text(item, rect, name, note)
        yield "</g>"

    def _leaf_text(self, item: Item, rect: Rect, name: str, note: str) -> Iterator[str]:
        names = port_names(self.layout.picture, item)
        middle = (rect.left + rect.right) / 2
        y = (rect.top + rect.bottom + (10 if names else 0)) / 2
        weight = "" if item.kind in ("input", "output") else ' font-weight="bold"'
        yield self._write((middle, y + 1.5 if note else y - 4), name, TEXT, weight)
        if note:
            yield self._write((middle, y - 12), note, NOTE, ' class="quiet"')
        for edge in self.layout.picture.into(item) if names else []:
            at = (self.layout.ports[edge], rect.bottom + 4)
            yield self._write(at, edge.port, PORT, ' class="quiet"')

    def _shape(self, item: Item, value: Value, x: float) -> str:
        letters, numbers = self.layout.letters.shape(value.shape)
        px, py = self._at(x + 6, self.layout.rects[item].top + 7)
        return (
            f'<text class="shape" x="{px}" y="{py}" font-size="{_n(LABEL)}"><tspan font-weight='
            f'"bold">{letters}</tspan><tspan class="quiet" dx="5">{numbers}</tspan></text>'
        )

    def _legend(self, meaning: dict[str, str]) -> list[tuple[str, str]]:
        shapes = [value.shape for _, value in self.layout.stems]
        letters = self.layout.letters
        return [(s, f"{letters.sizes[s]:,} {meaning[s]}") for s in letters.used(shapes)]

    def _keys(self) -> list[tuple[str, str]]:
        leaves = list(self.numbers)
        keys = [("box attends", "softmax over positions")] * any(leaf.attends for leaf in leaves)
        keys += [("box learned", "has weights")] * any(i.learned and not i.attends for i in leaves)
        past = any(edge.carries_past for edge in self.layout.picture.edges)
        return keys + [("edge past", "residual connection")] * past

    def _footer(self) -> Iterator[str]:
        y = self.foot
        for row in self.legend:
            spans = "".join(
                f'<tspan dx="{14 if n else 0}" font-weight="bold">{letter}</tspan>'
                f'<tspan class="quiet"> {escape(text)}</tspan>'
                for n, (letter, text) in enumerate(row)
            )
            yield self._foot_text(MARGIN, y, spans)
            y += LINE
        x: float = MARGIN
        for looks, text in self.keys:
            yield f'<g class="{looks}">'
            if looks == "edge past":
                yield f'<path class="line" d="M{_n(x)} {_n(y - 3.5)}h14"/></g>'
            else:
                yield f'<rect x="{_n(x)}" y="{_n(y - 9)}" width="14" height="11" rx="3"/></g>'
            yield self._foot_text(x + 20, y, f'<tspan class="quiet">{text}</tspan>')
            x += 20 + text_width(text, NOTE) + 14

    def _foot_text(self, x: float, y: float, spans: str) -> str:
        return f'<text class="legend" x="{_n(x)}" y="{_n(y)}" font-size="{_n(NOTE)}">{spans}</text>'


def _rows(entries: list[tuple[str, str]], width: float) -> list[list[tuple[str, str]]]:
    """Break the entries of a legend into rows that fit."""
    rows: list[list[tuple[str, str]]] = [[]]
    used = 0.0
    for letter, text in entries:
        wide = text_width(letter, NOTE, bold=True) + text_width(" " + text, NOTE) + 14
        if rows[-1] and used + wide > width:
            rows.append([])
            used = 0.0
        rows[-1].append((letter, text))
        used += wide
    return rows


def _towards(here: tuple[float, float], there: tuple[float, float]) -> tuple[float, float]:
    """Return the point 5 pixels from here to there, where a rounded corner begins."""
    (x, y), (u, v) = here, there
    length = abs(u - x) + abs(v - y)
    share = min(5.0, length / 2) / length
    return x + (u - x) * share, y + (v - y) * share


def _n(number: float) -> str:
    return f"{round(number, 2):g}" if abs(number) < 1e5 else str(number)
