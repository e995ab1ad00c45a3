"""The map in the terminal: fits any width, shows the weights, lets no token steer the terminal."""

import re
import unicodedata

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigpt.attention_maps import AttentionMaps
from minigpt.attention_picture import printable
from minigpt.attention_text import heat_map

T = 7
OURS = re.compile(r"\x1b\[48;5;(\d+);38;5;(\d+)m([^\x1b]*)\x1b\[0m")
SHADES = " ·░▒▓█"
# What makes trouble: two columns wide, none at all, line ends, escapes, text that runs backwards.
HOSTILE = st.text(
    st.sampled_from(
        "ab ,语言Ａ😊한\u0301\u200d\ufe0f\x1b[2J]0;\x07\r\n\t\x00\x9b\u202e\u2028\ud800"
    ),
    max_size=19,
)


def causal(size: int, seed: int = 1) -> Tensor:
    scores = 3 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def columns(text: str) -> int:
    """Return how many columns a terminal needs for text, by the Unicode tables of Python itself."""
    wide = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
    return wide - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def uncolored(text: str) -> str:
    return OURS.sub(r"\3", text)


def luminance(color: int) -> float:
    """Return the relative luminance of one of the 256 colours, as WCAG 2 defines it."""
    steps = (0, 95, 135, 175, 215, 255)
    cube = color - 16
    parts = [steps[n] / 255 for n in (cube // 36, cube // 6 % 6, cube % 6)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(share * p for share, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@given(st.lists(HOSTILE, min_size=1, max_size=41), st.integers(24, 130), st.booleans())
@example(["a"], 70, True)  # where the legend has no room, just
@settings(deadline=None, max_examples=60)
def test_no_line_is_wider_than_the_terminal(tokens: list[str], width: int, color: bool) -> None:
    lines = heat_map(causal(len(tokens)), tokens, "A title", width=width, color=color).split("\n")
    assert max(columns(uncolored(line)) for line in lines) <= width


@given(st.lists(HOSTILE, min_size=1, max_size=23), st.integers(24, 130), st.booleans())
@settings(deadline=None, max_examples=60)
def test_nothing_but_our_own_colours_reaches_the_terminal(
    tokens: list[str], width: int, color: bool
) -> None:
    text = heat_map(causal(len(tokens)), tokens, "A title", width=width, color=color)
    assert bool(OURS.search(text)) == color
    for line in uncolored(text).split("\n"):
        assert line.isprintable()
    text.replace("\ud800", "").encode("utf-8")  # no lone surrogate: the stream could not write it


@given(st.integers(0, 2**16), st.integers(1, 31), st.integers(24, 200))
@settings(deadline=None, max_examples=60)
def test_the_larger_a_weight_the_darker_its_cell(seed: int, size: int, width: int) -> None:
    weights = causal(size, seed)
    text = heat_map(weights, ["w"] * size, "", width=width, color=True)
    rows = [OURS.findall(line) for line in text.split("\n") if line.startswith("w ")]
    for i, row in enumerate(rows):
        assert len(row) == i + 1  # the future has no cell
        dark = [-luminance(int(background)) for background, _, _ in row]
        order = weights[i, : i + 1].argsort(stable=True).tolist()
        assert [dark[j] for j in order] == sorted(dark)
        assert max(dark) == dark[order[-1]]
    assert len(rows) == size or f"Left out: tokens {len(rows)} to {size - 1}" in " ".join(
        text.split("\n")
    )


@pytest.mark.parametrize(("size", "side"), [(T, 5), (23, 2), (53, 1)])
def test_characters_shade_as_colours_do(size: int, side: int) -> None:
    weights = causal(size)
    text = heat_map(weights, ["w"] * size, "", width=80)
    rows = [line.ljust(80) for line in text.split("\n") if line.startswith("w ")]
    assert len(rows) == size
    for i, row in enumerate(rows):
        cells = [row[2 + side * j : 2 + side * (j + 1)] for j in range(i + 1)]
        shades = [SHADES.index(cell[0]) for cell in cells]
        assert shades == [round(5 * w**0.5) for w in weights[i, : i + 1].tolist()]
        if side == 2:
            assert all(cell[0] == cell[1] for cell in cells)
        if side == 5:
            assert [float(cell[1:]) for cell in cells] == pytest.approx(
                weights[i, : i + 1].tolist(), abs=0.05
            )


def test_every_column_has_its_token_right_on_top_of_it() -> None:
    tokens = ["one", "two", "three", "four", "five"]
    lines = heat_map(causal(5), tokens, "", width=80).split("\n")
    top = next(n for n, line in enumerate(lines) if line.strip() == "↓one")
    for j, token in enumerate(tokens):  # cells are five columns wide, labels as wide as the longest
        assert lines[top + j][6 + 5 * j :].rstrip() == f"↓{token}"
    assert [line.split()[0] for line in lines[top + 1 : top + 6]] == tokens


def test_colours_can_be_read_on_any_background() -> None:
    text = heat_map(torch.eye(2), ["a", "b"], "", color=True)
    text += "".join(
        heat_map(torch.tensor([[w]]), ["a"], "", color=True) for w in (0, 0.05, 0.2, 0.4, 0.7, 1)
    )
    pairs = {(luminance(int(b)), luminance(int(f))) for b, f, _ in OURS.findall(text)}
    assert len(pairs) == 6
    for pair in pairs:
        assert (max(pair) + 0.05) / (min(pair) + 0.05) > 4.5


@pytest.mark.parametrize("color", [False, True])
def test_the_legend_names_the_least_weight_of_each_shade(color: bool) -> None:
    legend = heat_map(torch.ones(1, 1), ["a"], "", color=color).split("\n")[-1]
    found = [float(f"0{least}") for least in re.findall(r"from (\.\d+)", legend)]
    for level, least in enumerate(found, start=1):
        for weight, expected in ((least + 0.001, level), (least - 0.001, level - 1)):
            cell = heat_map(torch.tensor([[weight]]), ["a"], "", width=80).split("\n")[-3]
            assert cell[2] == SHADES[expected]
    assert len(found) == 5


def test_what_has_no_room_is_told() -> None:
    tokens = [f"w{i}" for i in range(97)]
    text = heat_map(causal(97), tokens, "", width=60)
    rows = re.findall(r"^ *(w\d+) ", text, flags=re.MULTILINE)
    assert rows == tokens[: len(rows)]
    assert 40 < len(rows) < 60
    flat = " ".join(text.split())
    assert f"Left out: tokens {len(rows)} to 96 of 0 to 96, for which 60 columns have no" in flat
    assert "Left out" not in heat_map(causal(97), tokens, "", width=130)


def test_the_title_says_which_head_of_how_many() -> None:
    weights = torch.stack([causal(T, seed) for seed in range(6)]).unflatten(0, (2, 3))
    maps = AttentionMaps(weights, ["w"] * T)
    text = maps.heat_map(1, 2, width=90)
    title = text.split("\n")[0]
    assert title == "Layer 1, head 2 (counted from 0), of 2 layers with 3 heads"
    assert text == heat_map(weights[1, 2], maps.tokens, title, width=90)
    assert text != maps.heat_map(1, 1, width=90)


def test_printable() -> None:
    assert printable("a b\n\t") == "a␣b↵⇥"
    assert printable("\x1b[2J") == "\\x1b[2J"
    assert printable("\u202e\u2028\ud800") == "\\u202e\\u2028\\ud800"
    assert printable("语Ａ😊é") == "语Ａ😊é"
