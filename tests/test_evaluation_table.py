"""The table of an evaluation: what is printed is what was measured, and nothing flatters."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minigpt.config import TokenizerKind
from minigpt.evaluation_table import evaluation_table, interval_text
from minigpt.measurement import TIERS, measure
from tiny import T, make_run, write_articles


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_articles(tmp_path_factory.mktemp("articles"), 11)


def found(data: Path, kind: TokenizerKind, size: int, **options: Any) -> dict[str, Any]:
    return measure(make_run(Path("runs/[r]"), data, kind, size), **options).to_json()


def lines_of(figures: dict[str, Any]) -> list[str]:
    console = Console(width=300, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(evaluation_table(figures))
    return [line.rstrip() for line in captured.get().splitlines()]


def row(lines: list[str], start: str) -> str:
    (line,) = [line for line in lines if line.startswith(f"{start} ")]
    return line.removeprefix(start).strip()


# awd-lstm-lm#83: does the length of the context matter?
# llm.c#374: 21, 29, 31, 37 for one model.
def test_every_figure_is_printed(data: Path) -> None:
    figures = found(data, "wikitext", 0, split="test", stride=4)
    lines = lines_of(figures)
    assert lines[0] == f"runs/[r] on test of {data}"
    assert row(lines, "perplexity per token") == f"{figures['token_perplexity']:,.2f}"
    assert row(lines, "perplexity per word") == f"{figures['word_perplexity']:,.2f}"
    assert row(lines, "bits per byte") == f"{figures['bits_per_byte']:.4f}"
    assert row(lines, "nats") == f"{figures['nats']:,.1f}"
    assert row(lines, "bytes") == f"{figures['bytes']:,}"
    assert row(lines, "context") == f"{T}, stride 4: overlapping"
    assert row(lines, "sha256") == f"{figures['sha256']} of the text"
    assert row(lines, "articles").startswith("12, drawn again 2,000 times")
    intervals = [line for line in lines if line.startswith("  95% interval")]
    assert [line.split(maxsplit=2)[2].strip() for line in intervals] == [
        interval_text(figures["token_interval"]),
        interval_text(figures["comparable_interval"]),
    ]
    for bucket in figures["by_context_length"]:
        first, last = bucket["from"], bucket["to"]
        span = f"{first}" if first == last else f"{first}-{last}"
        assert row(lines, span).split() == [f"{bucket['tokens']}", f"{bucket['perplexity']:,.2f}"]


def test_no_figure_flatters(data: Path) -> None:
    cut = found(data, "wikitext", 43)
    lines = lines_of(cut)
    value = f"{cut['comparable_perplexity']:,.2f}"
    assert row(lines, "perplexity per word, comparable") == value
    assert not any(f"{cut['word_perplexity']:,.2f}" in line for line in lines[4:])
    assert row(lines, "bits per byte") == f"{cut['comparable_bits_per_byte']:.4f}"
    assert cut["comparable_bits_per_byte"] > cut["bits_per_byte"]
    assert "beside the closed vocabulary" in row(lines, "comparable")
    lower = lines_of(found(data, "basic_english", 0))
    assert not any("per word" in line or "per byte" in line for line in lower)
    both = lines_of(found(data, "basic_english", 47))
    assert "beside other sizes of this vocabulary" in row(both, "comparable")
    assert not any("per byte" in line for line in both)


def test_what_is_missing_is_said(data: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w1 w2 never seen\n", encoding="utf-8")
    figures = found(data, "wikitext", 43, text=tmp_path / "text.txt")
    lines = lines_of(figures)
    assert lines[0] == f"runs/[r] on {tmp_path / 'text.txt'}"
    at_least = f"> {figures['comparable_perplexity_at_least']:,.2f}"
    assert row(lines, "perplexity per word, comparable") == at_least
    assert "incomplete, 2 words are not in train" in row(lines, "comparable")
    assert row(lines, "articles").startswith("no interval: the text has 1 article (")
    assert [line for line in lines if line.startswith("  95% interval")] == [
        f"  95% interval{'-':>{len(lines[2]) - len('  95% interval')}}"
    ] * 2


def test_without_a_price_nothing_is_said_per_word(data: Path) -> None:
    """Words that are read as <unk> look easy, and what they would cost is not known."""
    figures = found(data, "wikitext", 43)
    names = ("comparable_perplexity", "comparable_perplexity_at_least", "comparable_bits_per_byte")
    gone = dict.fromkeys([*names, "unknown_words", "comparable_interval"])
    lines = lines_of({**figures, **gone, "unpriced": "data d.txt does not exist: check the path"})
    assert not any("per word" in line or "per byte" in line for line in lines)
    assert not any(f"{figures['word_perplexity']:,.2f}" in line for line in lines[4:])
    expected = "not known, train has no price for <unk>: data d.txt does not exist: check the path"
    assert row(lines, "comparable") == expected


@pytest.mark.parametrize("split", ["valid", "test"])
def test_each_tier_has_a_column(split: str, data: Path) -> None:
    figures = found(data, "wikitext", 43, split=split)
    for i, tier in enumerate(TIERS, start=1):
        perplexity = figures["token_perplexity"] * (1 - i / 10)
        figures["tiers"][tier] = {
            **figures,
            "token_perplexity": perplexity,
            "static_token_perplexity": figures["token_perplexity"] * (1 - i / 20),
            "stride": 3 * i,
            "nats": 7.0 * i,
            "settings": {"first": 0.12345 * i, "second": 1_000 * i},
            "settings_at_ends": {"first": "lowest", "second": "highest"} if i == 2 else {},
            "fitted_tokens": 20_011 * i,
        }
    lines = lines_of(figures)
    assert lines[2].split() == ["static", *TIERS]
    tokens = row(lines, "perplexity per token").split()
    assert len(tokens) == len(row(lines, "perplexity per word, comparable").split()) == 4
    static = [figures["tiers"][tier]["static_token_perplexity"] for tier in TIERS]
    told = [f"{value:,.2f}" for value in static]
    assert row(lines, "  static, in the same windows").split() == told
    assert row(lines, "  against that").split() == ["-5.3%", "-11.1%", "-17.6%"]
    assert row(lines, "stride").split() == [str(T), "3", "6", "9"]
    assert row(lines, "nats").split()[1:] == ["7.0", "14.0", "21.0"]
    fitted = lines.index(next(line for line in lines if line.startswith("best tried on valid")))
    assert lines[fitted].split()[4:] == ["first", "0.1235", "first", "0.2469", "first", "0.3704"]
    assert lines[fitted + 1].split() == ["second", "1,000", "second", "2,000", "second", "3,000"]
    tokens = ["20,011", "40,022", "60,033"]
    assert row(lines, "  on so many of its tokens").split() == tokens
    ends = lines.index(next(line for line in lines if line.startswith("  at an end of those tri")))
    assert [lines[ends].split()[6:], lines[ends + 1].split()] == [
        ["first:", "the", "lowest"],
        ["second:", "the", "highest"],
    ]
    figures["tiers"]["cache"]["settings_at_ends"] = {}
    assert not any("at an end of" in line for line in lines_of(figures))
    assert ("which is this text" in row(lines, "columns")) == (split == "valid")
