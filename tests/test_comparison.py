"""Comparisons: same text and same tokens, or one line that says why not; sure where pairs are."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from minigpt import comparison, measurement
from minigpt.checkpoint import Run
from minigpt.comparison import Comparison, compare, ids_sha256
from minigpt.config import TokenizerKind
from minigpt.errors import UserError
from minigpt.measurement import measure
from tiny import T, make_run, write_articles


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_articles(tmp_path_factory.mktemp("articles"), 11)


def run_of(
    data: Path, name: str, kind: TokenizerKind = "wikitext", size: int = 0, **model: Any
) -> Run:
    return make_run(Path(name), data, kind, size, **model)


def printed(compared: Comparison) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(compared.table())
    return captured.get()


def test_a_run_beside_itself_is_as_good(data: Path) -> None:
    run = run_of(data, "a")
    compared = compare([run, run], "test")
    first, second = compared.runs
    assert first == second
    assert first.ratio == 1
    assert first.ratio_interval == [1, 1]


def test_figures_are_those_of_each_run(data: Path) -> None:
    runs = [run_of(data, "a"), run_of(data, "longer", n_layers=1)]
    compared = compare(runs, "test", context=7, stride=3)
    for row, run in zip(compared.runs, runs, strict=True):
        found = measure(run, "test", context=7, stride=3).to_json()
        assert row.token_perplexity == found["token_perplexity"]
        assert row.word_perplexity == found["comparable_perplexity"]
        assert row.bits_per_byte == found["comparable_bits_per_byte"]
        assert (row.run, row.tokenizer, row.vocab_size) == (str(run.path), "wikitext", 88)
        assert row.n_parameters == sum(p.numel() for p in run.model.parameters())
        assert (row.context, row.stride, row.minutes, row.epochs) == (7, 3, 1.5, 1.5)
    first, second = compared.runs
    assert first.n_parameters > second.n_parameters
    assert second.ratio == pytest.approx(second.token_perplexity / first.token_perplexity)
    assert second.ratio_interval is not None
    assert second.ratio_interval[0] < second.ratio < second.ratio_interval[1]
    assert (compared.split, compared.data, compared.n_articles) == ("test", str(data), 12)


def test_pairs_are_more_certain_than_runs_alone(data: Path) -> None:
    """What makes an article hard for both says nothing about which of them is better."""
    run, twin = run_of(data, "a"), run_of(data, "b")
    twin.model.load_state_dict(run.model.state_dict())
    twin.model.output.table.data.add_(1e-3)
    (row,) = compare([run, twin]).runs[1:]
    alone = measure(run).to_json()
    low, high = np.log(alone["token_interval"])
    assert row.ratio_interval is not None
    paired_low, paired_high = np.log(row.ratio_interval)
    assert 0 < paired_high - paired_low < 0.1 * (high - low)


def test_without_articles_there_is_a_ratio_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4\n", encoding="utf-8")
    runs = [run_of(data, "a"), run_of(data, "longer")]
    compared = compare(runs, text=tmp_path / "text.txt")
    assert compared.runs[1].ratio != 1
    assert compared.runs[1].ratio_interval is None
    assert "the text has 1 article (" in compared.to_json()["intervals"]["missing"]
    assert "no interval: the text has 1 article (" in printed(compared)
    assert (compared.split, compared.data) == (None, str(tmp_path / "text.txt"))


def test_words_compare_across_tokenizers(data: Path) -> None:
    runs = [
        run_of(data, "full"),
        run_of(data, "cut", size=43),
        run_of(data, "bpe", "bpe", 290),
        run_of(data, "char", "char"),
    ]
    compared = compare(runs, by_word=True)
    assert compared.by_word
    for row, run in zip(compared.runs, runs, strict=True):
        found = measure(run).to_json()
        assert row.token_perplexity is None
        assert row.word_perplexity == found["comparable_perplexity"]
        assert row.bits_per_byte == found["comparable_bits_per_byte"]
        assert row.ratio == pytest.approx(row.word_perplexity / compared.runs[0].word_perplexity)
        assert row.ratio_interval is not None
        assert row.ratio_interval[0] <= row.ratio <= row.ratio_interval[1]
    assert len({row.word_perplexity for row in compared.runs}) == 4


def test_basic_english_compares_with_its_own_kind(data: Path) -> None:
    runs = [run_of(data, "a", "basic_english", 47), run_of(data, "b", "basic_english")]
    compared = compare(runs, by_word=True)
    for row, run in zip(compared.runs, runs, strict=True):
        assert row.word_perplexity == measure(run).to_json()["comparable_perplexity"]
        assert row.bits_per_byte is None
    for pair in ([runs[0], run_of(data, "c")], [run_of(data, "c"), runs[0]]):
        with pytest.raises(UserError, match=r"\(basic_english, 47 entries\).* different words: "):
            compare(pair, by_word=True)


@pytest.mark.parametrize(("kind", "size"), [("wikitext", 43), ("bpe", 290), ("basic_english", 0)])
def test_other_tokens_are_refused(
    kind: TokenizerKind, size: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "measure", lambda *_, **__: pytest.fail("before it is scored"))
    with pytest.raises(UserError) as error:
        compare([run_of(data, "first"), run_of(data, "first"), run_of(data, "other", kind, size)])
    line = str(error.value)
    assert line.startswith("runs first (wikitext, 88 entries) and other (")
    assert line.endswith("per token they do not compare, so ask for --by-word")
    assert "\n" not in line


@pytest.mark.parametrize("by_word", [False, True])
def test_other_texts_are_refused(
    by_word: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "measure", lambda *_, **__: pytest.fail("before it is scored"))
    elsewhere = write_articles(tmp_path / "elsewhere", 5)
    runs = [run_of(data, "a"), run_of(elsewhere, "b")]
    with pytest.raises(UserError, match=r"runs a .* and b .* read different texts: .* --text"):
        compare(runs, by_word=by_word)


def test_the_same_text_under_another_name_is_the_same(data: Path, tmp_path: Path) -> None:
    copy = write_articles(tmp_path / "copy", 11)
    first, second = compare([run_of(data, "a"), run_of(copy, "b")]).runs
    assert first.token_perplexity == second.token_perplexity
    assert second.ratio == 1


def test_runs_of_different_data_meet_on_one_text(data: Path, tmp_path: Path) -> None:
    elsewhere = write_articles(tmp_path / "elsewhere", 5)
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4\n", encoding="utf-8")
    runs = [run_of(data, "a", "char"), run_of(elsewhere, "b", "bpe", 300)]
    compared = compare(runs, text=tmp_path / "text.txt", by_word=True)
    assert all(row.word_perplexity for row in compared.runs)


def test_words_without_a_price_leave_no_ratio(data: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w1 unseen w3 w4\n", encoding="utf-8")
    runs = [run_of(data, "a"), run_of(data, "bpe", "bpe", 290)]
    for order in (runs, runs[::-1]):
        rows = compare(order, text=tmp_path / "text.txt", by_word=True).runs
        words = {row.tokenizer: row.word_perplexity for row in rows}
        assert words["wikitext"] is None
        assert words["bpe"] is not None
        assert rows[1].ratio is rows[1].ratio_interval is None
        told = printed(compare(order, text=tmp_path / "text.txt", by_word=True))
        assert "no figure per word for a: words that are read as <unk>" in told


def test_a_mistake_names_its_run(data: Path) -> None:
    runs = [run_of(data, "long"), run_of(data, "short", context_length=T - 2)]
    assert [row.context for row in compare(runs).runs] == [T, T - 2]
    with pytest.raises(UserError, match=f"run short: context is {T}: it must lie between 1 and"):
        compare(runs, context=T)


@pytest.mark.parametrize(("n", "there"), [(0, "are none"), (1, "is only one")])
def test_fewer_than_two_are_refused(
    n: int, there: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "measure", lambda *_, **__: pytest.fail("before it is scored"))
    with pytest.raises(UserError, match=f"of runs to compare there {there}: give two or more"):
        compare([run_of(data, "a")] * n)


def test_windows_that_differ_are_told(data: Path) -> None:
    runs = [run_of(data, "long"), run_of(data, "short", context_length=T - 2)]
    assert "context/stride differ" in printed(compare(runs))
    assert "context/stride differ" in printed(compare(runs, stride=5))
    assert "context/stride" not in printed(compare(runs, context=5)).split("ratio: ")[1]
    both_long = replace(compare(runs), runs=compare(runs).runs[:1] * 2)
    assert "context/stride differ" not in printed(both_long)


def test_without_train_words_have_no_price_and_leave_no_ratio(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str) -> Any:
        raise UserError(f"data {name} does not exist: check the path")

    (tmp_path / "text.txt").write_text("w1 <unk> w3 w4\n", encoding="utf-8")
    runs = [run_of(data, "a", size=43), run_of(data, "b", size=47)]
    priced = compare(runs, text=tmp_path / "text.txt", by_word=True)
    assert priced.runs[1].ratio is not None
    assert "no figure per word" not in printed(priced)
    monkeypatch.setattr(measurement, "open_corpus", gone)
    compared = compare(runs, text=tmp_path / "text.txt", by_word=True)
    assert [row.ratio for row in compared.runs] == [None, None]
    assert "no figure per word" in printed(compared)
    twins = compare([runs[0], runs[0]], text=tmp_path / "text.txt")
    assert twins.runs[1].ratio == 1  # per token no price is asked for


def test_ids_are_the_same_in_two_bytes_and_in_four() -> None:
    ids = np.arange(300_007) % 50_021
    small, large = ids.astype(np.uint16), ids.astype(np.uint32)
    assert ids_sha256(small) == ids_sha256(large)
    for other in (ids[:-1], ids[::-1], np.where(ids == 7, 8, ids)):
        assert ids_sha256(other) != ids_sha256(ids)


def test_everything_is_in_the_json_and_in_the_table(data: Path) -> None:
    unknown = replace(run_of(data, "runs/[bold]"), report={"epochs": "many"})
    compared = compare([run_of(data, "a"), unknown])
    found = json.loads(json.dumps(compared.to_json(), allow_nan=False))
    assert found["runs"][1]["minutes"] is found["runs"][1]["epochs"] is None
    assert set(found) == {"data", "split", "sha256", "by_word", "intervals", "runs"}
    text = printed(compared)
    for row in compared.runs:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{row.run} ")]
        assert row.ratio is not None
        assert row.token_perplexity is not None
        for cell in (f"{row.token_perplexity:,.2f}", f"{row.ratio:.4f}", f"{T}/{T}", "wikitext 88"):
            assert cell in line
    assert compared.sha256 in text
    assert "by tokens; interval: 11 articles drawn again 2,000 times" in text
    assert not math.isclose(compared.runs[1].ratio or 1, 1)
