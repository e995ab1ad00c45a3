"""Neural cache: equal to the paper's sums written out, a probability, and blind to the future."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import minigpt.neural_cache
from minigpt.errors import UserError
from minigpt.evaluate import token_nats
from minigpt.neural_cache import CacheSettings, cache_at_ends, cached_token_nats, fit_cache
from tiny import MODELS, B, LargestTensor, T, V, make_model, random_ids

EOS = 3
SETTINGS = CacheSettings(size=23, flatness=7.0, weight=0.3)


def ids_of(n_ids: int, seed: int = 5, vocab_size: int = V) -> np.ndarray:
    return random_ids(n_ids, seed=seed, vocab_size=vocab_size).numpy().astype(np.uint16)


def rows_at_a_time(monkeypatch, n_rows: int) -> None:
    monkeypatch.setattr(minigpt.neural_cache, "_ROWS", n_rows)


@torch.no_grad()
def by_hand(model, ids, settings, context, stride):
    """Write equations 2 and 3 out: one id, one kept pair at a time, in float64."""
    ids = [int(i) for i in ids]
    kept: list[tuple[torch.Tensor, int]] = []
    nats = []
    for i, target in enumerate(ids):
        begin = 0
        if i >= context:
            begin = context + (i - context) // stride * stride - (context - stride)
        before = [ids[begin - 1] if begin else EOS, *ids[begin:i]]
        hidden = model.hidden(torch.tensor([before]))[0, -1]
        logits = model.next_logits(torch.tensor([before]))[0]
        p = logits.double().softmax(dim=-1)[target].item()
        key = F.normalize(hidden.double(), dim=0)
        recent = kept[-settings.size :]
        strengths = [math.exp(settings.flatness * float(key @ old)) for old, _ in recent]
        if recent:
            found = sum(s for s, (_, word) in zip(strengths, recent, strict=True) if word == target)
            p = (1 - settings.weight) * p + settings.weight * found / sum(strengths)
        nats.append(-math.log(p))
        kept.append((key, target))
    return np.array(nats)


@pytest.mark.parametrize("name", ["modern", "sampled", "adaptive", "paper"])
@pytest.mark.parametrize("stride", [T, 4])
def test_nats_are_those_of_the_equations_written_out(monkeypatch, name, stride):
    rows_at_a_time(monkeypatch, 13)
    model, ids = make_model(MODELS[name]), ids_of(97, vocab_size=19)
    found = cached_token_nats(model, ids, EOS, SETTINGS, context=T, stride=stride)
    assert found.dtype == np.float32
    assert found == pytest.approx(by_hand(model, ids, SETTINGS, T, stride), abs=2e-4)


@pytest.mark.parametrize("name", ["modern", "sampled", "adaptive", "untied, adaptive"])
@pytest.mark.parametrize("n_ids", [1, 2, 37])
def test_the_mixed_probabilities_of_all_words_sum_to_one(name, n_ids):
    model, ids = make_model(MODELS[name]), ids_of(n_ids)
    total = 0.0
    for word in range(V):
        ids[-1] = word  # nothing before it changes
        nats = cached_token_nats(model, ids, EOS, SETTINGS, context=T, stride=4)
        total += math.exp(-nats[-1])
    assert total == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("changed_from", [1, 40, 96])
def test_what_comes_later_changes_nothing_before(changed_from):
    model, ids = make_model(MODELS["modern"]), ids_of(97)
    other = ids.copy()
    other[changed_from:] = ids_of(97, seed=6)[changed_from:]
    nats, others = (cached_token_nats(model, x, EOS, SETTINGS, context=T) for x in (ids, other))
    assert np.array_equal(nats[:changed_from], others[:changed_from])
    assert nats[changed_from] != others[changed_from]


@pytest.mark.parametrize("rows", [3, 256])
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_neither_batches_nor_rows_change_anything(monkeypatch, batch_size, rows):
    model, ids = make_model(MODELS["adaptive"]), ids_of(331, vocab_size=19)
    sizes = {"context": T, "stride": 5}
    expected = cached_token_nats(model, ids, EOS, SETTINGS, **sizes)
    rows_at_a_time(monkeypatch, rows)
    found = cached_token_nats(model, ids, EOS, SETTINGS, **sizes, batch_size=batch_size)
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_cache_of_no_weight_is_the_model():
    model, ids = make_model(MODELS["adaptive"]), ids_of(97)
    settings = replace(SETTINGS, weight=0.0)
    found = cached_token_nats(model, ids, EOS, settings, context=T, stride=4)
    assert np.array_equal(found, token_nats(model, ids, EOS, context=T, stride=4))


def test_the_first_id_is_the_models_own():
    model, ids = make_model(MODELS["modern"]), ids_of(1)
    found = cached_token_nats(model, ids, EOS, SETTINGS, context=T)
    np.testing.assert_allclose(found, token_nats(model, ids, EOS, context=T), rtol=1e-6)


def test_a_flatness_of_zero_counts_words():
    model, ids = make_model(MODELS["gpt2"]), np.array([8, 8, 5, 8, 8, 5, 7], dtype=np.uint16)
    settings = CacheSettings(size=4, flatness=0.0, weight=0.25)
    p = np.exp(-token_nats(model, ids, EOS, context=T))
    shares = [None, 1, 0, 2 / 3, 3 / 4, 1 / 4, 0]
    expected = [p[0], *(0.75 * a + 0.25 * b for a, b in zip(p[1:], shares[1:], strict=True))]
    found = cached_token_nats(model, ids, EOS, settings, context=T)
    assert np.exp(-found) == pytest.approx(np.array(expected), rel=1e-4)


def test_what_the_cache_no_longer_holds_is_forgotten():
    model = make_model(MODELS["modern"])
    ids = ids_of(60, vocab_size=19)
    other = ids.copy()
    other[0] = 77  # neither in the last window nor among the last 23
    nats, others = (
        cached_token_nats(model, x, EOS, SETTINGS, context=5)[-20:] for x in (ids, other)
    )
    assert np.array_equal(nats, others)
    far = replace(SETTINGS, size=60)
    nats, others = (cached_token_nats(model, x, EOS, far, context=5)[-20:] for x in (ids, other))
    assert not np.array_equal(nats, others)


def test_fitting_finds_the_best_of_its_grid(monkeypatch):
    monkeypatch.setattr(minigpt.neural_cache, "_SIZE", 41)
    monkeypatch.setattr(minigpt.neural_cache, "_FLATNESSES", (1.0, 5.0, 13.0))
    monkeypatch.setattr(minigpt.neural_cache, "_WEIGHTS", (0.0, 0.2, 0.4, 0.6))
    model = make_model(MODELS["adaptive"])
    # Each stretch has few words of its own, so the cache is worth much to a model that knows none.
    ids = np.concatenate([ids_of(53, vocab_size=7) + 7 * i for i in range(5)])
    best = fit_cache(model, ids, EOS, context=T, stride=6)
    costs = {}
    for flatness in (1.0, 5.0, 13.0):
        for weight in (0.0, 0.2, 0.4, 0.6):
            settings = CacheSettings(41, flatness, weight)
            nats = cached_token_nats(model, ids, EOS, settings, context=T, stride=6)
            costs[settings] = nats.sum(dtype=np.float64)
    assert best == min(costs, key=costs.__getitem__)
    assert best.weight > 0


def test_where_nothing_comes_back_the_cache_gets_no_weight():
    model, ids = make_model(MODELS["modern"]), np.arange(V, dtype=np.uint16)
    assert fit_cache(model, ids, EOS, context=T).weight == 0


@pytest.mark.parametrize(
    ("flatness", "weight", "ends"),
    [
        (12.0, 0.1, {}),
        (6.0, 0.1, {"flatness": "lowest"}),
        (34.0, 0.1, {"flatness": "highest"}),
        (34.0, 0.6, {"flatness": "highest", "weight": "highest"}),
        (12.0, 0.0, {"weight": "lowest"}),
        (6.0, 0.0, {"weight": "lowest"}),  # nobody listens, so any flatness is as good
    ],
)
def test_settings_at_an_end_of_the_grid_are_named(flatness, weight, ends):
    assert cache_at_ends(CacheSettings(4_000, flatness, weight)) == ends


def test_a_cache_that_would_like_to_be_sharper_says_so(monkeypatch):
    monkeypatch.setattr(minigpt.neural_cache, "_FLATNESSES", (0.0, 0.5, 1.0))
    monkeypatch.setattr(minigpt.neural_cache, "_WEIGHTS", (0.0, 0.2, 0.4))
    model = make_model(MODELS["modern"])
    ids = np.tile(ids_of(2 * T), 9)  # the same places, word for word
    best = fit_cache(model, ids, EOS, context=T)
    assert cache_at_ends(best) == {"flatness": "highest", "weight": "highest"}


def test_float64_is_made_on_the_cpu_alone(monkeypatch):
    """A Mac's graphics chip has none: what comes from the model must first come home."""
    at_home: list[torch.Tensor] = []
    real_cpu, real_double = torch.Tensor.cpu, torch.Tensor.double

    def cpu(tensor):
        at_home.append(real_cpu(tensor))
        return at_home[-1]

    def double(tensor):
        assert any(tensor is known for known in at_home)
        return real_double(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.Tensor, "double", double)
    fit_cache(make_model(MODELS["adaptive"]), ids_of(3 * T), EOS, context=T)
    assert at_home


