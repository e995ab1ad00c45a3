"""The page of attention: whole in itself, harmless, and it shows the weights it was given.

Its script is run by a Chromium where there is one. Each such test adds a script of its own to the
page, which does what a reader would do and writes down what it then sees.
"""

import html
import json
import re
import shutil
import subprocess
import urllib.parse
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigpt import attention_page, attention_picture
from minigpt.attention_maps import AttentionMaps
from minigpt.attention_page import packed
from minigpt.errors import UserError

L, H, T = 2, 3, 7
HOSTILE = [
    # No blanks: they are made visible, and would take the sting out.
    "<img/src=x/onerror=globalThis.harmed='img'>",
    "</script><script>globalThis.harmed='script'</script>",
    "<!--<script>",
    "&lt;b&gt;",
    "\u2028\x1b[2J",
    "'\"`${globalThis.harmed='template'}",
    "語",
]


def some_maps(
    n_layers: int = L, n_heads: int = H, tokens: list[str] | None = None
) -> AttentionMaps:
    tokens = [f"w{i}" for i in range(T)] if tokens is None else tokens
    size = len(tokens)
    scores = 2 * torch.randn(
        n_layers, n_heads, size, size, generator=torch.Generator().manual_seed(1)
    )
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    return AttentionMaps(scores.masked_fill(hidden, -torch.inf).softmax(-1), tokens)


