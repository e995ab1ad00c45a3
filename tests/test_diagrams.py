"""The diagrams: what is drawn is what ran, it can be read, and it changes when the code does."""

import random
import re
import sys
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from matplotlib import get_data_path
from matplotlib.ft2font import FT2Font, LoadFlags
from torch import Tensor, nn

from minigpt.layers.attention import KeyValueCache, attention
from minigpt.layers.norm import RMSNorm
from minigpt.layers.positions import NoRotation
from minigpt.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Transformer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import diagrams  # noqa: E402
from diagram_graph import Picture, picture  # noqa: E402
from diagram_notation import Letters, text_width, texts  # noqa: E402
from diagram_trace import Scope, Trace, trace  # noqa: E402
from diagrams import Subject, is_composed  # noqa: E402

NAMES = list(diagrams.subjects())
TANGLES = [f"tangle {seed}" for seed in (0, 1, 2, 5, 12, 13)]
each_diagram = pytest.mark.parametrize("name", NAMES)
each_picture = pytest.mark.parametrize("name", NAMES + TANGLES)
SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"B": 2, "T": 7, "S": 5, "D": 42, "H": 3, "K": 14, "F": 31, "V": 89}
B, T, S, D, H, K, F, V = SIZES.values()
Point = tuple[float, float]


class Tangle(nn.Module):
    """Ten random operations on tensors drawn at random: more crossings than any model has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        draw, made = random.Random(self.seed), [x, y]
        for _ in range(10):
            one, other = draw.choice(made[-4:]), draw.choice(made)
            operation = draw.choice([torch.add, torch.matmul, torch.mul, torch.logaddexp])
            made.append(operation(one, other))
        return made[-1], made[-3]


@cache
def subject(name: str) -> Subject:
    if name in TANGLES:
        return Subject(
            Tangle(int(name.split()[1])), (torch.randn(T, T), torch.randn(T, T)), {"T": T}
        )
    return diagrams.subjects()[name]()


@cache
def traced(name: str) -> Trace:
    return subject(name).trace


@cache
def drawn(name: str) -> str:
    return subject(name).draw()


@dataclass(frozen=True)
class Rect:
    """A rectangle of the page, y downward."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Rect") -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def holds(self, other: "Rect") -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom

    def has_on_border(self, x: float, y: float) -> bool:
        on_side = x in (self.left, self.right) and self.top <= y <= self.bottom
        return on_side or (y in (self.top, self.bottom) and self.left <= x <= self.right)


