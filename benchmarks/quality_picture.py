"""The picture of the curves: perplexity against minutes, both on logarithmic scales, as SVG.

In: results as `curves` loads them. Out: one self-contained file, the same bytes every time. It
carries its own light and dark colours, asks for no font but a sans-serif, and says in <title> and
<desc> what it shows.

Ours are solid and blue, peers dashed; each curve is named where it ends. A pace, of which nothing
but the published end is known, is a ring.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from curves import Goal, Point, Result, goals, points

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 64, 220, 50, 52  # margins; the right one holds the names
LINE_HEIGHT = 15
STYLE = """\
text{font:13px sans-serif;fill:#1d2733}
.paper{fill:#ffffff}
.quiet{fill:#5c6675}
.grid{stroke:#d5dbe3}
.ours{stroke:#0b62c4;fill:none;stroke-width:2.5}
.peer{stroke:#b4531b;fill:none;stroke-width:2;stroke-dasharray:6 4}
.ours-dot{fill:#0b62c4}
.peer-dot{fill:#b4531b}
text.ours-name,text.peer-name{paint-order:stroke;stroke:#ffffff;stroke-width:4px}
text.ours-name{fill:#0b62c4}
text.peer-name{fill:#b4531b}
.ring{fill:none;stroke:#b4531b;stroke-width:2}
@media (prefers-color-scheme:dark){
text{fill:#e9edf3}
.paper{fill:#10151c}
.quiet{fill:#a3aebd}
.grid{stroke:#333d4a}
.ours{stroke:#6cb2ff}
.peer,.ring{stroke:#ff9d4d}
text.ours-name,text.peer-name{stroke:#10151c}
.ours-dot,text.ours-name{fill:#6cb2ff}
.peer-dot,text.peer-name{fill:#ff9d4d}
}
"""


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale from low … high to the pixels begin … end."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Return where value lies, in pixels."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """Return round numbers within the scale: 1, 2, 5, 10, …"""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        round_numbers = [
            digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)
        ]
        return [number for number in round_numbers if self.low <= number <= self.high]


class Name(NamedTuple):
    """What a curve is called, and where it ends."""

    y: float
    x: float
    text: str
    kind: str


def picture(results: list[Result]) -> str:
    """Return the SVG of all results."""
    curves = [(result, points(result)) for result in results if result["kind"] == "curve"]
    rings = [goal for goal in goals(results) if goal.extrapolated]
    x, y = scales([p for _, curve in curves for p in curve], rings)
    names = [Name(y(c[-1].perplexity), x(c[-1].minutes), r["name"], klass(r)) for r, c in curves]
    names += [
        Name(y(g.perplexity), x(g.minutes), f"{g.peer} (extrapolated)", "peer") for g in rings
    ]
    body = [
        *grid(x, y),
        *(drawn(curve, klass(result), x, y) for result, curve in curves),
        *(
            f'<circle class="ring" cx="{x(g.minutes)}" cy="{y(g.perplexity)}" r="6"/>'
            for g in rings
        ),
        *named(names),
    ]
    what = "; ".join(
        f"{result['name']} ends at {curve[-1].perplexity:.1f} after {curve[-1].minutes:.1f} minutes"
        for result, curve in curves
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>Perplexity of valid against minutes of training</title>",
            f"<desc>{escape(what)}.</desc>",
            f"<style>\n{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            f'<text x="{LEFT}" y="28">Perplexity of valid against minutes of training</text>',
            *body,
            "</svg>\n",
        ]
    )


def klass(result: Result) -> str:
    """Return the class of a result's marks."""
    return "ours" if result["ours"] else "peer"


def scales(seen: list[Point], rings: list[Goal]) -> tuple[Scale, Scale]:
    """Return the scales of minutes and of perplexity that hold everything, and a little more."""
    minutes = [p.minutes for p in seen] + [goal.minutes for goal in rings]
    figures = [p.perplexity for p in seen] + [goal.perplexity for goal in rings]
    x = Scale(0.9 * min(minutes), 1.1 * max(minutes), LEFT, WIDTH - RIGHT)
    y = Scale(0.9 * min(figures), 1.1 * max(figures), HEIGHT - BOTTOM, TOP)
    return x, y


def grid(x: Scale, y: Scale) -> Iterable[str]:
    """Yield lines at round numbers, with the numbers, and what they count."""
    for number in x.ticks():
        at = x(number)
        yield f'<path class="grid" d="M{at} {y.begin}V{y.end}"/>'
        yield label(number, at, y.begin + 18, "middle")
    for number in y.ticks():
        at = y(number)
        yield f'<path class="grid" d="M{x.begin} {at}H{x.end}"/>'
        yield label(number, x.begin - 8, at + 4, "end")
    yield label("minutes", (x.begin + x.end) / 2, HEIGHT - 12, "middle")


def label(what: float | str, x: float, y: float, anchor: str) -> str:
    """Return a number or a word beside a scale."""
    text = what if isinstance(what, str) else f"{what:,g}"
    return f'<text class="quiet" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def drawn(curve: list[Point], kind: str, x: Scale, y: Scale) -> str:
    """Return a curve and a dot for each of its points."""
    places = [(x(p.minutes), y(p.perplexity)) for p in curve]
    line = "L".join(f"{across} {down}" for across, down in places)
    dots = "".join(
        f'<circle class="{kind}-dot" cx="{across}" cy="{down}" r="3"/>' for across, down in places
    )
    return f'<path class="{kind}" d="M{line}"/>{dots}'


def named(names: list[Name]) -> Iterable[str]:
    """Yield the names, each beside its end, from the top down and never upon one another."""
    free = 0.0
    for name in sorted(names):
        free = max(name.y, free)
        place = f'x="{name.x + 12:.1f}" y="{free + 4:.1f}"'
        yield f'<text class="{name.kind}-name" {place}>{escape(name.text)}</text>'
        free += LINE_HEIGHT
