"""What is measured of written text, on texts whose figures can be counted by hand."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from minigpt.config import TokenizerConfig
from minigpt.errors import UserError
from minigpt.sampling import USUAL
from minigpt.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import coherence
from ngram import NGrams


def test_four_words_in_a_row_that_come_again_are_counted():
    assert coherence.repeated(["a", "b", "c", "d", "a", "b", "c", "d"], 4) == pytest.approx(1 / 5)
    assert coherence.repeated(["a", "b", "c", "d", "e", "f"], 4) == 0
    assert coherence.repeated(["a"] * 13, 4) == pytest.approx(9 / 10)
    assert coherence.repeated(["a", "b"], 4) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('He said "yes" (twice).', True),
        ("a (b [c] d)", True),
        ("a) b (", False),
        ("(a\nb)", False),
        ('"a\nb"', False),
        ("", True),
    ],
)
def test_quotes_and_brackets_are_watched(text, expected):
    assert coherence.balanced(text) is expected


def test_names_are_capitals_inside_a_sentence():
    words = [
        "In",
        "Rome",
        ",",
        "Nero",
        "sang",
        ".",
        "He",
        "left",
        "Rome",
        "for",
        "Gaul",
        ".",
        "It",
        "burned",
    ]
    assert coherence.recurring(words) == [True, False, True, False]
    assert coherence.recurring(["A"]) == []


def test_a_grid_has_every_combination():
    found = coherence.grid(["temperature=0.7,0.9", "top_k=none,50"], USUAL)
    pairs = [(s.temperature, s.top_k) for s in found]
    assert pairs == [(0.7, None), (0.7, 50), (0.9, None), (0.9, 50)]
    assert coherence.grid([], USUAL) == [USUAL]
    for wish in ("temperature", "temprature=1", "top_k=x"):
        with pytest.raises(UserError):
            coherence.grid([wish], USUAL)


def test_figures_of_texts_are_those_counted_by_hand():
    lines = ['The "old" mill @-@ house , the <unk> one .'.replace('"old"', '" old "')]
    tokenizer = Tokenizer.train(TokenizerConfig("wikitext", 0), lambda: lines)
    ids = tokenizer.encode(lines[0])
    judge = NGrams(np.array(ids * 3), tokenizer.vocab_size)
    found = coherence.figures(tokenizer, judge, [ids[:2], ids[:2]], [ids[2:], ids[2:]])
    assert found["artefacts_per_1000_words"] == 0
    assert found["balanced"] == 1
    # old " mill-house , the one . : 7 words, of which no two are alike, written twice
    assert found["unknown_per_1000_words"] == pytest.approx(1000 * 2 / 14)
    assert found["distinct_2_grams"] == pytest.approx(6 / 12)
    assert found["sentence_words"] == 7
    # `<unk>` is easy to guess, and only real text has it.
    known = np.array(ids) != tokenizer.unk_id
    log_probs = judge.log_probs(np.array(ids))[2:][known[2:]]
    assert len(log_probs) == len(ids) - 3
    assert found["5_gram_perplexity"] == pytest.approx(np.exp(-log_probs.mean()))


def test_a_run_is_measured_beside_real_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(coherence, "N_PROMPTS", 5)
    monkeypatch.setattr(coherence, "N_PROMPT_IDS", 3)
    monkeypatch.setattr(coherence, "N_NEW_IDS", 7)
    words = [
        "the",
        "old",
        "mill",
        "by",
        "a",
        "river",
        "was",
        "built",
        "of",
        "stone",
        "in",
        "Rome",
        ".",
    ]
    rows = [" ".join(words[(i + j) % len(words)] for j in range(13)) for i in range(400)]
    Path("text.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    from minigpt.cli import main

    tiny = "--threads 1 --compile off --precision float32 --model.context-length 8"
    tiny += " --model.d-model 16 --model.n-heads 2 --model.n-layers 1 --model.d-ff 24"
    tiny += " --sampling.top-k 50 --sampling.frequency-penalty none"
    argv = f"train mini --data text.txt --steps 2 --validations 1 --out run {tiny}"
    assert main(argv.split()) == 0
    capsys.readouterr()
    coherence.main(["run", "--try", "temperature=0.5,1", "--threads", "1", "--out", "found.json"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("real text")
    assert [row.split("  ")[0] for row in printed[1:]] == ["temperature 0.5", "temperature 1.0"]
    found = json.loads(Path("found.json").read_text("utf-8"))
    assert [row["sampling"]["temperature"] for row in found["rows"]] == [0.5, 1.0]
    assert found["real"]["5_gram_perplexity"] < found["rows"][1]["5_gram_perplexity"]
    with pytest.raises(SystemExit, match="error: --try is x"):
        coherence.main(["run", "--try", "x"])
    monkeypatch.setattr(coherence, "N_PROMPTS", 5_000)
    with pytest.raises(SystemExit, match="error: valid has"):
        coherence.main(["run"])