class Page:
    """What stands where, read from an SVG and from nothing else."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        groups = [g for g in self.root.iter(f"{SVG}g") if g.get("data-name") is not None]
        self.leaves = {g.get("id"): g for g in groups if g.get("id")}
        self.frames = [g for g in groups if g.get("class") == "frame"]
        self.edges = [g for g in self.root.iter(f"{SVG}g") if g.get("data-from")]
        self.shapes = [t for t in self.root.iter(f"{SVG}text") if t.get("class") == "shape"]

    def boxes(self) -> list[ElementTree.Element]:
        return [g for g in self.leaves.values() if g.get("class", "").split()[0] == "box"]

    def names(self) -> list[str]:
        return [g.get("data-name", "") for g in self.boxes()]

    def rect(self, group: ElementTree.Element) -> Rect:
        """Return the outline of a leaf or frame; words stand for inputs and outputs."""
        shape = group.find(f"{SVG}rect")
        if shape is not None:
            x, y, wide, high = (float(shape.get(a, "")) for a in ("x", "y", "width", "height"))
            return Rect(x, y, x + wide, y + high)
        circle = group.find(f"{SVG}circle")
        if circle is not None:
            x, y, r = (float(circle.get(a, "")) for a in ("cx", "cy", "r"))
            return Rect(x - r, y - r, x + r, y + r)
        (text,) = group.iter(f"{SVG}text")
        return words_rect(text)


@cache
def page(name: str) -> Page:
    return Page(drawn(name))


@cache
def dejavu(bold: bool) -> FT2Font:
    file = f"DejaVuSans{'-Bold' if bold else ''}.ttf"
    font = FT2Font(f"{get_data_path()}/fonts/ttf/{file}")
    font.set_size(100, 72)
    return font


def real_width(text: str, size: float, bold: bool) -> float:
    """Return the width of text in DejaVu Sans, the widest of the usual sans-serifs."""
    font = dejavu(bold)
    advance = sum(font.load_char(ord(c), LoadFlags.NO_HINTING).linearHoriAdvance for c in text)
    return advance / 65536 * size / 100


def pieces(text: ElementTree.Element) -> list[tuple[str, bool]]:
    """Return the words of a text element, and whether they are bold."""
    own = [(text.text or "", text.get("font-weight") == "bold")]
    return own + [(span.text or "", span.get("font-weight") == "bold") for span in text]


def words_rect(text: ElementTree.Element) -> Rect:
    """Return where the words of a text element stand."""
    x, y, size = (float(text.get(a, "")) for a in ("x", "y", "font-size"))
    wide = sum(real_width(words, size, bold) for words, bold in pieces(text))
    wide += sum(float(span.get("dx", 0)) for span in text)
    left = x - wide / 2 if text.get("text-anchor") == "middle" else x
    return Rect(left, y - 0.76 * size, left + wide, y + 0.24 * size)


def line_of(edge: ElementTree.Element) -> list[Point]:
    """Return the points of a line, its rounded corners as corners, and the arrow's tip."""
    line, tip = (
        next(p.get("d", "") for p in edge.iter(f"{SVG}path") if p.get("class") == kind)
        for kind in ("line", "tip")
    )
    numbers = [[float(n) for n in part.split()] for part in re.split("[MLQ]", line) if part]
    # Q takes a corner and where the rounding ends; the points around a corner add nothing.
    points = [(n[0], n[1]) for n in numbers]
    x, y = tip[1:].split("L")[0].split()
    return [*points, (float(x), float(y))]


def square_edges(points: list[Point]) -> bool:
    return all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points))


def on_line(point: Point, points: list[Point]) -> bool:
    x, y = point
    return any(
        min(a[0], b[0]) <= x <= max(a[0], b[0]) and min(a[1], b[1]) <= y <= max(a[1], b[1])
        for a, b in pairwise(points)
    )


def segment(a: Point, b: Point) -> Rect:
    return Rect(min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]) + 1e-6, max(a[1], b[1]) + 1e-6)


def shrunk(rect: Rect) -> Rect:
    return Rect(rect.left + 0.5, rect.top + 0.5, rect.right - 0.5, rect.bottom - 0.5)


# The files


@each_diagram
def test_committed_pictures_show_the_code(name: str) -> None:
    path = diagrams.OUT / f"{name}.svg"
    assert path.read_bytes() == drawn(name).encode(), f"{path.name} is old: `make docs` redraws it"


def test_no_other_pictures_are_there() -> None:
    assert {path.stem for path in diagrams.OUT.glob("*")} == set(NAMES)


@pytest.mark.parametrize("language", ["", ".zh-CN"])
def test_the_gallery_shows_every_picture_once(language: str) -> None:
    text = (ROOT / "docs" / f"diagrams{language}.md").read_text("utf-8")
    assert re.findall(r"\[!\[.+\]\(diagrams/(\w+)\.svg\)\]\(diagrams/\1\.svg\)", text) == NAMES


