"""The whole model: that of transformers where there is one, causal and exact on every path."""

import copy
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.layers.positions import sinusoidal_table
from minigpt.model import MiniGPT, Objective
from tiny import (
    ADAPTIVE,
    GPT2,
    MODELS,
    MODERN,
    PAPER,
    B,
    D,
    F,
    H,
    K,
    L,
    T,
    V,
    make_model,
    random_ids,
    taught,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from as_transformers import llama_like, llama_names


def gpt2_names(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and lay out our tensors, weights or gradients, as GPT2LMHeadModel has them."""
    theirs = {
        "transformer.wte.weight": ours["embedding.weight"],
        "transformer.wpe.weight": ours["positions.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
    }
    parts = {
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
        "attention.output": "attn.c_proj",
        "feed_forward.widen": "mlp.c_fc",
        "feed_forward.narrow": "mlp.c_proj",
    }
    for i in range(L):
        for kind in ("weight", "bias"):

            def turned(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.T if tensor.dim() == 2 else tensor

            for mine, other in parts.items():
                theirs[f"transformer.h.{i}.{other}.{kind}"] = turned(
                    ours[f"blocks.{i}.{mine}.{kind}"]
                )
            joined = [ours[f"blocks.{i}.attention.{x}.{kind}"] for x in ("query", "key", "value")]
            theirs[f"transformer.h.{i}.attn.c_attn.{kind}"] = turned(torch.cat(joined))
    return theirs


def named(model: MiniGPT, what: str) -> dict[str, torch.Tensor]:
    return {n: p.grad if what == "grad" else p.detach() for n, p in model.named_parameters()}


def gpt2(config: ModelConfig) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V,
            n_positions=T,
            n_embd=D,
            n_head=H,
            n_inner=F,
            n_layer=L,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


REFERENCES = {
    "gpt2": (GPT2, gpt2, gpt2_names),
    "qwen3": (MODERN, llama_like, llama_names),
    "qwen3, grouped": (
        replace(MODERN, n_heads=6, n_kv_heads=2, d_head=K, rope_base=500.0),
        llama_like,
        llama_names,
    ),
    "llama": (replace(MODERN, qk_norm=False), llama_like, llama_names),
}


# minGPT#120, #128: GPT-2's weights by name.
# transformers#47394: labels shifted twice.
@pytest.mark.parametrize("name", REFERENCES)
def test_the_whole_model_is_that_of_transformers(name):
    config, make_reference, renamed = REFERENCES[name]
    model, theirs = make_model(config), make_reference(config).eval()
    missing, unexpected = theirs.load_state_dict(renamed(named(model, "weight")), strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert unexpected == []
    ids = random_ids(B, T)
    assert_close(model(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    with taught(model):
        assert_close(model(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)

    # Their loss shifts the labels itself: the target of position i is the id at i + 1.
    loss = theirs(ids, labels=ids).loss
    loss.backward()
    nats, count = Objective(model)(ids[:, :-1], ids[:, 1:])
    assert count == B * (T - 1)
    assert_close(nats / count, loss, atol=1e-5, rtol=1e-5)
    (nats / count).backward()
    expected = dict(theirs.named_parameters())
    for parameter, gradient in renamed(named(model, "grad")).items():
        assert_close(gradient, expected[parameter].grad, atol=1e-5, rtol=1e-4)


def test_the_paper_model_is_its_equations():
    """Post-norm, spelt out: LayerNorm(x + Sublayer(x)), embeddings times √D, sines added."""
    model = make_model(PAPER)
    ids = random_ids(B, T)
    x = model.embedding(ids) * math.sqrt(D) + sinusoidal_table(T, D)
    for block in model.blocks:
        part = block.attention
        heads = [
            linear(x).view(B, T, H, K).transpose(1, 2)
            for linear in (part.query, part.key, part.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + part.output(mixed.transpose(1, 2).reshape(B, T, D))
        norm = block.attention_norm
        x = functional.layer_norm(x, (D,), norm.weight, norm.bias, norm.eps)
        x = x + block.feed_forward.narrow(block.feed_forward.widen(x).relu())
        norm = block.feed_forward_norm
        x = functional.layer_norm(x, (D,), norm.weight, norm.bias, norm.eps)
    assert_close(model(ids), x @ model.embedding.weight.T, atol=1e-4, rtol=1e-5)


def whole(model: MiniGPT, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def in_pieces(model: MiniGPT, ids: torch.Tensor) -> torch.Tensor:
    """Read ids in pieces through a cache, and return the logits of all positions."""
    cache = model.new_cache(ids.size(0))
    pieces = ids.split([1, 4, 1, 3, ids.size(1) - 9], dim=1)
    return torch.cat(
        [model.logits(model.hidden(piece, cache), piece, cache) for piece in pieces], dim=1
    )


def piece_by_piece(model: MiniGPT, ids: torch.Tensor) -> torch.Tensor:
    cache = model.new_cache(ids.size(0))
    return torch.stack([model.next_logits(i[:, None], cache) for i in ids.unbind(1)], dim=1)


def next_logits(model: MiniGPT, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after each beginning of ids, read without a cache."""
    return torch.stack([model.next_logits(ids[:, : t + 1]) for t in range(ids.size(1))], dim=1)


PATHS = {
    "fast": (whole, nullcontext),
    "taught": (whole, taught),
    "cached in pieces": (in_pieces, nullcontext),
    "cached in pieces, taught": (in_pieces, taught),
    "cached one by one": (piece_by_piece, nullcontext),
}


# pytorch/tutorials#2478: no causal mask, and a perplexity of 2.9.
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_path_sees_the_future(name, path):
    model, (run, context) = make_model(MODELS[name]), PATHS[path]
    ids = random_ids(B, T)
    with context(model) if context is taught else context():
        before = run(model, ids)
        for t in range(1, T):
            changed = ids.clone()
            changed[:, t:] = (ids[:, t:] + 1 + random_ids(B, T - t, vocab_size=V - 1)) % V
            after = run(model, changed)
            assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=1e-6)
            assert (after[:, t:] - before[:, t:]).abs().amax(-1).min() > 1e-3


# pytorch/tutorials#2478: no causal mask, and a perplexity of 2.9.
@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_comes_from_the_future(name):
    """In training too: what position t scores must not depend on an input after t."""
    model = make_model(replace(MODELS[name], attention_dropout=0.0)).train()
    ids, t = random_ids(1, T), 4
    inputs = []
    handle = model.positions.register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].requires_grad_()) or None
    )
    model.embedding.requires_grad_(False)
    hidden = model.hidden(ids)
    handle.remove()
    (gradient,) = torch.autograd.grad(hidden[:, t].square().sum(), inputs)
    reached = gradient[0].abs().sum(-1) > 0
    assert reached.tolist() == [position <= t for position in range(T)]


