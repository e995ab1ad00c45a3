"""Evaluation: every target scored exactly once, whatever the batch size, and nothing disturbed."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import minigpt.output
from minigpt.data import TokenStream
from minigpt.errors import UserError
from minigpt.evaluate import Score, evaluate, evaluating, nats_by_context, token_nats, windows
from tiny import MODELS, B, LargestTensor, T, V, make_model, random_ids

EOS = 3
N = 97


def stream_of(n_ids: int = N, seed: int = 5) -> TokenStream:
    ids = random_ids(n_ids, seed=seed).numpy().astype(np.uint16)
    return TokenStream(
        ids=ids, n_words=53, n_bytes=211, n_unknown=0, n_eos=0, sha256="", vocab_size=V
    )


def by_hand(model, ids, context, stride):
    """Score each id in a forward pass of its own."""
    nats = []
    for i in range(len(ids)):
        begin = 0
        if i >= context:
            begin = context + (i - context) // stride * stride - (context - stride)
        before = [int(ids[begin - 1]) if begin else EOS, *map(int, ids[begin:i])]
        log_probs = model(torch.tensor([before]))[0, -1].log_softmax(-1)
        nats.append(-log_probs[int(ids[i])].item())
    return np.array(nats)


# build-nanogpt#41: a length that batch × context does not divide.
@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 199), context=st.integers(1, 23), data=st.data())
def test_windows_score_every_id_once_from_left_to_right(n, context, data):
    stride = data.draw(st.integers(1, context))
    found = list(windows(n, context, stride))
    scored = [i for window in found for i in range(window.scored_from, window.end)]
    assert scored == list(range(n))
    for window in found:
        assert 0 <= window.begin <= window.scored_from < window.end
        assert window.end - window.begin <= context
        # Nothing but the beginning of the text is scored with less to look back at.
        assert window.begin == 0 or window.scored_from - window.begin == context - stride


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 61),
    context=st.integers(1, T),
    batch_size=st.integers(1, 7),
    data=st.data(),
)
@torch.no_grad()
def test_nats_are_those_of_one_pass_per_id(n, context, batch_size, data):
    stride = data.draw(st.integers(1, context))
    model, ids = make_model(MODELS["gpt2"]), stream_of(n).ids
    found = token_nats(model, ids, EOS, context=context, stride=stride, batch_size=batch_size)
    assert found.shape == (n,)
    assert found == pytest.approx(by_hand(model, ids, context, stride), abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_score_is_that_of_the_plain_computation(name):
    model, stream = make_model(MODELS[name]), stream_of()
    score = evaluate(model, stream, EOS)
    ids = torch.from_numpy(stream.ids.astype(np.int64))
    nats = 0.0
    for targets in ids.split(T):
        start = int(targets.data_ptr() - ids.data_ptr()) // 8
        first = ids[start - 1 : start] if start else torch.tensor([EOS])
        inputs = torch.cat((first, targets[:-1]))
        log_probs = model(inputs[None])[0].double().log_softmax(-1)
        nats -= log_probs.gather(1, targets[:, None]).sum().item()
    assert score.nats == pytest.approx(nats, rel=1e-6)
    assert (score.tokens, score.words, score.bytes) == (N, 53, 211)


@pytest.mark.parametrize("stride", [T, 4, 1])
@pytest.mark.parametrize("name", ["paper", "adaptive"])
def test_the_batch_size_changes_nothing(name, stride):
    """Losses and perplexities of others depend on it (nanochat#286, mlx-lm#1855)."""
    model, stream = make_model(MODELS[name]), stream_of(331)
    scores = [
        evaluate(model, stream, EOS, stride=stride, batch_size=size) for size in (1, 2, 7, 8, 16)
    ]
    alone = scores[0]
    assert [score.nats for score in scores] == pytest.approx([alone.nats] * 5, rel=1e-6)
    perplexities = [score.token_perplexity for score in scores]
    assert perplexities == pytest.approx([alone.token_perplexity] * 5, rel=1e-6)


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 199), context=st.integers(1, 23), data=st.data())
def test_nats_are_shared_out_by_their_place_in_a_window(n, context, data):
    stride = data.draw(st.integers(1, context))
    nats = np.random.default_rng(n).random(n, dtype=np.float32)
    sums, counts = nats_by_context(nats, context=context, stride=stride)
    expected_sums, expected_counts = np.zeros(context), np.zeros(context, dtype=int)
    for window in windows(n, context, stride):
        for i in range(window.scored_from, window.end):
            expected_sums[i - window.begin] += nats[i]
            expected_counts[i - window.begin] += 1
    assert sums == pytest.approx(expected_sums, rel=1e-6)
    assert counts.tolist() == expected_counts.tolist()