def test_it_leaves_no_trace():
    model, ids = make_model(replace(MODELS["paper"], dropout=0.5)), ids_of(53)
    expected = cached_token_nats(model, ids, EOS, SETTINGS, context=T)
    model.train()
    assert np.array_equal(cached_token_nats(model, ids, EOS, SETTINGS, context=T), expected)
    assert all(part.training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "cache size is 0: it must be at least 1"),
        ({"flatness": -0.1}, "cache flatness is -0.1: it must be at least 0"),
        ({"flatness": math.nan}, "cache flatness is nan"),
        ({"weight": -0.1}, "cache weight is -0.1"),
        ({"weight": 1.0}, "cache weight is 1.0: it must be at least 0 and less than 1"),
        ({"weight": math.nan}, "cache weight is nan"),
    ],
)
def test_settings_out_of_range_are_a_users_error(change, message):
    with pytest.raises(UserError, match=message):
        replace(SETTINGS, **change)


def test_an_empty_text_is_a_users_error():
    with pytest.raises(UserError, match="empty"):
        fit_cache(make_model(MODELS["gpt2"]), ids_of(0), EOS, context=T)


def test_memory_is_flat_in_the_length_of_the_text(monkeypatch):
    rows_at_a_time(monkeypatch, 13)
    model = make_model(MODELS["adaptive"])
    largest = []
    for n_ids in (6 * T, 24 * T):
        with LargestTensor() as recorded:
            cached_token_nats(model, ids_of(n_ids), EOS, SETTINGS, context=T, batch_size=B)
        largest.append(recorded.numel)
    assert largest[0] == largest[1]