# onnx/models#488: one fixed length.
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_all_paths_agree(name):
    model, ids = make_model(MODELS[name]), random_ids(B, T)
    expected = model(ids)
    for run, context in PATHS.values():
        with context(model) if context is taught else context():
            assert_close(run(model, ids), expected, atol=1e-5, rtol=1e-5)
    assert_close(next_logits(model, ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_objective_is_the_cross_entropy_of_the_logits(name):
    model = make_model(MODELS[name])
    ids, targets = random_ids(B, T), random_ids(B, T, seed=3)
    nats, count = Objective(model)(ids, targets)
    assert count == B * T
    logits = model(ids)
    assert logits.shape == (B, T, V)
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert_close(nats, expected, atol=1e-3, rtol=1e-5)
    parameters = dict(model.named_parameters())
    ours = torch.autograd.grad(nats / count, parameters.values())
    theirs = torch.autograd.grad(expected / count, parameters.values())
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=1e-4)


# onnx/models#488: one fixed length.
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_text_is_read_alone(name):
    """The other texts of a batch change nothing."""
    model, ids = make_model(MODELS[name]), random_ids(B, T)
    assert_close(model(ids)[2:3], model(ids[2:3]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_edited_copy_leaves_the_original_as_it_was(name):
    model, ids = make_model(MODELS[name]), random_ids(B, T)
    before = model(ids)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids), before)
    for parameter in twin.parameters():
        parameter.add_(0.3)
    assert torch.equal(model(ids), before)
    assert not torch.equal(twin(ids), before)
    for parameter in model.parameters():
        parameter.zero_()
    assert not torch.equal(twin(ids), torch.zeros_like(before))


@pytest.mark.parametrize("adaptive", [False, True])
def test_tied_tables_are_one_tensor_and_stay_so(adaptive):
    config = ADAPTIVE if adaptive else GPT2
    model = copy.deepcopy(make_model(config)).double()
    if adaptive:
        assert model.output.tables[0] is model.embedding.tables[0]
    else:
        assert model.output.table is model.embedding.weight
    untied = make_model(replace(config, tie_embeddings=False))
    tables = untied.embedding.tables if adaptive else [untied.embedding.weight]
    n_table = sum(table.numel() for table in tables)
    n_tied, n_untied = (sum(p.numel() for p in m.parameters()) for m in (model, untied))
    assert n_untied - n_tied == n_table


@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_model_finds_all_words_about_equally_likely(name):
    torch.manual_seed(1)
    model = MiniGPT(MODELS[name])
    # In evaluation, where a sampled softmax scores all words too.
    nats, count = Objective(model).eval()(random_ids(B, T), random_ids(B, T, seed=3))
    # Nobody can know anything about random targets. Clusters cost more for words that are as
    # frequent as others; beside sines the word that was just read stands out.
    slack = 0.1 if MODELS[name].output == "full" and MODELS[name].position != "sinusoidal" else 4
    assert math.log(V) - 0.1 < nats.item() / count < math.log(V) + slack
    for parameter, tensor in model.named_parameters():
        assert tensor.isfinite().all(), parameter
        if parameter.endswith("bias"):
            assert (tensor == 0).all()
        elif "norm" in parameter:
            assert (tensor == 1).all()


def test_fresh_weights_are_those_of_gpt2():
    config = replace(GPT2, d_model=128, n_heads=4, d_ff=512, n_layers=8, vocab_size=997)
    torch.manual_seed(1)
    weights = dict(MiniGPT(config).named_parameters())
    for name in ("embedding.weight", "blocks.3.attention.query.weight"):
        assert weights[name].std().item() == pytest.approx(0.02, rel=0.03)
    for part in ("attention.output", "feed_forward.narrow"):
        std = weights[f"blocks.3.{part}.weight"].std().item()
        assert std == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.03)