def test_a_shorter_stride_is_another_figure_after_the_first_window():
    model, ids = make_model(MODELS["modern"]), stream_of().ids
    disjoint = token_nats(model, ids, EOS, context=T)
    assert np.array_equal(disjoint, token_nats(model, ids, EOS, context=T, stride=T))
    half = token_nats(model, ids, EOS, context=T, stride=5)
    assert half[:T] == pytest.approx(disjoint[:T], abs=1e-5)
    assert np.abs(half[T:] - disjoint[T:]).max() > 0.1
    short = token_nats(model, ids, EOS, context=4)
    assert short[:4] == pytest.approx(disjoint[:4], abs=1e-5)
    assert abs(short[4] - disjoint[4]) > 1e-3


def test_the_first_id_is_conditioned_on_eos():
    model, ids = make_model(MODELS["modern"]), stream_of().ids
    first, other = (token_nats(model, ids, eos, context=T) for eos in (EOS, EOS + 1))
    assert first[0] != other[0]
    assert np.array_equal(first[T:], other[T:])


def test_evaluating_twice_gives_the_same_and_leaves_no_trace():
    model, stream = (
        make_model(replace(MODELS["paper"], dropout=0.5, attention_dropout=0.5)),
        stream_of(),
    )
    expected = evaluate(model, stream, EOS)
    model.train()
    model.blocks[1].eval()  # a part that its owner has frozen stays so
    modes = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    assert evaluate(model, stream, EOS) == evaluate(model, stream, EOS) == expected
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_modes_are_restored_when_something_breaks():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()

    def broken():
        with evaluating(model):
            assert not any(part.training for part in model.modules())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert [part.training for part in model.modules()] == [True, True, False]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 0}, "context is 0"),
        ({"context": -1}, "context is -1"),
        ({"context": T + 1}, f"context is {T + 1}: it must lie between 1 and the model's {T}"),
        ({"stride": 0}, f"stride is 0: it must lie between 1 and the context {T}"),
        ({"stride": -2}, "stride is -2"),
        ({"stride": T + 1}, f"stride is {T + 1}"),
        ({"context": 5, "stride": 6}, "stride is 6: it must lie between 1 and the context 5"),
        ({"batch_size": 0}, "batch size is 0"),
    ],
)
def test_sizes_out_of_range_are_a_users_error(sizes, message):
    with pytest.raises(UserError, match=message):
        evaluate(make_model(MODELS["gpt2"]), stream_of(), EOS, **sizes)


def test_an_empty_text_is_a_users_error():
    with pytest.raises(UserError, match="empty"):
        evaluate(make_model(MODELS["gpt2"]), stream_of(0), EOS)


@torch.no_grad()
def test_a_text_of_one_token_has_a_score():
    model, stream = make_model(MODELS["adaptive"]), stream_of(1)
    expected = -model(torch.tensor([[EOS]]))[0, 0, int(stream.ids[0])].item()
    assert evaluate(model, stream, EOS).nats == pytest.approx(expected, abs=1e-5)


# transformers#8476: all logits were kept.
@pytest.mark.parametrize("name", ["gpt2", "adaptive"])
def test_memory_is_flat_in_the_length_of_the_text(monkeypatch, name):
    monkeypatch.setattr(minigpt.output, "LOGITS_PER_CHUNK", 4 * V)
    model = make_model(MODELS[name])
    largest = []
    for n_ids in (7 * T, 70 * T):
        with LargestTensor() as recorded:
            evaluate(model, stream_of(n_ids), EOS, batch_size=B)
        largest.append(recorded.numel)
    assert largest[0] == largest[1] < B * T * V


def test_a_score_is_spelt_in_every_unit():
    score = Score(nats=60 * math.log(7), tokens=60, words=30, bytes=240)
    assert score.loss == pytest.approx(math.log(7))
    assert score.token_perplexity == pytest.approx(7)
    assert score.word_perplexity == pytest.approx(49)
    assert score.bits_per_byte == pytest.approx(60 * math.log2(7) / 240)
    assert Score(nats=1e6, tokens=1, words=1, bytes=1).token_perplexity == math.inf


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = make_model(MODELS["gpt2"])
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert evaluate(model, stream_of(), EOS).token_perplexity == pytest.approx(V, rel=1e-5)
