"""Info: what a model costs, counted from the model itself and checked by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from minigpt.config import Config, ModelConfig, TokenizerConfig, load_preset, preset_names
from minigpt.info import planned_vocab_size, report_rows, size_rows, sizes
from minigpt.model import MiniGPT, Objective
from minigpt.optim import make_optimizers

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


def test_a_pointer_is_counted_by_hand() -> None:
    """A vector and two numbers; a cosine for each earlier place; directions and ids kept."""
    with_one, without = (sizes(small(**GPT2, pointer=pointer), V) for pointer in (True, False))
    assert with_one.parts["pointer"] == with_one.n_parameters - without.n_parameters == D + 2
    assert with_one.forward_flops - without.forward_flops == 2 * D * (T - 1) / 2
    assert with_one.cache_bytes - without.cache_bytes == T * (4 * D + 8)


def test_the_adaptive_softmax_costs_less_and_is_counted() -> None:
    full = sizes(small(position="rotary"), 997)
    adaptive = sizes(small(position="rotary", output="adaptive", cutoffs=(101, 307)), 997)
    assert adaptive.forward_flops < full.forward_flops
    assert adaptive.n_embedding < full.n_embedding
    assert adaptive.parts["output"] > 0


@pytest.mark.parametrize("accumulation", [1, 6])
def test_the_candidates_of_a_sampled_softmax_are_counted(accumulation: int) -> None:
    """Against draws from Zipf's law: frequent words, sampled ones, and the batch's own targets."""
    n_frequent, n_sampled, n_words = 101, 53, 9_973
    parts = {"output": "sampled", "n_frequent": n_frequent, "n_sampled": n_sampled}
    config = small(position="rotary", **parts)
    config = dataclasses.replace(config, batch_size=60, accumulation=accumulation)
    found = sizes(config, n_words).forward_flops
    full = sizes(small(position="rotary"), n_words).forward_flops
    candidates = n_words + (found - full) / (2 * D)
    shares = 1 / np.arange(1, n_words + 1)
    random, n_targets = np.random.default_rng(3), 60 // accumulation * T
    counts = []
    for _ in range(50):
        targets = random.choice(n_words, n_targets, p=shares / shares.sum())
        drawn = random.integers(n_frequent, n_words, n_sampled)
        counts.append(len({*range(n_frequent), *targets.tolist(), *drawn.tolist()}))
    assert candidates == pytest.approx(np.mean(counts), rel=0.02)
    every, plain = (sizes(c, n_frequent) for c in (config, small(position="rotary")))
    assert every.forward_flops == plain.forward_flops  # no words but frequent ones


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