class Elements(HTMLParser):
    """Every element of a page, with its attributes and the text directly inside it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def embedded(page: str) -> dict[str, Any]:
    """Return the data of a page, as a browser would find it."""
    (text,) = [text for _, attrs, text in Elements(page).found if attrs.get("id") == "data"]
    return json.loads(text)


def unpacked(data: dict[str, Any]) -> Tensor:
    """Return the weights (L, H, T, T) in the data of a page."""
    n_layers, n_heads, size = len(data["layers"]), len(data["heads"]), len(data["tokens"])
    whole = np.frombuffer(b64decode(data["packed"]), dtype="<u2").astype("float64") / 65535
    weights = torch.zeros(n_layers, n_heads, size, size, dtype=torch.float64)
    rows, columns = torch.tril_indices(size, size)
    weights[..., rows, columns] = torch.from_numpy(whole).view(n_layers, n_heads, -1)
    return weights


@given(st.lists(st.text(max_size=9) | st.sampled_from(HOSTILE), min_size=1, max_size=7))
@settings(deadline=None)
def test_data_comes_back_and_tokens_are_never_markup(tokens: list[str]) -> None:
    maps = some_maps(L, H, tokens)
    page = maps.html()
    page.encode("utf-8")
    data = embedded(page)
    torch.testing.assert_close(unpacked(data), maps.weights.double(), atol=1e-5, rtol=0)
    assert len(data["tokens"]) == len(tokens)
    assert all(token.isprintable() for token in data["tokens"])
    plain = some_maps(L, H, ["w"] * len(tokens)).html()
    assert [tag for tag, *_ in Elements(page).found] == [tag for tag, *_ in Elements(plain).found]


def test_the_page_opens_with_the_most_decided_of_what_was_chosen() -> None:
    maps = some_maps()
    weights = maps.weights.clone()
    weights[1, 2] = torch.eye(T)
    maps = AttentionMaps(weights, maps.tokens)
    for chosen, shown in {(None, None): [1, 2], (1, None): [1, 2], (0, 1): [0, 1]}.items():
        data = embedded(maps.html(*chosen))
        assert data["shown"] == shown
        assert data["layers"] == [0, 1] if chosen[0] is None else [chosen[0]]
        assert (data["n_layers"], data["n_heads"]) == (L, H)
    torch.testing.assert_close(
        unpacked(embedded(maps.html(1, 0))), weights[[1]][:, [0]].double(), atol=1e-5, rtol=0
    )


def test_nothing_is_loaded_from_anywhere() -> None:
    page = some_maps(L, H, HOSTILE).html()
    found = Elements(page).found
    assert not {tag for tag, *_ in found} & {"link", "img", "iframe", "object", "embed", "base"}
    for _, attributes, _ in found:
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes)
    form = page.replace(json.dumps(embedded(page)).replace("<", "\\u003c"), "")
    assert "onerror=" in page
    assert not re.search(r"://|url\(|@import|\bimport\b|fetch|XMLHttp|innerHTML|eval\(", form)
    (policy,) = [a["content"] for _, a, _ in found if "http-equiv" in a]
    assert policy == "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def test_a_page_of_four_layers_and_128_tokens_stays_small() -> None:
    assert len(some_maps(4, 8, ["word"] * 128).html()) < 1_000_000


def test_more_weights_than_a_browser_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MOST_IN_PAGE", "MOST_IN_JSON"):
        monkeypatch.setattr(attention_page, limit, L * H * T * T - 1)
    maps = some_maps()
    message = f"{L * H * T * T} weights in {L} layers of {H} heads, over .*: choose a layer"
    with pytest.raises(UserError, match=message):
        maps.html()
    with pytest.raises(UserError, match=message):
        attention_page.numbers(maps.select(), maps.entropy())
    maps.html(layer=0)


def test_packed_weights_are_two_bytes_each_lower_one_first() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1 / 65535, 256 / 65535, 0.996078]])
    data = b64decode(packed(weights.view(1, 1, 3, 3)))
    assert data == bytes([255, 255, 0, 0, 255, 255, 1, 0, 0, 1, 254, 254])


def test_the_colours_are_those_of_the_picture() -> None:
    style = next(text for tag, _, text in Elements(some_maps().html()).found if tag == "style")
    light = style.split("@media")[0]
    assert tuple(re.findall(r"--w\d: (#\w+);", light)) == attention_picture.BLUES
    for name, color in {"hidden": "HIDDEN", "ink": "INK", "frame": "FRAME"}.items():
        assert f"--{name}: {getattr(attention_picture, color)};" in light


def test_a_notebook_gets_the_page_in_a_closed_frame() -> None:
    maps = some_maps(L, H, HOSTILE)
    ((tag, attributes, text),) = Elements(maps._repr_html_()).found
    assert (tag, text) == ("iframe", "")
    assert attributes["sandbox"] == "allow-scripts"
    assert attributes["srcdoc"] == maps.html()
    assert "http" not in str(attributes["style"])
    heights = [
        int(re.findall(r"height: (\d+)px", some_maps(1, 1, ["w"] * n)._repr_html_())[0])
        for n in (1, 5, 97)
    ]
    assert heights == sorted(heights)
    assert 400 < heights[0] < heights[1] < heights[2] < 900


# From here on a browser runs the page.

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Browser:
    """A Chromium without a window, which reads no file but the one it is given."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder

    def told(self, page: str, script: str, fragment: str = "", *flags: str) -> Any:
        """Return what `script`, added to a page, hands to its function tell."""
        reader = """
            const failures = [];
            addEventListener("error", (event) => failures.push(String(event.message)));
            function tell(value) {
              const told = document.createElement("pre");
              told.id = "told";
              told.textContent = encodeURIComponent(JSON.stringify({ value, failures }));
              document.body.append(told);
            }"""
        page = page.replace("<head>", f"<head><script>{reader}</script>", 1)
        page = page.replace("</body>", f"<script>{script}</script></body>")
        path = self.folder / "page.html"
        path.write_text(page, encoding="utf-8")
        done = subprocess.run(
            [
                self.program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
                *("--virtual-time-budget=5000", "--window-size=1100,900", *flags),
                f"--user-data-dir={self.folder / 'browser'}",
                "--dump-dom",
                path.as_uri() + fragment,
            ],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        found = re.findall(r'<pre id="told">(.*?)</pre>', done.stdout)
        assert len(found) == 1, done.stdout[-500:] + done.stderr[-500:]
        told = json.loads(urllib.parse.unquote(found[0]))
        assert told["failures"] == []
        return told["value"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: one of {', '.join(NAMES)}")
    return Browser(program, tmp_path_factory.mktemp("chromium"))


# Points at every cell of the map, row by row, and returns what is then shown.
POINT_AT_CELLS = """
    function pointAtCells() {
      const seen = [], box = at("map").getBoundingClientRect();
      for (let i = 0; i < T; i++) for (let j = 0; j < T; j++) {
        at("map").dispatchEvent(new PointerEvent("pointermove", {
          clientX: box.left + left + (j + 0.5) * wide,
          clientY: box.top + left + (i + 0.5) * wide }));
        seen.push(at("tip").textContent);
      }
      return seen;
    }
"""


def described(maps: AttentionMaps, layer: int, head: int) -> list[str]:
    """Return what the page should say of every cell of a head, row by row."""
    names = [f"{i} “{token}”" for i, token in enumerate(maps.tokens)]
    lines = []
    for i, looking in enumerate(names):
        for j, looked_at in enumerate(names):
            weight = round(float(maps.weights[layer, head, i, j]) * 65535) / 65535
            what = f"weight {weight:.3f}" if j <= i else "hidden, it comes later"
            lines.append(f"{looking} → {looked_at}: {what}")
    return lines


def test_pointing_at_a_cell_tells_its_weight(browser: Browser) -> None:
    maps = some_maps()
    tell = "tell({ cells: pointAtCells(), shown: at('shown').textContent, title: document.title, "
    tell += "layer: at('layer').value, head: at('head').value, about: at('about').textContent })"
    for layer, head in ((1, 2), (0, 1)):
        told = browser.told(maps.html(), POINT_AT_CELLS + tell, f"#layer={layer}&head={head}")
        assert told["cells"] == described(maps, layer, head)
        assert told["shown"] == f"Layer {layer}, head {head}"
        assert told["title"].startswith(f"Layer {layer}, head {head}")
        assert (told["layer"], told["head"]) == (str(layer), str(head))
        assert told["about"] == f"{L} layers of {H} heads, counted from 0 · {T} tokens"


def test_heads_are_chosen_by_click_by_key_by_list_and_by_address(browser: Browser) -> None:
    maps = some_maps()
    script = """
        const seen = [], note = () => seen.push([pointAtCells(), at("shown").textContent,
          document.querySelectorAll('#grid [aria-current="true"]').length,
          document.querySelector('#grid [aria-current="true"]').title, location.hash]);
        const key = (name) => document.activeElement.dispatchEvent(
          new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
        document.querySelector('[title="Layer 0, head 2"]').click(); note();
        document.querySelector('#grid [aria-current="true"]').focus();
        key("ArrowDown"); note();
        key("ArrowDown"); key("ArrowLeft"); note();
        at("layer").value = 0; at("layer").dispatchEvent(new Event("change")); note();
        location.hash = "#layer=1&head=0&token=3";
        setTimeout(() => { note(); tell(seen); }, 500);
    """
    told = browser.told(maps.html(), POINT_AT_CELLS + script)
    expected = [(0, 2), (1, 2), (1, 1), (0, 1), (1, 0)]
    for (cells, shown, n_current, current, address), (layer, head) in zip(
        told, expected, strict=True
    ):
        assert cells == described(maps, layer, head)
        assert shown == current == f"Layer {layer}, head {head}"
        assert n_current == 1
        assert address.startswith(f"#layer={layer}&head={head}&token=")


def test_an_address_that_names_nothing_changes_nothing(browser: Browser) -> None:
    page = some_maps().html(1, 2)
    for address in ("#layer=-1&head=7&token=99", "#layer=&head=x&token=1.5", "#%"):
        told = browser.told(page, "tell([at('shown').textContent, state.token])", address)
        assert told == ["Layer 1, head 2", T - 1]


def test_a_token_shows_what_it_looks_at_and_what_looks_at_it(browser: Browser) -> None:
    maps = some_maps()
    script = """
        const seen = {}, buttons = [...at("text").children];
        const note = (way) => seen[way] = buttons.map((button) => {
          button.dispatchEvent(new PointerEvent("pointerenter"));
          const told = [buttons.map((b) => b.title),
            buttons.map((b) => b.classList.contains("chosen")),
            at("whose").textContent, [...at("row").children].map((line) => line.textContent)];
          button.dispatchEvent(new PointerEvent("pointerleave"));
          return told;
        });
        note("from");
        document.querySelector('[value="to"]').click();
        note("to");
        buttons[4].click();
        const clicked = [state.token, location.hash];
        const box = at("map").getBoundingClientRect();  // of its cell (5, 2) what is looked at is 2
        at("map").dispatchEvent(new MouseEvent("click", {
          clientX: box.left + left + 2.5 * wide, clientY: box.top + left + 5.5 * wide }));
        tell({ ...seen, clicked: [...clicked, state.token, location.hash] });
    """
    told = browser.told(maps.html(), script, "#layer=1&head=0")
    cells = described(maps, 1, 0)
    for k in range(T):
        looks, chosen, whose, lines = told["from"][k]
        assert looks == cells[T * k : T * (k + 1)]
        assert chosen == [i == k for i in range(T)]
        assert whose == f"What “w{k}”, token {k}, looks at"
        weights = maps.weights[1, 0, k, : k + 1]
        order = weights.argsort(descending=True).tolist()
        assert lines == [f"{j} “w{j}”{cells[T * k + j].split()[-1]}" for j in order]
        looks, _, whose, lines = told["to"][k]
        assert looks == cells[k::T]
        assert whose == f"What looks at “w{k}”, token {k}"
        assert len(lines) == T - k
    base = "#layer=1&head=0&token="
    assert told["clicked"] == [4, f"{base}4", 2, f"{base}2"]


def test_the_map_is_walked_with_the_arrow_keys(browser: Browser) -> None:
    script = """
        const seen = [];
        at("map").focus();
        for (const key of ["ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowDown", "ArrowDown",
          "ArrowDown", "Escape"]) {
          at("map").dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
          seen.push(state.cell);
        }
        tell(seen);
    """
    told = browser.told(some_maps().html(), script, "#token=5")
    assert told == [[5, 5], [4, 5], [4, 4], [4, 3], [5, 3], [6, 3], [6, 3], None]


# The luminance of each pixel of a canvas, row by row.
LIGHT = """
    const light = (canvas) => {
      const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return Array.from({ length: image.length / 4 }, (_, n) =>
        [0.299, 0.587, 0.114].reduce((sum, share, c) => sum + share * image[4 * n + c], 0));
    };
"""


@pytest.mark.parametrize("dark", [False, True])
def test_the_larger_a_weight_the_further_from_the_paper(browser: Browser, dark: bool) -> None:
    maps = some_maps()
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    script = "const small = document.querySelector('[title=\"Layer 1, head 2\"] canvas');"
    script += "tell([light(cells), light(small), getComputedStyle(document.body).backgroundColor])"
    *maps_drawn, paper = browser.told(maps.html(), LIGHT + script, "#layer=1&head=2", *flags)
    assert (paper == "rgb(255, 255, 255)") != dark
    for drawn in maps_drawn:
        light = torch.tensor(drawn).view(T, T)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        assert len(light[future].unique()) == 1
        seen, weights = light[~future], maps.weights[1, 2][~future]
        away = seen if dark else -seen
        order = weights.argsort()
        assert (away[order].diff() > -1).all()  # but for the rounding of colours
        assert weights[away.argmax()] == weights.max()
        assert away.max() - away.min() > 150


def test_small_maps_of_a_long_text_keep_a_lone_weight(browser: Browser) -> None:
    weights = torch.eye(97)
    weights[70], weights[70, 31] = 0, 1
    maps = AttentionMaps(weights.expand(1, 2, 97, 97), ["w"] * 97)
    script = "tell(light(document.querySelector('#grid canvas')))"
    light = torch.tensor(browser.told(maps.html(), LIGHT + script)).view(64, 64)
    assert light[70 * 64 // 97, 31 * 64 // 97] == light.min()


def test_hostile_tokens_are_text_and_nothing_else(browser: Browser) -> None:
    maps = some_maps(L, H, HOSTILE)
    script = """
        const texts = [...at("text").children].map((button) => button.textContent);
        const cell = pointAtCells()[T];
        setTimeout(() => tell({ texts, cell, harmed: globalThis.harmed ?? null,
          row: at("row").textContent,
          images: document.images.length, scripts: document.scripts.length }), 500);
    """
    told = browser.told(maps.html(), POINT_AT_CELLS + script)
    assert told["texts"] == [*HOSTILE[:4], "\\u2028\\x1b[2J", *HOSTILE[5:]]
    assert HOSTILE[0] in told["cell"]
    assert HOSTILE[0] in told["row"]
    assert told["harmed"] is None
    assert told["images"] == 0
    assert told["scripts"] == 4  # the page's data and script, and two of this test


def test_two_frames_in_one_notebook_go_their_own_ways(browser: Browser) -> None:
    first, second = some_maps(), some_maps(1, 1, ["alone"])
    report = """<script>
      let escaped = "no", failed = "no";
      addEventListener("error", (event) => { failed = event.message; });
      try { escaped = parent.document.title; } catch { }
      for (const button of document.querySelectorAll('[title="Layer 0, head 1"]')) button.click();
      parent.postMessage([at("shown").textContent, T, escaped, failed], "*");
    </script></body>"""
    frames = ""
    for maps in (first, second):
        page = maps.html()
        frame = maps._repr_html_()
        changed = html.escape(page.replace("</body>", report))
        assert html.escape(page) in frame
        frames += frame.replace(html.escape(page), changed)
    notebook = f"<html><head><title>secret</title></head><body>{frames}</body></html>"
    script = """
        const seen = [];
        addEventListener("message", (event) => seen.push(event.data));
        setTimeout(() => tell(seen), 3000);
    """
    told = browser.told(notebook.replace("</title>", f"</title><script>{script}</script>"), "")
    assert sorted(told) == [
        ["Layer 0, head 0", 1, "no", "no"],
        ["Layer 0, head 1", T, "no", "no"],
    ]
