"""Measurements: every figure is that of the plain computation, and nothing depends on the batch."""

import copy
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minigpt import measurement
from minigpt.checkpoint import Run
from minigpt.config import TokenizerKind
from minigpt.corpus import open_corpus
from minigpt.data import prepare
from minigpt.dynamic_evaluation import DynamicSettings
from minigpt.errors import UserError
from minigpt.evaluate import evaluate, perplexity, token_nats
from minigpt.measurement import TIERS, measure
from minigpt.neural_cache import CacheSettings
from tiny import T, make_run, write_articles

KINDS: dict[TokenizerKind, int] = {"wikitext": 0, "basic_english": 0, "bpe": 290, "char": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_articles(tmp_path_factory.mktemp("articles"), 11)


@pytest.fixture(scope="module")
def run(data: Path) -> Run:
    return make_run(Path("runs/full"), data, "wikitext")


@pytest.fixture(scope="module")
def cut(data: Path) -> Run:
    return make_run(Path("runs/cut"), data, "wikitext", 43)


def ids_of(run: Run, split: str) -> np.ndarray:
    return prepare(open_corpus(run.config.data), split, run.tokenizer).ids  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_those_of_evaluate(kind: TokenizerKind, data: Path) -> None:
    run = make_run(Path("runs/r"), data, kind, KINDS[kind])
    stream = prepare(open_corpus(run.config.data), "test", run.tokenizer)
    found = measure(run, "test", context=7, stride=3).to_json()
    score = evaluate(run.model, stream, run.tokenizer.eos_id, context=7, stride=3)
    for name, value in asdict(score).items():
        assert found[name] == value
    for name in ("token_perplexity", "word_perplexity", "bits_per_byte"):
        assert found[name] == getattr(score, name)
    conditions = {"split": "test", "context": 7, "stride": 3, "sha256": stream.sha256}
    conditions |= {"run": "runs/r", "tokenizer": kind, "data": str(data)}
    assert conditions.items() <= found.items()
    words = score.tokens if kind == "basic_english" else score.words
    assert found["comparable_perplexity"] == pytest.approx(math.exp(score.nats / words))
    in_bytes = None if kind == "basic_english" else pytest.approx(score.bits_per_byte)
    assert found["comparable_bits_per_byte"] == in_bytes
    assert found["intervals"] == {
        "level": 0.95,
        "resamples": 2_000,
        "seed": 1,
        "articles": 12,
        "missing": None,
    }
    for figure in ("token", "comparable"):
        low, high = found[f"{figure}_interval"]
        assert low < found[f"{figure}_perplexity"] < high


def test_a_cut_vocabulary_pays_for_its_words(cut: Run) -> None:
    found = measure(cut).to_json()
    tokenizer, corpus = cut.tokenizer, open_corpus(cut.config.data)
    hidden = [
        word
        for line in corpus.lines("train")
        for word in line.split()
        if tokenizer.token_to_id(word) in (None, tokenizer.unk_id)
    ]
    costs = token_nats(cut.model, ids_of(cut, "valid"), tokenizer.eos_id, context=T).astype(float)
    words = [word for line in corpus.lines("valid") for word in [*line.split(), "<eos>"]]
    for i, word in enumerate(words):
        if tokenizer.token_to_id(word) in (None, tokenizer.unk_id):
            costs[i] -= math.log(hidden.count(word) / len(hidden))
    assert found["unknown_words"]["n_unseen"] == 0
    assert found["comparable_perplexity"] == pytest.approx(math.exp(costs.mean()))
    assert found["comparable_perplexity"] > 1.5 * found["token_perplexity"]
    n_bytes = sum(len(f"{line}\n".encode()) for line in corpus.lines("valid"))
    assert found["comparable_bits_per_byte"] == pytest.approx(costs.sum() / math.log(2) / n_bytes)
    low, high = found["comparable_interval"]
    assert low < found["comparable_perplexity"] < high


def test_what_must_not_matter_does_not_and_what_must_does(run: Run) -> None:
    def nats_of(**sizes: int) -> float:
        return float(measure(run, **sizes).to_json()["nats"])  # type: ignore[arg-type]

    alone = nats_of(batch_size=1)
    assert nats_of(batch_size=16) == pytest.approx(alone, rel=1e-6)
    assert nats_of(stride=T) == nats_of()
    half, short = nats_of(stride=5), nats_of(context=5)
    assert nats_of(stride=5, batch_size=1) == pytest.approx(half, rel=1e-6)
    assert len({round(nats) for nats in (alone, half, short)}) == 3
    run.model.train()
    try:
        assert nats_of() == nats_of(batch_size=16)
        assert nats_of() == pytest.approx(alone, rel=1e-6)
        assert run.model.training
    finally:
        run.model.eval()


# awd-lstm-lm#83: does the length of the context matter?
def test_figures_by_position_share_out_the_whole(run: Run) -> None:
    measured = measure(run, stride=4)
    found = measured.to_json()
    by_position, rows = found["by_position"], found["by_context_length"]
    assert len(by_position["tokens"]) == len(by_position["perplexity"]) == T
    spans = [(row["from"], row["to"]) for row in rows]
    assert spans == [(1, 1), (2, 2), (3, 4), (5, 8), (9, T)]
    for row in rows:
        among = slice(row["from"] - 1, row["to"])
        tokens = by_position["tokens"][among]
        losses = np.log(by_position["perplexity"][among])
        assert row["tokens"] == sum(tokens)
        assert row["perplexity"] == pytest.approx(math.exp(np.average(losses, weights=tokens)))
    nats = sum(row["tokens"] * math.log(row["perplexity"]) for row in rows)
    assert nats == pytest.approx(found["nats"], rel=1e-6)
    assert sum(row["tokens"] for row in rows) == found["tokens"]


def test_positions_that_no_window_reaches_have_no_figure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("w1 w2 w3", encoding="utf-8")
    found = measure(run, text=tmp_path / "short.txt").to_json()
    assert found["tokens"] == 4
    assert found["by_position"]["tokens"] == [1] * 4 + [0] * (T - 4)
    assert found["by_position"]["perplexity"][4:] == [None] * (T - 4)
    assert [(row["from"], row["to"]) for row in found["by_context_length"]] == [
        (1, 1),
        (2, 2),
        (3, 4),
    ]


def fake_tiers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Put tiers that add 1, 2 and 3 nats in place of the real ones; return who read how much."""
    calls: list[tuple[str, int]] = []

    def fit(name: str, settings: Any) -> Any:
        def of(model: Any, ids: np.ndarray, eos_id: int, **sizes: int) -> Any:
            calls.append((f"fit {name}", len(ids)))
            return settings

        return of

    def score(name: str, more: float, expected: Any) -> Any:
        def of(model: Any, ids: np.ndarray, eos_id: int, given: Any, **sizes: int) -> Any:
            calls.append((f"score {name}", len(ids)))
            assert given is expected
            context = sizes.pop("context")
            if isinstance(given, DynamicSettings):
                sizes["stride"] = given.segment
            return token_nats(model, ids, eos_id, context=context, **sizes) + np.float32(more)

        return of

    cache, dynamic = CacheSettings(3, 0.5, 0.1), DynamicSettings(0.1, 0.2, 5)
    for name, settings, more in (
        ("temperature", 1.25, 1),
        ("cache", cache, 2),
        ("dynamic", dynamic, 3),
    ):
        monkeypatch.setattr(measurement, f"fit_{name}", fit(name, settings))
        scorer = {"temperature": "tempered", "cache": "cached"}.get(name, name)
        monkeypatch.setattr(measurement, f"{scorer}_token_nats", score(name, more, settings))
    return calls


@pytest.mark.parametrize("stride", [T, 3])
def test_tiers_are_fitted_on_valid_and_stand_beside(
    stride: int, cut: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_tiers(monkeypatch)
    monkeypatch.setattr(measurement, "FITTED_ON_AT_MOST", 13)
    told: list[str] = []
    found = measure(cut, "test", stride=stride, tiers=TIERS[::-1], say=told.append).to_json()
    n_valid, n_test = len(ids_of(cut, "valid")), len(ids_of(cut, "test"))
    assert n_valid != n_test
    assert calls == [
        pair for tier in TIERS for pair in ((f"fit {tier}", n_valid), (f"score {tier}", n_test))
    ]
    assert len(told) == 3
    tiers = found["tiers"]
    assert tiers["temperature"]["settings"] == {"temperature": 1.25}
    assert tiers["cache"]["settings"] == {"size": 3, "flatness": 0.5, "weight": 0.1}
    assert tiers["dynamic"]["settings"] == {"rate": 0.1, "decay": 0.2, "segment": 5}
    for more, tier in enumerate(TIERS, start=1):
        column = tiers[tier]
        assert column["fitted_on"] == "valid"
        assert column["fitted_tokens"] == (13 if tier == "dynamic" else n_valid)
        assert f"{column['fitted_tokens']:,} tokens of valid" in told[more - 1]
        if tier == "dynamic":
            continue  # its segment is its stride
        assert column["stride"] == stride
        assert column["static_token_perplexity"] == found["token_perplexity"]
        for figure in ("token_perplexity", "comparable_perplexity"):
            assert column[figure] == pytest.approx(found[figure] * math.exp(more), rel=1e-5)
        for figure in ("token_interval", "comparable_interval"):
            expected = [end * math.exp(more) for end in found[figure]]
            assert column[figure] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stride", [T, 3, 5])
def test_a_tier_is_told_against_the_same_windows(
    stride: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shorter strides are worth is no merit of a tier: a factor of exp(3), and no other."""
    fake_tiers(monkeypatch)  # whose segments are of 5
    passes: list[int] = []

    def counted(*args: Any, **sizes: int) -> Any:
        passes.append(sizes["stride"])
        return token_nats(*args, **sizes)

    monkeypatch.setattr(measurement, "token_nats", counted)
    found = measure(run, "test", stride=stride, tiers=TIERS).to_json()
    dynamic = found["tiers"]["dynamic"]
    ids, eos_id = ids_of(run, "test"), run.tokenizer.eos_id
    static = token_nats(run.model, ids, eos_id, context=T, stride=5).mean(dtype=np.float64)
    assert (found["stride"], dynamic["stride"]) == (stride, 5)
    assert dynamic["static_token_perplexity"] == pytest.approx(math.exp(static))
    ratio = dynamic["token_perplexity"] / dynamic["static_token_perplexity"]
    assert ratio == pytest.approx(math.exp(3), rel=1e-5)
    if stride != 5:
        assert dynamic["static_token_perplexity"] != pytest.approx(found["token_perplexity"])
    # Twice where the strides differ, and once where they do not.
    assert sorted(passes) == sorted({stride, 5})


def test_settings_at_the_end_of_what_was_tried_are_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tiers(monkeypatch)
    tiers = measure(run, tiers=TIERS).to_json()["tiers"]
    assert tiers["temperature"]["settings_at_ends"] == tiers["cache"]["settings_at_ends"] == {}
    assert tiers["dynamic"]["settings_at_ends"] == {"rate": "highest"}
    best = CacheSettings(3, 34.0, 0.1)
    monkeypatch.setattr(measurement, "fit_cache", lambda *_, **__: best)
    monkeypatch.setattr(
        measurement, "cached_token_nats", lambda m, ids, *_, **__: np.ones(len(ids), np.float32)
    )
    tiers = measure(run, tiers=("cache",)).to_json()["tiers"]
    assert tiers["cache"]["settings_at_ends"] == {"flatness": "highest"}


def test_a_tier_that_there_is_not_is_a_users_error(run: Run) -> None:
    with pytest.raises(
        UserError, match=r"tiers are \('cache', 'cahce'\): they must be among \('te"
    ):
        measure(run, tiers=("cache", "cahce"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="tiers are 'cache': they must be among"):
        measure(run, tiers="cache")  # type: ignore[arg-type]


def test_the_real_tiers_cost_no_more_on_the_text_that_they_were_fitted_on(cut: Run) -> None:
    found = measure(cut, tiers=TIERS).to_json()
    tiers = found["tiers"]
    assert [list(tiers[tier]["settings"]) for tier in TIERS] == [
        ["temperature"],
        ["size", "flatness", "weight"],
        ["rate", "decay", "segment"],
    ]
    # A model of random weights is far too sure of itself, and gains by being told so.
    assert tiers["temperature"]["nats"] < 0.99 * found["nats"]
    assert tiers["cache"]["nats"] <= found["nats"] * (1 + 1e-6)
    assert math.isfinite(tiers["dynamic"]["nats"])
    assert tiers["dynamic"]["nats"] != found["nats"]
    assert (found["stride"], tiers["dynamic"]["stride"]) == (T, T // 2)
    assert cut.model.training is False


def keys_of(tree: Any) -> Any:
    return {key: keys_of(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def test_the_names_of_figures_stay(
    run: Run, cut: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tiers(monkeypatch)
    text = tmp_path / "other.txt"
    text.write_text("nothing of this was seen\n", encoding="utf-8")
    spelt = make_run(Path("runs/bpe"), data, "bpe", 290)
    full = [measure(r, tiers=TIERS).to_json() for r in (run, cut, spelt)]
    plain = [measure(r, text=text).to_json() for r in (run, cut, spelt)]
    for found in full + plain:
        tiers = found.pop("tiers")
        assert list(tiers) == list(TIERS)
        assert keys_of(found) == keys_of(full[0])
        json.dumps(found, allow_nan=False)
    assert plain[0]["split"] is None
    assert plain[0]["data"] == str(text)


def test_a_model_that_says_nothing_is_told_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, ids: np.ndarray, *_: Any, **sizes: int) -> np.ndarray:
        nats = np.ones(len(ids), dtype=np.float32)
        nats[len(ids) // 2] = math.inf
        return nats

    monkeypatch.setattr(measurement, "token_nats", broken)
    measured = measure(run)
    found = measured.to_json()
    assert found["token_perplexity"] == math.inf
    assert found["token_interval"][1] == math.inf
    printable = [line for line in str(found["by_context_length"]).split() if "inf" in line]
    assert len(printable) == 1


def test_a_file_is_another_text(run: Run, data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_bytes((data / "test.txt").read_bytes())
    split, file = measure(run, "test").to_json(), measure(run, text=copy).to_json()
    for name in ("nats", "tokens", "words", "bytes", "sha256", "token_interval"):
        assert file[name] == split[name]
    assert "beside published" not in file["convention"]


def test_a_file_called_like_a_corpus_is_none(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wikitext-2").write_bytes((data / "test.txt").read_bytes())
    assert "published" not in measure(run, text=Path("wikitext-2")).to_json()["convention"]


@pytest.mark.parametrize(
    "text", ["w", "\n\nw\n\n", "我读书。\n这里没有一个认识的字。\n", "é à ї\n"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts_have_a_right_figure(
    kind: TokenizerKind, text: str, data: Path, tmp_path: Path
) -> None:
    run, path = make_run(Path("runs/r"), data, kind, KINDS[kind]), tmp_path / "odd.txt"
    path.write_text(text, encoding="utf-8")
    found = measure(run, text=path).to_json()
    lines = text.removesuffix("\n").split("\n")
    ids = np.array([i for row in run.tokenizer.encode_lines(lines) for i in row])
    nats = token_nats(run.model, ids, run.tokenizer.eos_id, context=T)
    assert found["tokens"] == len(ids)
    assert found["nats"] == pytest.approx(float(nats.sum()), rel=1e-6)
    assert found["bytes"] == len(text.removesuffix("\n").encode()) + 1
    assert found["token_interval"] is None
    assert "the text has 1 article (" in found["intervals"]["missing"]
    assert found["unpriced"] is None
    if kind in ("wikitext", "basic_english"):  # which have never seen a word of it
        unknown = found["unknown_words"]
        assert unknown["n_unseen"] == unknown["n_unknown"] > 0
        assert found["unknown_share"] == 1
        assert found["comparable_perplexity"] is None
        assert found["comparable_perplexity_at_least"] > 1
        assert found["comparable_interval"] is None
    else:
        assert found["comparable_perplexity"] == pytest.approx(
            perplexity(found["nats"] / found["words"])
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: give a file with text in it"),
        (b" \n\n", "is empty"),
        ("été".encode("latin-1"), "is not UTF-8 but looks like LATIN1"),
        (b"a\0b", "is not text"),
    ],
)
def test_what_is_no_text_is_a_users_error(
    content: bytes, message: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "none.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        measure(run, text=path)


def test_a_text_that_is_not_there_is_a_users_error(run: Run, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text .*nowhere.txt does not exist: give the path"):
        measure(run, text=tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="is not a regular file"):
        measure(run, text=tmp_path)
    (tmp_path / "marks.txt").write_text('" "\n', encoding="utf-8")
    classic = make_run(Path("runs/b"), data, "basic_english")
    with pytest.raises(UserError, match=r"marks\.txt has no words"):
        measure(classic, text=tmp_path / "marks.txt")


def without_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what runs learned from, as on the machine of somebody who was sent one."""

    def gone(name: str) -> Any:
        raise UserError(f"data {name} does not exist: check the path")

    monkeypatch.setattr(measurement, "open_corpus", gone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_unknown_words_needs_nothing_but_itself(
    kind: TokenizerKind, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(Path("runs/c"), data, kind, KINDS[kind])
    path = tmp_path / "text.txt"
    path.write_text("w1 w2\n", encoding="utf-8")
    expected = measure(run, text=path).to_json()
    without_corpus(monkeypatch)
    assert measure(run, text=path).to_json() == expected
    assert expected["comparable_perplexity"] > 1
    message = f"dynamic is fitted on valid of {data}, which is not here: data .* does not exist"
    with pytest.raises(UserError, match=message):
        measure(run, text=path, tiers=("dynamic", "cache"))


@pytest.mark.parametrize("kind", ["wikitext", "basic_english"])
def test_without_train_no_unknown_word_has_a_price(
    kind: TokenizerKind, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(Path("runs/u"), data, kind, 43)
    path = tmp_path / "text.txt"
    path.write_bytes((data / "test.txt").read_bytes())
    priced = measure(run, text=path).to_json()
    assert priced["comparable_perplexity"] > priced["token_perplexity"]
    without_corpus(monkeypatch)
    measured = measure(run, text=path)
    assert not measured.names_every_word
    found = measured.to_json()
    assert found["unpriced"] == f"data {data} does not exist: check the path"
    missing = [name for name in found if name.startswith("comparable_")] + ["unknown_words"]
    assert len(missing) == 5
    assert {name: found[name] for name in missing} == dict.fromkeys(missing)
    same = set(found) - {*missing, "unpriced"}
    assert {name: found[name] for name in same} == {name: priced[name] for name in same}


def test_articles_without_tokens_are_counted_nowhere(data: Path, tmp_path: Path) -> None:
    """What stands before the first title is an article, here of quotation marks alone."""
    run, path = make_run(Path("runs/q"), data, "basic_english"), tmp_path / "text.txt"
    for n in (9, 10):
        articles = "".join(f"\n = Title w{i} = \n\nw{i} .\n" for i in range(n))
        path.write_text(f'" "\n{articles}', encoding="utf-8")
        measured = measure(run, text=path)
        found = measured.to_json()
        assert (len(measured.articles), found["intervals"]["articles"]) == (n + 1, n)
        assert (found["token_interval"] is None) == (n == 9)
        assert ("the text has 9 articles (" in str(found["intervals"]["missing"])) == (n == 9)


def test_weights_that_are_no_numbers_give_no_figure(run: Run) -> None:
    model = copy.deepcopy(run.model)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="scores words with what is no number"):
        measure(replace(run, model=model))
