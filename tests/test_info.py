"""Info: what a model costs, counted from the model itself and checked by hand."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minigpt
from minigpt.cli import main
from minigpt.config import Config, ModelConfig, TokenizerConfig, load_preset, preset_names
from minigpt.corpus import open_corpus
from minigpt.data import prepare
from minigpt.evaluate import token_nats
from minigpt.info import (
    convention,
    figure_rows,
    figures,
    planned_vocab_size,
    report_rows,
    size_rows,
    sizes,
)
from minigpt.model import MiniGPT, Objective
from minigpt.optim import make_optimizers
from minigpt.unknown_words import UnknownCost
from tiny import run_config, write_corpus

T, D, H, F, L, V = 7, 20, 5, 23, 3, 53


def small(**parts: object) -> Config:
    model = ModelConfig(
        context_length=T, d_model=D, n_heads=H, d_ff=F, n_layers=L, **{"norm": "layer", **parts}
    )  # type: ignore[arg-type]
    return Config(batch_size=6, accumulation=2, model=model)


GPT2 = {
    "position": "learned",
    "norm_placement": "pre",
    "feed_forward": "gelu",
    "bias": True,
}


@pytest.mark.parametrize("name", preset_names())
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    config = load_preset(name)
    if config.model.d_model > 512:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=1))
    found = sizes(config, 331)
    with torch.random.fork_rng():
        model = MiniGPT(config.model.resolved(331))
    assert found.n_parameters == sum(p.numel() for p in model.parameters())
    assert found.n_parameters == sum(found.parts.values())
    assert found.n_embedding + found.n_non_embedding == found.n_parameters


def test_gpt2_by_hand() -> None:
    found = sizes(small(**GPT2), V)
    assert found.parts == {
        "word tables": V * D,
        "positions": T * D,
        "norms": (2 * L + 1) * 2 * D,
        "attention": L * (4 * D * D + 4 * D),
        "feed-forward": L * (2 * D * F + F + D),
    }
    assert found.n_embedding == (V + T) * D


def test_gpt2_small_has_its_published_size() -> None:
    model = dataclasses.replace(load_preset("gpt2").model, vocab_size=50_257)
    assert sizes(Config(model=model), 50_257).n_parameters == 124_439_808


def test_an_untied_table_counts_twice() -> None:
    tied, untied = (sizes(small(**GPT2, tie_embeddings=tie), V) for tie in (True, False))
    assert untied.n_embedding - tied.n_embedding == V * D


def test_flops_by_hand() -> None:
    found = sizes(small(**GPT2), V)
    matrices = L * (4 * D * D + 2 * D * F) + D * V
    attention = L * H * (D // H) * 2 * (T + 1)  # 2 products of 2 K FLOPs, (T + 1) / 2 positions
    assert found.forward_flops == 2 * matrices + attention
    assert found.training_flops == 3 * found.forward_flops


def test_the_adaptive_softmax_costs_less_and_is_counted() -> None:
    full = sizes(small(position="rotary"), 997)
    adaptive = sizes(small(position="rotary", output="adaptive", cutoffs=(101, 307)), 997)
    assert adaptive.forward_flops < full.forward_flops
    assert adaptive.n_embedding < full.n_embedding
    assert adaptive.parts["output"] > 0


def test_optimizer_memory_is_what_the_optimizers_hold() -> None:
    config = small(**GPT2)
    with torch.random.fork_rng():
        model = MiniGPT(config.model.resolved(V))
    optimizers = make_optimizers(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    held = sum(
        tensor.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 0  # not the count of steps
    )
    found = sizes(config, V)
    assert found.training_bytes["optimizer"] == held
    assert found.training_bytes["weights"] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("parts", [GPT2, {"qk_norm": True, "n_kv_heads": 1, "dropout": 0.1}])
def test_activations_are_what_a_step_saves(parts: dict[str, object]) -> None:
    config = small(**parts)
    with torch.random.fork_rng():
        model = MiniGPT(config.model.resolved(V)).train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() > 0:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(3, T, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = Objective(model)(ids, ids)
    of_blocks = sizes(config, V).training_bytes["activations"] - 4 * (4 * 3 * T * D + 2 * 2**21)
    measured = sum(saved.values())
    assert 0.75 * measured < of_blocks < 1.25 * measured


def test_the_cache_grows_with_the_key_heads() -> None:
    every, grouped = (sizes(small(**GPT2, n_kv_heads=n), V).cache_bytes for n in (H, 1))
    assert every == 2 * 4 * L * T * D
    assert grouped == every // H


def test_counting_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    sizes(small(**GPT2), V)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("tokenizer", "entries"),
    [
        (TokenizerConfig("wikitext", 0), 33_278),
        (TokenizerConfig("basic_english", 0), 28_785),
        (TokenizerConfig("basic_english", 500), 500),
        (TokenizerConfig("bpe", 8_192), 8_192),
    ],
)
def test_the_vocabulary_of_a_plan(tokenizer: TokenizerConfig, entries: int) -> None:
    assert planned_vocab_size(tokenizer) == entries
    assert planned_vocab_size(tokenizer, 71) == 71


def test_tables_are_made_of_text() -> None:
    config = small(**GPT2)
    rows = size_rows(sizes(config, V), config) + report_rows({"a": {"b": 1.5}, "c": None})
    assert all(isinstance(cell, str) for row in rows for cell in row)
    assert ("a.b", "1.50") in rows


def test_the_convention_stands_beside_the_figure() -> None:
    assert "beside published figures" in convention("wikitext-2", "wikitext", 0.0)
    assert "published" not in convention("my.txt", "wikitext", 0.0)
    assert "never beside published figures" in convention("wikitext-2", "basic_english", 0.0)
    cut = convention("wikitext-2", "basic_english", 0.0625)
    assert "6.2% of the tokens became <unk>" in cut
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


@pytest.mark.parametrize(("n_unseen", "said"), [(0, "12,345.00 per word"), (3, "more than 12,345")])
def test_a_score_alone_is_told_in_rows(tmp_path: Path, n_unseen: int, said: str) -> None:
    """As at the end of a training, where no word was named, and as it is where some were."""
    run = trained(tmp_path, 43)
    stream = prepare(open_corpus(run.config.data), "valid", run.tokenizer)
    score = minigpt.evaluate(run)
    found = figures(run, "valid", stream, score, context=11, stride=11)
    assert found["comparable_perplexity"] is found["comparable_perplexity_at_least"] is None
    rows = dict(figure_rows(found))
    assert rows["perplexity"] == f"{score.token_perplexity:,.2f} per token"
    assert "per word" not in str(rows)
    assert "per byte" not in str(rows)
    nats = score.words * math.log(12_345) - score.nats
    unknown = UnknownCost(nats, 5, n_unseen)
    named = figures(run, "valid", stream, score, context=11, stride=11, unknown=unknown)
    (row,) = [value for _, value in figure_rows(named) if "per word" in value]
    assert row.startswith(said)
    assert (named["comparable_perplexity"] is None) == bool(n_unseen)