def test_check_names_the_stale_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: diagrams.subjects()[name] for name in ("layer_norm", "rotary", "rms_norm")}
    monkeypatch.setattr(diagrams, "subjects", lambda: few)
    assert diagrams.main(["--out", str(tmp_path)]) == 0
    assert diagrams.main(["--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "rotary.svg").write_text("an older picture")
    (tmp_path / "rms_norm.svg").unlink()
    capsys.readouterr()
    assert diagrams.main(["--check", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "rotary.svg, rms_norm.svg" in told
    assert "layer_norm" not in told
    assert (tmp_path / "rotary.svg").read_text() == "an older picture"
    assert not (tmp_path / "rms_norm.svg").exists()


# What can be read


@each_diagram
def test_it_is_one_file_that_anybody_can_read(name: str) -> None:
    root = page(name).root
    assert root.get("role") == "img"
    labelled = root.get("aria-labelledby", "").split()
    title, description = (root.find(f"*[@id='{label}']") for label in labelled)
    assert title is not None
    assert title.text
    assert description is not None
    assert subject(name).call.__doc__.splitlines()[0] in (description.text or "")
    assert "prefers-color-scheme:dark" in drawn(name)
    assert set(re.findall(r"font-family:([^;}]+)", drawn(name))) == {"sans-serif"}
    assert not re.search(r"(?:href|src|url|@import)\b", drawn(name))


@each_picture
def test_text_stays_within_its_box(name: str) -> None:
    for group in page(name).boxes() + page(name).frames:
        rect = page(name).rect(group)
        for text in group.iter(f"{SVG}text"):
            assert rect.holds(words_rect(text)), (group.get("data-name"), text.text)


@each_picture
def test_the_page_holds_everything(name: str) -> None:
    root = page(name).root
    whole = Rect(0, 0, float(root.get("width", "")), float(root.get("height", "")))
    for text in root.iter(f"{SVG}text"):
        assert whole.holds(words_rect(text)), pieces(text)
    for edge in page(name).edges:
        for x, y in line_of(edge):
            assert whole.holds(Rect(x, y, x, y))


@each_picture
def test_no_two_things_overlap(name: str) -> None:
    leaves = {group.get("id"): page(name).rect(group) for group in page(name).leaves.values()}
    words = {f"shape {n}": words_rect(text) for n, text in enumerate(page(name).shapes)}
    titles = {
        f"frame {n}": words_rect(t)
        for n, f in enumerate(page(name).frames)
        for t in f.iter(f"{SVG}text")
    }
    everything = [*leaves.items(), *words.items(), *titles.items()]
    for (one, a), (other, b) in combinations(everything, 2):
        assert not a.meets(b), (one, other)


@each_diagram
def test_frames_nest(name: str) -> None:
    frames = [page(name).rect(frame) for frame in page(name).frames]
    for a, b in combinations(frames, 2):
        assert not a.meets(b) or a.holds(b) or b.holds(a)
    for frame in frames:
        for leaf in page(name).leaves.values():
            rect = page(name).rect(leaf)
            assert frame.holds(rect) or not frame.meets(rect)


@each_picture
def test_every_line_runs_from_its_box_to_its_box(name: str) -> None:
    of_tensor: dict[tuple[str | None, str | None], list[list[Point]]] = {}
    edges = sorted(page(name).edges, key=lambda e: e.find(f"{SVG}circle") is not None)
    assert edges
    waiting = []
    for edge in edges:
        points = line_of(edge)
        assert square_edges(points)
        source, target = (page(name).leaves[edge.get(end)] for end in ("data-from", "data-to"))
        rect = page(name).rect(target)
        arrives = rect.has_on_border(*points[-1])
        if target.get("class") == "output":  # whose border is air around a word
            arrives = abs(points[-1][1] - rect.bottom) < 8
        assert arrives, (target.get("data-name"), points[-1], rect)
        key = edge.get("data-from"), edge.get("data-shape")
        if edge.find(f"{SVG}circle") is None:
            rect = page(name).rect(source)
            leaves = points[0][1] == rect.top or source.get("class") == "input"
            assert leaves
            assert rect.left <= points[0][0] <= rect.right
            of_tensor.setdefault(key, []).append(points)
        else:
            waiting.append((key, points))
    while waiting:  # a branch may branch off a branch
        rooted = [(k, p) for k, p in waiting if any(on_line(p[0], o) for o in of_tensor[k])]
        assert rooted
        for key, points in rooted:
            of_tensor[key].append(points)
        waiting = [entry for entry in waiting if entry not in rooted]


@each_picture
def test_lines_go_round_boxes_and_words(name: str) -> None:
    boxes = [page(name).rect(group) for group in page(name).leaves.values()]
    words = [words_rect(text) for text in page(name).shapes]
    for edge in page(name).edges:
        for a, b in pairwise(line_of(edge)):
            for rect in boxes + words:
                assert not segment(a, b).meets(shrunk(rect)), (edge.attrib, a, b)


@each_picture
def test_lines_of_two_tensors_share_no_stretch(name: str) -> None:
    for one, other in combinations(page(name).edges, 2):
        if one.get("data-from") == other.get("data-from"):
            continue
        for a, b in pairwise(line_of(one)):
            for c, d in pairwise(line_of(other)):
                upright = a[0] == b[0] == c[0] == d[0]
                level = a[1] == b[1] == c[1] == d[1]
                axis = 1 if upright else 0
                if upright or level:
                    low = max(min(a[axis], b[axis]), min(c[axis], d[axis]))
                    high = min(max(a[axis], b[axis]), max(c[axis], d[axis]))
                    assert low >= high, (one.attrib, other.attrib)


def test_text_is_measured_generously() -> None:
    """No text that any picture holds is wider in the widest usual font than what was reckoned."""
    seen = 0
    for name in NAMES:
        for text in page(name).root.iter(f"{SVG}text"):
            size = float(text.get("font-size", ""))
            for words, bold in pieces(text):
                seen += 1
                assert real_width(words, size, bold) <= text_width(words, size, bold=bold), words
    assert seen > 1000


# What is drawn is what ran


@each_diagram
def test_shapes_are_those_of_the_batch(name: str) -> None:
    made = {value.shape for op in traced(name).ops for value in op.results}
    made |= {value.shape for value in traced(name).inputs}
    sizes = subject(name).sizes
    carried = {edge.get("data-shape") for edge in page(name).edges}
    written = set()
    for text in page(name).shapes:
        letters, numbers = (words for words, _ in pieces(text)[1:])
        shape = [int(n.replace(",", "")) for n in numbers.split(" × ")]
        assert tuple(shape) in made
        assert [sizes.get(letter, letter) for letter in letters.split("·")] == [
            n if letter in sizes else str(n)
            for n, letter in zip(shape, letters.split("·"), strict=True)
        ]
        written.add(" ".join(map(str, shape)))
    assert written == carried


@each_diagram
def test_letters_that_are_used_are_explained(name: str) -> None:
    used = {
        letter
        for text in page(name).shapes
        for letter in pieces(text)[1][0].split("·")
        if letter.isalpha()
    }
    legend = [t for t in page(name).root.iter(f"{SVG}text") if t.get("class") == "legend"]
    told = dict(pair for text in legend for pair in pairwise(w for w, _ in pieces(text)[1:]))
    for letter in used:
        assert told[letter].split()[0] == f"{subject(name).sizes[letter]:,}"


def closed_calls(name: str) -> list[Scope]:
    """Return the calls that must be boxes, from the call tree alone, folded layers left out."""
    result = traced(name)
    scopes = {scope: None for op in result.ops for scope in op.scope.chain()}
    closed = []
    for scope in scopes:
        outer = scope.chain()[1:-1]
        later = any(re.search(r"^(?:layers|blocks)\.[1-9]", s.name) for s in scope.chain())
        if scope.parent and all(is_composed(s) for s in outer) and not is_composed(scope):
            closed += [scope] * (not later and not scope.kind.startswith("_require"))
    return closed


@each_diagram
def test_every_call_is_one_box_and_every_operation_one_sign(name: str) -> None:
    views = {"__invert__"}
    bare = [
        op
        for op in traced(name).ops
        if all(is_composed(scope) for scope in op.scope.chain()[1:])
        and not op.is_view
        and op.function not in views
        and not any(re.search(r"^(?:layers|blocks)\.[1-9]", s.name) for s in op.scope.chain())
    ]
    inputs, outputs = len(traced(name).inputs), len(traced(name).outputs)
    count = len(closed_calls(name)) + len(bare) + inputs + outputs
    assert len(page(name).leaves) == count
    names = sorted(scope.name for scope in closed_calls(name) if scope.name)
    assert sorted(set(names)) == sorted(set(names) & set(page(name).names()))


def test_attention_is_equation_1() -> None:
    titles = [g.get("data-name") for g in page("attention").boxes()]
    spine = [t for t in titles if t in ("Q Kᵀ", "÷ √d_k", "softmax", "weights V")]
    assert spine == ["Q Kᵀ", "÷ √d_k", "softmax", "weights V"]
    assert [g.get("data-kind") for g in page("attention").boxes()][2] == "−∞ where ¬visible"


def test_the_transformer_shows_every_submodule() -> None:
    model = subject("transformer").call
    assert isinstance(model, Transformer)
    expected = []
    for path, module in model.named_modules():
        parts = path.split(".")
        composed = type(module).__module__ == "minigpt.transformer"
        inside = any(
            not isinstance(model.get_submodule(".".join(parts[:n])), nn.ModuleList)
            and type(model.get_submodule(".".join(parts[:n]))).__module__ != "minigpt.transformer"
            for n in range(1, len(parts))
        )
        later = re.search(r"layers\.[1-9]", path)
        # After post-norm layers there is nothing to norm.
        idle = isinstance(module, nn.Identity)
        if path and not (composed or inside or later or idle):
            expected += [parts[-1]] * (not isinstance(module, nn.ModuleList))
    expected.append("positions")  # one module that two sequences pass
    boxes = [
        g.get("data-name")
        for g in page("transformer").boxes()
        if g.get("data-kind") and not re.match("×|÷", g.get("data-name", ""))
    ]
    drawn_functions = [name for name in boxes if name not in expected]
    assert sorted(n for n in boxes if n in expected) == sorted(expected)
    assert set(drawn_functions) <= {"padding_mask", "look_ahead_mask"}
    assert "× 6" in drawn("transformer")


def test_residual_connections_are_found() -> None:
    def n_past(name: str) -> int:
        return drawn(name).count('class="edge past"') - (">residual connection<" in drawn(name))

    counts = {name: n_past(name) for name in NAMES if n_past(name)}
    assert counts == {
        "encoder_layer": 2,
        "decoder_layer": 3,
        "encoder": 2,
        "decoder": 3,
        "transformer": 5,
        "post_norm_block": 2,
        "pre_norm_block": 2,
        "mini_gpt": 2,
        "mini_gpt_modern": 2,
    }


# It changes when the code does


def encoder_layer(**changes: object) -> EncoderLayer:
    torch.manual_seed(1)
    settings: dict[str, object] = {"d_model": D, "n_heads": H, "d_ff": F}
    return EncoderLayer(**(settings | changes)).eval()  # type: ignore[arg-type]


def draw(module: nn.Module, *batch: Tensor) -> Page:
    return Page(Subject(module.eval(), batch or (torch.randn(B, S, D),), SIZES).draw())


def order(page: Page) -> list[str]:
    return [g.get("data-name", "") for g in page.leaves.values()]


def test_another_placement_of_the_norm_is_another_picture() -> None:
    post, pre = (order(draw(encoder_layer(norm_placement=p))) for p in ("post", "pre"))
    after, before = ["dropout", "add", "norm"], ["norm"]
    assert post == ["x", "self_attention", *after, "feed_forward", *after, "x"]
    after = ["dropout", "add"]
    assert pre == ["x", *before, "self_attention", *after, *before, "feed_forward", *after, "x"]


@pytest.mark.parametrize("attribute", ["query", "asks"])
def test_another_attribute_is_another_name(attribute: str) -> None:
    class Part(nn.Module):
        """One map, under the name that is asked for."""

        def __init__(self) -> None:
            super().__init__()
            setattr(self, attribute, nn.Linear(D, D))

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, attribute)(x)

    assert draw(Part()).names() == [attribute]


def test_another_class_is_another_label() -> None:
    layer = encoder_layer()
    layer.residuals[1].norm = RMSNorm(D)
    kinds = [g.get("data-kind") for g in draw(layer).boxes() if g.get("data-name") == "norm"]
    assert kinds == ["LayerNorm", "RMSNorm"]


def test_a_part_that_a_config_left_out_is_not_drawn() -> None:
    layer = encoder_layer()
    layer.residuals[1].norm = nn.Identity()
    layer.residuals[0].dropout.p = 0.0
    assert order(draw(layer)) == [
        *("x", "self_attention", "add", "norm"),
        *("feed_forward", "dropout", "add", "x"),
    ]
    assert order(draw(nn.Identity(), torch.randn(B, S, D))) == ["input", "identity", "output"]


def test_a_part_left_out_of_forward_is_not_drawn() -> None:
    class Bare(EncoderLayer):
        """Attention alone."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.residuals[0](x, lambda x: self.self_attention(x, x, x, mask)[0])

    assert "feed_forward" not in draw(Bare(D, H, F)).names()


def test_depth_changes_only_the_factor() -> None:
    def with_layers(n: int) -> str:
        torch.manual_seed(1)
        encoder = Encoder([encoder_layer() for _ in range(n)], nn.Identity())
        return Subject(encoder.eval(), (torch.randn(B, S, D),), SIZES).draw()

    two, five = with_layers(2), with_layers(5)
    assert two.replace("layers.0–1", "layers.0–4").replace("× 2<", "× 5<") == five
    assert "×" not in re.sub(r"\d+ × [\d ×]+", "", with_layers(1))


def odd(layers: list[EncoderLayer], kind: str) -> list[EncoderLayer]:
    """Return layers of which the last is unlike the others."""
    last = layers[-1]
    if kind == "width":
        layers[-1] = encoder_layer(d_ff=F + 2)
    elif kind == "norm":
        last.residuals[0].norm = nn.Identity()
    elif kind == "heads":
        layers[-1] = encoder_layer(n_heads=2)
    elif kind == "placement":
        layers[-1] = encoder_layer(norm_placement="pre")
    return layers


@pytest.mark.parametrize("kind", ["width", "norm", "heads", "placement"])
def test_layers_that_differ_are_not_folded(kind: str) -> None:
    encoder = Encoder(odd([encoder_layer() for _ in range(3)], kind), nn.Identity())
    frames = [f.get("data-name") for f in draw(encoder).frames if "layers" in str(f.attrib)]
    assert frames == ["layers.0–1", "layers.2"]


def test_layers_side_by_side_are_not_folded() -> None:
    class Parallel(Encoder):
        """All layers read the same x."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layers[0](x, mask) + self.layers[1](x, mask)

    frames = draw(Parallel([encoder_layer(), encoder_layer()], nn.Identity())).frames
    assert [f.get("data-name") for f in frames if f.get("data-kind") == "EncoderLayer"] == [
        "layers.0",
        "layers.1",
    ]


def test_a_mask_of_its_own_for_each_layer_is_not_folded() -> None:
    class Masked(Encoder):
        """Each layer has another mask."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            masks = [mask.roll(i, -1) for i in range(len(self.layers))]
            for layer, own in zip(self.layers, masks, strict=True):
                x = layer(x, own)
            return x

    layers = [encoder_layer(), encoder_layer()]
    drawn = draw(Masked(layers, nn.Identity()), torch.randn(B, S, D), torch.ones(B, S, S))
    kinds = [f.get("data-kind") for f in drawn.frames]
    assert kinds.count("EncoderLayer") == 2


def test_cross_attention_reads_the_memory() -> None:
    decoder = Decoder([DecoderLayer(D, H, F)], nn.Identity()).eval()
    shown = pictured(decoder, torch.randn(B, T, D), torch.randn(B, S, D))
    cross = next(leaf for leaf in shown.leaves() if leaf.name == "cross_attention")
    ports = {edge.port: edge.source.name for edge in shown.into(cross)}
    assert ports == {"query": "norm", "key": "memory", "value": "memory"}


# The trace


def pictured(module: nn.Module, *batch: object) -> Picture:
    return picture(trace(module, *batch), is_composed)


def test_dropout_that_does_nothing_is_still_a_step() -> None:
    result = trace(nn.Dropout(0.5).eval(), torch.randn(B, D))
    assert [op.function for op in result.ops] == ["dropout"]
    assert result.outputs[0] is not result.inputs[0]


def test_what_only_passes_through_is_a_part_of_its_own() -> None:
    class Both(nn.Module):
        """x and what Identity makes of it, added."""

        def __init__(self) -> None:
            super().__init__()
            self.rotation = NoRotation()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.rotation(x)

    shown = pictured(Both(), torch.randn(B, T, D))
    assert [leaf.name for leaf in shown.leaves()] == ["x", "rotation", "", ""]
    assert [edge.carries_past for edge in shown.into(shown.leaves()[2])] == [True, False]


def test_views_are_passed_through_and_products_named_by_the_code() -> None:
    q, k, v = torch.randn(B, H, T, K), torch.randn(B, H, S, K), torch.randn(B, H, S, K)
    visible = torch.ones(B, H, T, S, dtype=torch.bool)
    shown = picture(trace(attention, q, k, v, visible), lambda scope: False)
    product = next(leaf for leaf in shown.leaves() if leaf.op and leaf.op.function == "matmul")
    assert [edge.source.name for edge in shown.into(product)] == ["q", "k"]
    assert texts(product, Letters(SIZES)) == ("Q Kᵀ", "matmul")


def test_what_is_written_into_a_buffer_is_seen_when_it_is_read() -> None:
    def remember(cache: KeyValueCache, k: Tensor) -> Tensor:
        return cache.append(0, k, k)[0]

    cache = KeyValueCache(torch.zeros(1, B, H, S, K), torch.zeros(1, B, H, S, K))
    shown = picture(trace(remember, cache, torch.randn(B, H, 2, K)), lambda scope: False)
    append = next(leaf for leaf in shown.leaves() if leaf.kind == "box")
    assert append.scope.kind == "KeyValueCache.append"
    assert {edge.source.name for edge in shown.into(append)} == {"cache.keys", "cache.values", "k"}
    assert [edge.target.kind for edge in shown.out_of(append)] == ["output"]


def test_checks_that_no_output_hears_are_left_out() -> None:
    class Checked(nn.Linear):
        """A map that looks at its input first."""

        def forward(self, x: Tensor) -> Tensor:
            assert x.max() < 100
            return super().forward(x)

    shown = pictured(Checked(D, F), torch.randn(B, D))
    assert [leaf.op.function for leaf in shown.leaves() if leaf.op] == ["linear"]


def test_a_trace_leaves_the_module_as_it_was() -> None:
    layer = encoder_layer()
    hooks = [dict(m._forward_hooks) for m in layer.modules()]
    x = torch.randn(B, S, D)
    before = layer(x)
    trace(layer, x)
    assert [dict(m._forward_hooks) for m in layer.modules()] == hooks
    assert not any(m._forward_pre_hooks for m in layer.modules())
    assert torch.equal(layer(x), before)


def test_a_failing_module_is_left_as_it_was_too() -> None:
    layer = encoder_layer()
    with pytest.raises(RuntimeError):
        trace(layer, torch.randn(B, S, D + 1))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in layer.modules())


# Letters


def test_an_ambiguous_number_stays_a_number() -> None:
    letters = Letters({"B": 2, "H": 8, "G": 8, "K": 64})
    assert letters.shape((2, 8, 5, 64)) == ("B·8·5·K", "2 × 8 × 5 × 64")
    assert letters.shape((1, 2)) == ("1·B", "1 × 2")
    assert letters.shape(()) == ("scalar", "")


def test_a_root_is_named_where_it_is_one() -> None:
    letters = Letters({"B": 2, "D": 512, "K": 64})
    assert letters.number(8.0) == "√d_k"
    assert letters.number(512**0.5) == "√d_model"
    assert letters.number(8.001) == "8.001"
    assert letters.number(-float("inf")) == "−∞"
