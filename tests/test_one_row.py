"""One row: compiled steps and int8 weights write what the model writes, or nearly."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from minigpt import one_row
from minigpt.config import ModelConfig
from minigpt.decoding import Reader, generate
from minigpt.errors import UserError
from minigpt.model import MiniGPT
from minigpt.one_row import (
    LONG_TEXT,
    Int8Linear,
    RowLinear,
    choose_step,
    compiled_step,
    int8_weights,
)
from minigpt.sampling import Sampling
from writers import CONFIGS, T, V, make_model, random_ids

# What torch.compile imports.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)
SHAPES = [(1, 16), (3, 16), (2, 5, 16), (41, 16)]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def rebuilt(part: Int8Linear) -> torch.Tensor:
    return part.weight * part.scales[:, None]


# Matrices


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 29)])
def test_a_row_or_many_are_a_linear_map(shape, bias):
    torch.manual_seed(1)
    weight, x = torch.randn(29, 16), torch.randn(shape)
    part = RowLinear(weight, bias)
    assert_close(part(x), F.linear(x, weight, bias))
    if x.numel() == 16:
        summed = part._one(x) if bias is None else part._one(x) + bias
        assert_close(summed, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 29)])
def test_a_matrix_in_int8_is_the_matrix_up_to_half_a_step(shape, bias):
    torch.manual_seed(1)
    weight, x = torch.randn(29, 16), torch.randn(shape)
    part = Int8Linear(weight, bias)
    assert part.weight.dtype == torch.int8
    assert ((rebuilt(part) - weight).abs() <= part.scales[:, None] / 2 * 1.0001).all()
    assert_close(part.weight.abs().amax(dim=1), torch.full((29,), 127, dtype=torch.int8))
    assert_close(part(x), F.linear(x, rebuilt(part), bias), atol=1e-5, rtol=1e-5)
    if x.numel() == 16:
        assert_close(part._one(x), F.linear(x, rebuilt(part)), atol=1e-5, rtol=1e-5)


def test_rows_of_zeros_and_of_whole_numbers_are_exact():
    weight = torch.zeros(4, 8)
    weight[2, 3] = -3.5
    part = Int8Linear(weight, None)
    assert_close(rebuilt(part), weight)
    assert part(torch.ones(1, 8)).isfinite().all()


# Models in int8


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_int8_answers_nearly_the_same(name):
    model = make_model(CONFIGS[name]).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = int8_weights(model)
    ids = torch.tensor([random_ids(T)])
    with torch.inference_mode():
        exact, near = model(ids).log_softmax(dim=-1), small(ids).log_softmax(dim=-1)
    assert not torch.equal(exact, near)
    assert float((exact - near).abs().mean()) < 0.05 * float(exact.std())
    for key, value in model.state_dict().items():  # the model itself is as it was
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_writes_with_its_cache_what_it_writes_without(name):
    model, prompt = int8_weights(make_model(CONFIGS[name])), random_ids(7)
    sampling = Sampling(0, max_new_tokens=3 * T)
    cached = list(generate(model, prompt, sampling))
    assert list(generate(model, prompt, sampling, use_cache=False)) == cached
    assert len(cached) == 3 * T
    assert all(0 <= i < V for i in cached)


def test_int8_takes_a_quarter_of_the_bytes_and_shares_the_rest():
    model = make_model(CONFIGS["pointer"])
    small = int8_weights(model)
    parts = [part for part in small.modules() if isinstance(part, Int8Linear)]
    assert len(parts) == 2 * 7 + 1  # query, key, value, output; gate, widen, narrow; the words
    for part in parts:
        assert part.weight.nbytes == part.weight.numel()
        assert part.scales.nbytes == 4 * part.weight.size(0)
    assert small.embedding.weight is model.embedding.weight
    assert small.pointer.sentinel is model.pointer.sentinel
    assert not any(isinstance(part, RowLinear) for part in model.modules())


# Compiled steps


SMALL = ModelConfig(V, T, 16, 2, 0, 8, 24, 1)
COMPILED = {
    "plain": SMALL,
    "pointer": replace(SMALL, pointer=True, token_shift=True, embedding_norm=True, qk_norm=True),
}


@pytest.mark.parametrize("as_int8", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_step_writes_the_same_for_three_windows(name, as_int8, monkeypatch):
    model, prompt = make_model(COMPILED[name]), random_ids(1)
    if as_int8:
        model = int8_weights(model)
    step = compiled_step(model)
    lengths = []

    def counted(ids, cache):
        assert ids.shape == (1, 1)
        lengths.append(cache.length)
        return step(ids, cache)

    for sampling in (Sampling(0, max_new_tokens=3 * T), Sampling(2.0, None, max_new_tokens=3 * T)):
        plain = list(generate(model, prompt, sampling))
        with torch.compiler.set_stance("fail_on_recompile"):  # it is ready when it is given out
            assert list(generate(model, prompt, sampling, step=counted)) == plain
    assert (min(lengths), max(lengths)) == (2, T - 2)
    # All but those where a window begins anew or ends, and the first two.
    assert len(lengths) > 0.6 * 2 * 3 * T


def test_a_compiled_step_is_the_model_to_1e_5():
    model = make_model(COMPILED["pointer"])
    step, ids = compiled_step(model), random_ids(T)
    eager, compiled = Reader(model, 1, use_cache=True), Reader(model, 1, use_cache=True, step=step)
    for n_ids in range(5, T + 1):
        exact = eager.next_logits([ids], n_ids)
        assert_close(compiled.next_logits([ids], n_ids), exact, atol=1e-5, rtol=1e-5)


def test_several_texts_are_never_given_to_the_step():
    model = make_model(COMPILED["plain"])

    def step(*_):
        raise AssertionError

    reader = Reader(model, 2, use_cache=True, step=step)
    for n_ids in (3, 4, 5):
        reader.next_logits([random_ids(5), random_ids(5, seed=2)], n_ids)


def test_compiling_is_for_long_texts_or_on_request(monkeypatch):
    model, said = make_model(COMPILED["plain"]), []
    monkeypatch.setattr(one_row, "compiled_step", lambda _: "compiled")
    assert choose_step("off", model, LONG_TEXT, said.append) is None
    assert choose_step("auto", model, LONG_TEXT - 1, said.append) is None
    assert said == []
    assert choose_step("auto", model, LONG_TEXT, said.append) == "compiled"
    assert choose_step("on", model, 1, said.append) == "compiled"
    assert len(said) == 2
    with pytest.raises(UserError, match="auto, on or off"):
        choose_step("maybe", model, 1, said.append)
    assert all(line.startswith("compiling, which takes ten seconds and more") for line in said)


def test_without_a_compiler_auto_writes_eagerly_and_on_says_what_to_do(monkeypatch):
    def no_compiler(*_, **__):
        def step(*_):
            raise RuntimeError("no C++\ncompiler")

        return step

    monkeypatch.setattr(torch, "compile", no_compiler)
    model, said = make_model(COMPILED["plain"]), []
    assert choose_step("auto", model, LONG_TEXT, said.append) is None
    line = said[-1]
    assert line.startswith("writing eagerly: torch.compile failed (RuntimeError: no C++ compiler)")
    assert "\n" not in line
    with pytest.raises(UserError, match="--compile off"):
        choose_step("on", model, 1, said.append)


def test_the_model_itself_is_left_alone_by_a_compiled_step():
    model = make_model(COMPILED["plain"]).train()
    parts = [type(part) for part in model.modules()]
    compiled_step(model)
    assert isinstance(model, MiniGPT)
    assert model.training
    assert [type(part) for part in model.modules()] == parts
