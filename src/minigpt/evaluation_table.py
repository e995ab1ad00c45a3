"""What `minigpt evaluate` prints: a column for each way of scoring, and below what all depend on.

In: what `Measurement.to_json` gave. Out: tables for rich. Nothing is computed here but the change
against the static model in the same windows.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.figures import condition_rows, names_words, peers

Figures = Mapping[str, Any]


def evaluation_table(figures: Figures) -> RenderableType:
    """Return the tables of one measurement: what came out, on what it depends, by context."""
    part = f"{figures['split']} of {figures['data']}" if figures["split"] else figures["data"]
    return Group(
        Text(f"{figures['run']} on {part}\n"),
        _columns(figures),
        "",
        _conditions(figures),
        "",
        _by_context(figures),
    )


def table_of(*heads: str, left: int = 1) -> Table:
    """Return an empty table without lines: `left` columns of text, then numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left else "right")
    return table


def interval_text(ends: list[float] | None, form: str = ",.2f") -> str:
    """Return an interval as `low - high`, or a dash where there is none."""
    return "-" if ends is None else f"{ends[0]:{form}} - {ends[1]:{form}}"


def _columns(figures: Figures) -> Table:
    """Return the figures: the static model, and each tier beside it."""
    tiers = {name: tier for name, tier in figures["tiers"].items() if tier is not None}
    columns: list[Figures] = [figures, *tiers.values()]
    table = table_of("", "static", *tiers)
    level = f"  {figures['intervals']['level']:.0%} interval"

    def add(label: str, cells: list[str]) -> None:
        table.add_row(Text(label), *(Text(cell) for cell in cells))

    add("perplexity per token", [f"{column['token_perplexity']:,.2f}" for column in columns])
    add(level, [interval_text(column["token_interval"]) for column in columns])
    if tiers:
        static = [f"{tier['static_token_perplexity']:,.2f}" for tier in tiers.values()]
        add("  static, in the same windows", ["", *static])
        add("  against that", ["", *map(_change, tiers.values())])
    # No capitals, or one <unk> for all rare words: per word that would look better than it is.
    if names_words(figures):
        add("perplexity per word, comparable", [_named(column) for column in columns])
        add(level, [interval_text(column["comparable_interval"]) for column in columns])
    elif figures["tokenizer"] != "basic_english" and not figures["unpriced"]:
        add("perplexity per word", [f"{column['word_perplexity']:,.2f}" for column in columns])
        add(level, [interval_text(column["comparable_interval"]) for column in columns])
    if figures["comparable_bits_per_byte"] is not None:
        bits = [column["comparable_bits_per_byte"] for column in columns]
        add("bits per byte", [f"{value:.4f}" for value in bits])
    add("nats", [f"{column['nats']:,.1f}" for column in columns])
    if tiers:
        add("stride", [f"{column['stride']:,}" for column in columns])
        add("best tried on valid", ["", *(_settings(tier["settings"]) for tier in tiers.values())])
        tokens = [f"{tier['fitted_tokens']:,}" for tier in tiers.values()]
        add("  on so many of its tokens", ["", *tokens])
    if any(tier["settings_at_ends"] for tier in tiers.values()):
        add("  at an end of those tried", ["", *map(_ends, tiers.values())])
    return table


def _change(tier: Figures) -> str:
    return f"{tier['token_perplexity'] / tier['static_token_perplexity'] - 1:+.1%}"


def _named(column: Figures) -> str:
    """Return the perplexity with each `<unk>` named, or what it exceeds."""
    sign = "" if column["comparable_perplexity"] is not None else "> "
    return f"{sign}{column['comparable_perplexity_at_least']:,.2f}"


def _settings(settings: Mapping[str, float]) -> str:
    """Return the settings of a tier, one a line."""
    return "\n".join(f"{name} {value:,.4g}" for name, value in settings.items())


def _ends(tier: Figures) -> str:
    """Return the settings beyond which nothing was tried, one a line."""
    ends = tier["settings_at_ends"].items()
    return "\n".join(f"{name}: the {end}" for name, end in ends)


def _conditions(figures: Figures) -> Table:
    intervals = figures["intervals"]
    if intervals["missing"]:
        resampling = f"no interval: {intervals['missing']}"
    else:
        resampling = (
            f"{intervals['articles']:,}, drawn again {intervals['resamples']:,} times for the "
            f"intervals, seed {intervals['seed']}"
        )
    rows = [
        *condition_rows(figures),
        ("bytes", f"{figures['bytes']:,}"),
        ("articles", resampling),
        ("sha256", f"{figures['sha256']} of the text"),
    ]
    if names_words(figures):
        rows.append(("comparable", peers(figures)))
    elif figures["unpriced"]:
        rows.append(
            ("comparable", f"not known, train has no price for <unk>: {figures['unpriced']}")
        )
    if any(figures["tiers"].values()):
        rows.append(("columns", _about_tiers(figures)))
    table = table_of("", "", left=2)
    table.show_header = False
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _about_tiers(figures: Figures) -> str:
    text = (
        "only the static one stands beside static figures, each has the stride that stands above; "
        "settings are the best of those tried on valid"
    )
    if figures["split"] == "valid":
        text += ", which is this text: for a figure to report, score test"
    return text


def _by_context(figures: Figures) -> Table:
    """Return the static perplexity by how many ids a token could look back at."""
    table = table_of("ids to look back at", "tokens", "perplexity per token", left=1)
    for row in figures["by_context_length"]:
        first, last = row["from"], row["to"]
        span = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        table.add_row(span, f"{row['tokens']:,}", f"{row['perplexity']:,.2f}")
    return table
