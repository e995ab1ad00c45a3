"""Figures: each unit where it tells the truth, and beside each what it may be compared with."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minigpt
from minigpt.cli import main
from minigpt.config import TokenizerConfig
from minigpt.corpus import open_corpus
from minigpt.data import prepare
from minigpt.evaluate import token_nats
from minigpt.figures import convention, figure_rows, figures
from tiny import run_config, write_corpus


# transformers#483: 48.4 or 37.5 for one model.
def test_the_convention_stands_beside_the_figure() -> None:
    assert "beside published figures" in convention("wikitext-2", "wikitext", 0.0)
    assert "published" not in convention("my.txt", "wikitext", 0.0)
    assert "never beside published figures" in convention("wikitext-2", "basic_english", 0.0)
    cut = convention("wikitext-2", "basic_english", 0.0625)
    assert "6.2% of the tokens but line ends became <unk>" in cut
    assert "not beside" in convention("wikitext-2", "wikitext", 0.05)
    assert "count of words" in convention("wikitext-2", "bpe", 0.0)


def trained(tmp_path: Path, vocab_size: int, valid: str = "") -> minigpt.Run:
    """Return a tiny run with a vocabulary of that size, trained on words w0 … w82 and <unk>."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = write_corpus(tmp_path / "corpus.txt").read_text("utf-8").replace("w7 ", "<unk> ")
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text(lines, "utf-8")
    (folder / "valid.txt").write_text(lines[: lines.index("\n", 3_000) + 1] + valid, "utf-8")
    config = run_config(folder, tokenizer=TokenizerConfig("wikitext", vocab_size))
    return minigpt.train(config, tmp_path / "run", on_event=lambda event: None)


def figures_of(run: minigpt.Run, capsys: pytest.CaptureFixture[str]) -> tuple[Any, list[str]]:
    """Return what `minigpt evaluate` says about a run, as JSON and as lines."""
    capsys.readouterr()
    assert main(["evaluate", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(run.path)]) == 0
    return found, capsys.readouterr().out.splitlines()


# transformers#483: 48.4 or 37.5 for one model.
def test_a_cut_vocabulary_shows_what_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, 43)
    found, lines = figures_of(run, capsys)
    corpus, tokenizer = open_corpus(run.config.data), run.tokenizer
    train = [word for line in corpus.lines("train") for word in line.split()]
    hidden = [word for word in train if tokenizer.token_to_id(word) in (None, tokenizer.unk_id)]
    assert len(set(hidden)) > 40
    stream = prepare(corpus, "valid", tokenizer)
    costs = token_nats(run.model, np.array(stream.ids), tokenizer.eos_id, context=11)
    words = [word for line in corpus.lines("valid") for word in [*line.split(), "<eos>"]]
    # P(word) = P(<unk>) · q(word), one word after the other
    for i, word in enumerate(words):
        if stream.ids[i] == tokenizer.unk_id:
            costs[i] -= math.log(hidden.count(word) / len(hidden))
    comparable = math.exp(costs.sum(dtype=np.float64) / len(words))
    assert found["comparable_perplexity"] == pytest.approx(comparable, rel=1e-5)
    assert found["unknown_words"]["n_unseen"] == 0
    assert comparable > 1.5 * found["token_perplexity"]
    (row,) = [line for line in lines if "per word" in line]
    assert row.split()[-1] == f"{comparable:,.2f}"
    (row,) = [line for line in lines if line.startswith("comparable")]
    assert "beside the closed vocabulary, each <unk> pays for its word" in row
    (row,) = [line for line in lines if line.startswith("convention")]
    assert "per token: not beside figures of the closed vocabulary" in row


def test_nothing_is_added_where_nothing_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = figures_of(trained(tmp_path, 0), capsys)
    assert found["comparable_perplexity"] == found["word_perplexity"]
    assert found["word_perplexity"] == pytest.approx(found["token_perplexity"])
    (row,) = [line for line in lines if line.startswith("perplexity per word")]
    assert row.split()[-1] == f"{found['word_perplexity']:,.2f}"
    assert not any(line.startswith("comparable") for line in lines)


@pytest.mark.parametrize("vocab_size", [0, 43])
def test_words_that_train_does_not_have_leave_it_incomplete(
    vocab_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = figures_of(trained(tmp_path, vocab_size, "w1 never seen\n"), capsys)
    assert found["comparable_perplexity"] is None
    assert found["unknown_words"]["n_unseen"] == 2
    at_least = found["comparable_perplexity_at_least"]
    assert at_least >= found["token_perplexity"]
    (row,) = [line for line in lines if "per word" in line]
    assert row.endswith(f"> {at_least:,.2f}")
    (row,) = [line for line in lines if line.startswith("comparable")]
    assert "incomplete, 2 words are not in train and count as 0" in row


@pytest.mark.parametrize("vocab_size", [0, 43])
def test_a_score_alone_is_told_in_rows(vocab_size: int, tmp_path: Path) -> None:
    """As at the end of a training, where no word was named: what would flatter stays away."""
    run = trained(tmp_path, vocab_size)
    stream = prepare(open_corpus(run.config.data), "valid", run.tokenizer)
    score = minigpt.evaluate(run)
    found = figures(run, "valid", stream, score, context=11, stride=11)
    assert found["comparable_perplexity"] is found["comparable_perplexity_at_least"] is None
    rows = figure_rows(found)
    assert ("perplexity", f"{score.token_perplexity:,.2f} per token") in rows
    assert ("context", "11, stride 11: each window on its own") in rows
    flattering = {("", f"{score.word_perplexity:,.2f} per word")}
    flattering |= {("bits per byte", f"{score.bits_per_byte:.4f}")}
    assert flattering & set(rows) == (set() if vocab_size else flattering)