def test_embeddings_are_scaled_beside_sines_alone():
    x = []
    for config in (PAPER, GPT2, MODERN):
        torch.manual_seed(1)
        model = MiniGPT(config)
        model.positions.register_forward_pre_hook(lambda _, args: x.append(args[0]) or None)
        model(random_ids(B, T))
    assert [round(v.std().item(), 2) for v in x] == [1.0, 0.02, 0.02]


@pytest.mark.parametrize("name", ["paper", "gpt2", "modern"])
def test_dropout_works_in_training_alone(name):
    model, ids = make_model(replace(MODELS[name], dropout=0.3)), random_ids(B, T)
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    attention_alone = make_model(replace(MODELS[name], attention_dropout=0.3)).train()
    assert not torch.equal(attention_alone(ids), attention_alone(ids))


def test_edge_dropout_falls_before_the_first_block_and_behind_the_last_and_nowhere_else():
    model = make_model(replace(MODELS["modern"], edge_dropout=0.4)).train()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]) or None)
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append((args[0], out)) or None)
    ids = random_ids(17, T)
    scored = model.states(ids, ids).hidden
    first, *blocks = seen
    for x in (first, scored):
        assert 0.35 < (x == 0).float().mean() < 0.45
    again = [block(x) for block, (x, _) in zip(model.blocks, blocks, strict=True)]
    for mine, (_, out) in zip(again, blocks, strict=True):
        assert torch.equal(mine, out)
    assert (model.eval().states(ids, ids).hidden != 0).all()


def test_a_pointer_reads_the_last_vectors_without_gaps():
    model = make_model(replace(MODELS["sampled"], edge_dropout=0.4)).train()
    seen = []
    model.pointer.register_forward_pre_hook(lambda _, given: seen.extend(given))
    ids = random_ids(17, T)
    states = model.states(ids, ids)
    assert (states.hidden == 0).any()
    assert all((given != 0).all() for given in seen)
    assert len(seen) == 2


@pytest.mark.parametrize("scale", [0.01, 100])
def test_an_embedding_norm_makes_the_size_of_the_table_no_matter(scale):
    """To within norm_eps, which the smallest rows can feel."""
    config = replace(MODELS["modern"], embedding_norm=True, tie_embeddings=False, norm_eps=1e-12)
    model, ids = make_model(config), random_ids(B, T)
    before = model(ids)
    with torch.no_grad():
        model.embedding.weight *= scale
    assert_close(model(ids), before, atol=1e-3, rtol=1e-3)


def test_a_token_shift_adds_a_share_of_the_embedding_before():
    config = replace(MODELS["sampled"], n_layers=1)
    model, ids = make_model(config), random_ids(B, T)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.hidden(ids)
    words = model.embedding_norm(model.embedding(ids))
    assert_close(seen[0][:, 0], words[:, 0])  # a text begins with nothing before it
    assert_close(seen[0][:, 1:], words[:, 1:] + model.token_shift.weight * words[:, :-1])


def test_a_model_with_a_token_shift_begins_as_one_without():
    ids = random_ids(B, T)
    with_shift, without = (
        MiniGPT(replace(MODELS["sampled"], token_shift=shift)).eval() for shift in (True, False)
    )
    without.load_state_dict(with_shift.state_dict(), strict=False)
    assert torch.equal(with_shift(ids), without(ids))


def test_a_cache_that_was_reset_has_no_word_before_the_first():
    model, ids = make_model(MODELS["sampled"]), random_ids(B, T)
    cache = model.new_cache(B)
    model.hidden(random_ids(B, T, seed=5), cache)
    cache.reset()
    assert_close(model.hidden(ids, cache), model.hidden(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["paper", "gpt2", "modern"])
def test_more_ids_than_the_context_are_refused(name):
    model = make_model(MODELS[name])
    with pytest.raises(UserError, match=f"{T + 1} ids are more than context_length {T}"):
        model(random_ids(B, T + 1))
    cache = model.new_cache(B)
    model.hidden(random_ids(B, T - 1), cache)
    assert cache.length == T - 1
    with pytest.raises(UserError, match=f"{T + 1} ids are more"):
        model.next_logits(random_ids(B, 2), cache)
    assert model.next_logits(random_ids(B, 1), cache).shape == (B, V)


def test_a_model_whose_vocabulary_nobody_named_is_refused():
    with pytest.raises(UserError, match="vocab_size is 0"):
        MiniGPT(replace(GPT2, vocab_size=0))


def test_ids_of_another_shape_are_refused():
    model = make_model(MODELS["paper"])
    with pytest.raises(UserError, match=r"ids have shape \(5,\): give \(B, T\)"):
        model(random_ids(5))
