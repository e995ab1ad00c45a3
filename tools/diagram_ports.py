"""Where lines leave and arrive: points on the tops and bottoms of boxes.

In: a `Layout` with its rectangles. Out: the same with `stems` and `ports`. Ends are set so that
most lines are straight, as far as the boxes are wide.
"""

from diagram_graph import Item
from diagram_measure import GRID, Layout, label_width, port_names, port_spacing, up, values_out
from diagram_notation import sign


def set_ends(layout: Layout) -> None:
    """Place both ends of every edge."""
    leaves = layout.picture.leaves()
    for item in leaves:
        _place_stems(layout, item)
    for item in leaves:
        _straighten(layout, item)
        _place_ports(layout, item)


def _place_stems(layout: Layout, item: Item) -> None:
    """Spread what leaves a leaf along its top: the first at the axis, if there is room for all."""
    values, rect = values_out(layout.picture, item), layout.rects[item]
    widths = [up(label_width(layout.letters, value) + 4 * GRID) for value in values]
    needed = sum(widths[:-1])
    x = min(rect.axis, max(rect.left + 2 * GRID, rect.right - 2 * GRID - needed))
    for value, width in zip(values, widths, strict=True):
        layout.stems[item, value] = x
        x += width


def _straighten(layout: Layout, item: Item) -> None:
    """Move an output above where its tensor leaves, if nothing stands between."""
    if item.kind != "output" or not layout.picture.into(item):
        return
    edge, rect = layout.picture.into(item)[0], layout.rects[item]
    new = rect.moved(layout.stems[edge.source, edge.value] - rect.axis, 0)
    low = layout.rects[edge.source].top
    for other in layout.picture.leaves():
        r = layout.rects[other]
        right = max(
            [
                r.right,
                *(
                    layout.stems[other, v] + label_width(layout.letters, v)
                    for v in values_out(layout.picture, other)
                ),
            ]
        )
        overlaps = r.left < new.right + GRID and new.left - GRID < right
        if other is not item and r.top > low and overlaps:
            return
    layout.rects[item] = new


def _place_ports(layout: Layout, item: Item) -> None:
    """Spread what enters a leaf along its bottom, each as close to where it comes from as fits."""
    edges, rect = layout.picture.into(item), layout.rects[item]
    if sign(item) or not edges:
        layout.ports |= dict.fromkeys(edges, rect.axis)
        return
    step, inset = port_spacing(port_names(layout.picture, item))
    start, end = rect.left + inset, rect.right - inset
    stem = {edge: layout.stems[edge.source, edge.value] for edge in edges}
    wished = {edge: min(max(stem[edge], start), end) for edge in edges}
    if len(edges) == 1 and not start <= stem[edges[0]] <= end:
        wished[edges[0]] = rect.axis
    edges.sort(key=stem.__getitem__)
    xs = [wished[edges[0]]]
    for edge in edges[1:]:
        xs.append(max(wished[edge], xs[-1] + step))
    # Each was pushed to the right by those before it; let the row stand evenly about its wishes,
    # yet inside the box.
    shift = sum(wished[e] - x for e, x in zip(edges, xs, strict=True)) / len(xs)
    for n, (edge, x) in enumerate(zip(edges, xs, strict=True)):
        most, least = end - (len(xs) - 1 - n) * step, start + n * step
        layout.ports[edge] = -up(-max(min(x + shift, most), least))
