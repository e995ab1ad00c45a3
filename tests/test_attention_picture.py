"""The picture of attention: drawn of any text, and it shows the weights it was given."""

import time
import warnings
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from minigpt.attention_maps import AttentionMaps
from minigpt.attention_picture import draw, undrawable


def some_maps(n_layers: int, n_heads: int, tokens: list[str]) -> AttentionMaps:
    size = len(tokens)
    scores = torch.randn(n_layers, n_heads, size, size, generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    return AttentionMaps(scores.masked_fill(hidden, -torch.inf).softmax(-1), tokens)


def written(figure: Figure) -> list[str]:
    """Return all text of a figure that stands beside its axes."""
    return [text.get_text() for text in figure.texts]


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "tokens"),
    [
        (1, 1, ["alone"]),
        (2, 3, ["the", "cat", "sat"]),
        (3, 2, ["$x$", "$", "语", "😊", "␣a", "\n", "\t", "", "a_very_long_token_indeed", "_^{"]),
        (2, 1, [f"w{i}" for i in range(97)]),
    ],
)
def test_a_picture_is_drawn_of_any_text_without_a_warning(
    tmp_path: Path, n_layers: int, n_heads: int, tokens: list[str]
) -> None:
    path = tmp_path / "new" / "attention.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        some_maps(n_layers, n_heads, tokens).save_png(path)
    picture = imread(path)
    assert min(picture.shape[:2]) > 700
    assert picture.std() > 0.05
    assert [p.name for p in path.parent.iterdir()] == ["attention.png"]


def test_the_large_map_shows_the_weights_of_the_head_it_names() -> None:
    maps = some_maps(2, 3, ["the", "cat", "sat", "down", "."])
    maps.weights[1, 2] = 0.9 * torch.eye(5) + 0.1 * maps.weights[1, 2]  # the most focused
    figure = draw(maps.select())
    assert "Layer 1, head 2 (counted from 0)" in written(figure)
    large = figure.axes[0]
    shown = torch.from_numpy(large.images[0].get_array().filled())
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert (shown[future] == -1).all()
    torch.testing.assert_close(shown.masked_fill(future, 0), maps.weights[1, 2])
    for labels in (large.get_xticklabels(), large.get_yticklabels()):
        assert [label.get_text() for label in labels] == maps.tokens
    figures = [text.get_text() for text in large.texts]
    rows, columns = torch.tril_indices(5, 5)
    weights = maps.weights[1, 2, rows, columns].tolist()
    assert figures == [f"{weight:.2f}".removeprefix("0") for weight in weights]


def test_the_frame_stands_around_the_head_that_is_drawn_large() -> None:
    maps = some_maps(2, 3, ["the", "cat", "sat"])
    weights = maps.weights.clone()
    weights[1, 2] = torch.eye(3)
    figure = draw(AttentionMaps(weights, maps.tokens).select())
    assert "Layer 1, head 2 (counted from 0)" in written(figure)
    (frame,) = figure.axes[-1].patches
    assert frame.get_xy() == (2, 1)


def test_one_layer_or_head_can_be_drawn_alone(tmp_path: Path) -> None:
    maps = some_maps(2, 3, ["the", "cat", "sat"])
    maps.save_png(tmp_path / "all.png")
    maps.save_png(tmp_path / "row.png", layer=1)
    maps.save_png(tmp_path / "column.png", head=2)
    maps.save_png(tmp_path / "one.png", layer=1, head=2)
    width = {path.stem: imread(path).shape[1] for path in tmp_path.iterdir()}
    assert width["one"] < width["column"] <= width["row"] <= width["all"]
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 4


def test_a_long_text_is_drawn_in_seconds(tmp_path: Path) -> None:
    maps = some_maps(4, 8, [f"word{i}" for i in range(128)])
    maps.save_png(tmp_path / "warm.png", layer=0, head=0)  # fonts are looked for once
    began_at = time.process_time()
    maps.save_png(tmp_path / "long.png")
    assert time.process_time() - began_at < 10


def test_what_no_font_can_draw_is_told() -> None:
    assert undrawable(["the", "\U000f0000", "cat"]) == "\U000f0000"
    assert undrawable(["the", "cat"]) == ""


def test_what_is_not_drawn_lacks_no_font() -> None:
    """White space is drawn as signs, and a label ends at twelve characters."""
    rare = "\U000f0000"
    assert undrawable(["a\n", "\t", " b"]) == ""
    assert undrawable(["a" * 11 + rare]) == rare
    assert undrawable(["a" * 11 + rare + "b"]) == ""
    # Of 97 tokens every second has a label.
    assert undrawable(["a", rare] * 48 + ["a"]) == ""
    assert undrawable([rare, "a"] * 48 + [rare]) == rare


@pytest.mark.parametrize("n_tokens", [1, 5, 64, 65, 97, 257])
def test_what_is_told_to_lack_a_font_is_what_is_drawn_as_a_box(n_tokens: int) -> None:
    rare = [chr(0xF0000 + i) for i in range(n_tokens)]
    large = draw(some_maps(1, 1, rare).select()).axes[0]
    drawn = [label.get_text() for label in large.get_yticklabels()]
    assert set(drawn) == {"□"}
    assert len(undrawable(rare)) == len(drawn)
