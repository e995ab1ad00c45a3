"""Scores of heads: exactly what their definitions say, and nothing for what needs no words."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from minigpt import head_scores
from minigpt.attention_maps import attention_maps, recorded
from minigpt.config import TokenizerConfig
from minigpt.errors import UserError
from minigpt.evaluate import token_nats
from minigpt.head_scores import (
    PLACES,
    held_out_windows,
    is_punctuation,
    loss_changes,
    recorded_windows,
    score_relation,
    score_weights,
    sign_test,
    silenced,
    t_quantile,
    window_nats,
)
from minigpt.layers.attention import fast_causal_attention
from minigpt.sentences import (
    Sentence,
    best_fixed_place,
    pronoun_sentences,
    verb_object_sentences,
)
from minigpt.tokenizer import Tokenizer
from tiny import MODELS, MODERN, H, K, L, T, make_model, random_ids

N = 7  # windows
SENTENCES = [*verb_object_sentences(), *pronoun_sentences()]


# --- scores of weights ---


def slow_places(name: str, ids: list[int], signs: list[bool], i: int) -> set[int]:
    """Return the positions that a score counts in row i: the definitions, said once more."""
    back = [j for j in range(i) if ids[j] == ids[i]]
    places = {
        "previous_token": [i - 1],
        "first_token": [0],
        "itself": [i],
        "same_token": back,
        "induction": [j + 1 for j in back if j + 1 < i],
        "punctuation": [j for j in range(i) if signs[j]],
        "long_range": [j for j in range(i + 1) if i - j > max(1, len(ids) // 8)],
    }[name]
    return {j for j in places if 0 <= j <= i}


def slow_score(name: str, weights: Tensor, ids: Tensor, signs: Tensor) -> tuple[float, ...]:
    """Return measured, position-only, even and the number of rows, for weights (N, T, T)."""
    n_windows, size = ids.shape
    total, by_position, even, n_rows = 0.0, 0.0, 0.0, 0
    for w, i in product(range(n_windows), range(size)):
        places = slow_places(name, ids[w].tolist(), signs[w].tolist(), i)
        if not places or len(places) == i + 1:
            continue
        n_rows += 1
        even += len(places) / (i + 1)
        for j in places:
            total += float(weights[w, i, j])
            others = [float(weights[o, i, j]) for o in range(n_windows) if o != w]
            by_position += sum(others) / len(others)
    if not n_rows:
        return math.nan, math.nan, math.nan, 0
    return total / n_rows, by_position / n_rows, even / n_rows, n_rows


def some_weights(n: int, n_layers: int, n_heads: int, size: int) -> Tensor:
    scores = torch.randn(
        n, n_layers, n_heads, size, size, generator=torch.Generator().manual_seed(3)
    )
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    return (3 * scores).masked_fill(hidden, -math.inf).softmax(-1)


def few_ids(n: int, size: int, n_kinds: int = 4) -> tuple[Tensor, Tensor]:
    """Return windows of few kinds of ids, so that they recur, the highest of them punctuation."""
    ids = random_ids(n, size, vocab_size=n_kinds)
    return ids, ids == n_kinds - 1


@pytest.mark.parametrize("size", [2, 11, 37])
def test_scores_are_what_a_slow_count_gives(size: int) -> None:
    weights, (ids, signs) = some_weights(N, L, H, size), few_ids(N, size)
    scores = score_weights(weights, ids, signs)
    assert set(scores) == {*PLACES, "entropy"}
    for name, layer, head in product(PLACES, range(L), range(H)):
        score = scores[name]
        slow = slow_score(name, weights[:, layer, head], ids, signs)
        quick = (score.measured[layer, head], score.position_only[layer, head], score.even)
        np.testing.assert_allclose([*map(float, quick), score.n_rows], slow, atol=1e-6)


def test_entropy_is_that_of_the_maps_beside_that_of_their_average() -> None:
    weights, (ids, signs) = some_weights(N, L, H, T), few_ids(N, T)
    score = score_weights(weights, ids, signs)["entropy"]
    for layer, head in product(range(L), range(H)):
        of_head = weights[:, layer, head]
        average = of_head.mean(0, keepdim=True)
        for maps, value in ((of_head, score.measured), (average, score.position_only)):
            rows = [
                sum(-float(w) * math.log(float(w)) for w in m[i, : i + 1] if w) / math.log(i + 1)
                for m in maps
                for i in range(1, T)
            ]
            assert float(value[layer, head]) == pytest.approx(sum(rows) / len(rows), abs=1e-5)
    assert score.even == 1.0


Pattern = Callable[[list[int], int], set[int]]


def maps_of(pattern: Pattern, ids: Tensor) -> Tensor:
    """Return weights (N, 1, 1, T, T) of a head that looks evenly at the places of a pattern."""
    n_windows, size = ids.shape
    weights = torch.zeros(n_windows, 1, 1, size, size)
    for w, i in product(range(n_windows), range(size)):
        places = sorted(pattern(ids[w].tolist(), i) or {0})
        weights[w, 0, 0, i, places] = 1 / len(places)
    return weights


PURE: dict[str, Pattern] = {
    "previous_token": lambda ids, i: {i - 1} - {-1},
    "first_token": lambda ids, i: {0},
    "itself": lambda ids, i: {i},
    "same_token": lambda ids, i: {j for j in range(i) if ids[j] == ids[i]},
    "induction": lambda ids, i: {j + 1 for j in range(i - 1) if ids[j] == ids[i]},
    "punctuation": lambda ids, i: {j for j in range(i) if ids[j] == 3},
    "long_range": lambda ids, i: set(range(i - max(1, len(ids) // 8))),
}


@pytest.mark.parametrize("name", PURE)
def test_a_pure_head_has_all_of_its_own_score(name: str) -> None:
    ids, signs = few_ids(N, 23)
    scores = score_weights(maps_of(PURE[name], ids), ids, signs)
    assert float(scores[name].measured) == pytest.approx(1.0)
    assert scores[name].even < 0.85
    assert scores[name].n_rows > 50
    # What looks at the first position looks far, for all others; else no head has two full scores.
    for other in PURE.keys() - {name, "long_range"}:
        assert float(scores[other].measured) < 0.99


def test_an_even_head_scores_what_an_even_look_does() -> None:
    ids, signs = few_ids(N, 23)
    even = torch.ones(23, 23).tril()
    weights = (even / even.sum(-1, keepdim=True)).expand(N, 1, 1, 23, 23)
    for score in score_weights(weights, ids, signs).values():
        assert float(score.measured) == pytest.approx(score.even, abs=1e-6)
        assert float(score.position_only) == pytest.approx(score.even, abs=1e-6)


def test_what_comes_from_positions_alone_is_the_same_without_words() -> None:
    """A head that never asks what the words are: all of its score is position."""
    ids, signs = few_ids(N, 23)
    weights = some_weights(1, L, H, 23).expand(N, L, H, 23, 23)
    for score in score_weights(weights, ids, signs).values():
        torch.testing.assert_close(score.position_only, score.measured, atol=1e-6, rtol=0)


def test_without_words_nothing_is_left_of_what_comes_from_them() -> None:
    """Tokens that recur at places of their own in each window: other windows do not know them."""
    size = 16
    ids = torch.arange(N)[:, None] * 100 + torch.arange(size)
    for w in range(N):
        ids[w, 9 + w] = ids[w, w + 1]  # a repetition in another row and column each time
    weights = maps_of(PURE["same_token"], ids)
    score = score_weights(weights, ids, torch.zeros_like(ids, dtype=torch.bool))["same_token"]
    assert float(score.measured) == 1.0
    assert float(score.position_only) == 0.0
    assert score.n_rows == N


def test_a_score_without_rows_is_nan() -> None:
    ids = torch.arange(N * T).view(N, T)
    scores = score_weights(some_weights(N, L, H, T), ids, torch.zeros_like(ids, dtype=torch.bool))
    for name in ("same_token", "induction", "punctuation"):
        assert scores[name].n_rows == 0
        assert math.isnan(scores[name].even)
        assert scores[name].measured.shape == (L, H)
        assert scores[name].measured.isnan().all()
    assert scores["itself"].n_rows == N * (T - 1)


def test_a_score_equals_none_but_itself() -> None:
    """Tensors compared by == give a tensor, which is neither true nor false."""
    model, windows = make_model(MODERN), random_ids(2, T + 1)
    weights, (ids, signs) = some_weights(N, L, H, T), few_ids(N, T)
    for one, other in (
        (loss_changes(model, windows), loss_changes(model, windows)),
        *zip(*(score_weights(weights, ids, signs).values() for _ in range(2)), strict=True),
        [score_relation(model, make_tokenizer("char"), []) for _ in range(2)],
    ):
        assert one == one
        assert one != other


def test_weights_and_windows_must_be_as_many() -> None:
    ids, signs = few_ids(N, T)
    with pytest.raises(ValueError, match="zip"):
        score_weights(some_weights(N - 1, L, H, T), ids, signs)


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_each_window_are_those_of_the_text_alone(name: str) -> None:
    model, ids = make_model(MODELS[name]), random_ids(3, T)
    for weights, window in zip(recorded_windows(model, ids), ids, strict=True):
        alone = attention_maps(model, window.tolist()).weights
        torch.testing.assert_close(weights, alone)


# --- windows and punctuation ---


def test_windows_lie_apart_and_reach_from_end_to_end() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    windows = held_out_windows(ids, 11, 77)
    assert windows.shape == (7, 12)
    assert windows.dtype == torch.int64
    begins = windows[:, 0].tolist()
    assert begins[0] == 0
    assert begins[-1] > 800
    assert all(after - before >= 11 for before, after in pairwise(begins))
    assert torch.equal(windows, windows[:, :1] + torch.arange(12))


@pytest.mark.parametrize(
    ("n_ids", "tokens", "n_windows"),
    [(1000, None, 16), (100, None, 9), (23, None, 2), (1000, 22, 2), (1000, 43, 3), (50, 900, 4)],
)
def test_how_many_windows_there_are(n_ids: int, tokens: int | None, n_windows: int) -> None:
    windows = held_out_windows(np.arange(n_ids), 11, tokens)
    assert len(windows) == n_windows
    assert int(windows.max()) < n_ids
    assert len(set(windows[:, 0].tolist())) == n_windows


@pytest.mark.parametrize(
    ("n_ids", "tokens", "message"),
    [
        (1000, 0, "tokens is 0: give at least 22, two windows"),
        (1000, -5, "tokens is -5: give at least 22"),
        (1000, 21, "tokens is 21: give at least 22"),
        (22, None, "the text has 22 tokens: two windows .* need at least 23"),
        (0, 100, "the text has 0 tokens"),
    ],
)
def test_too_little_text_is_refused(n_ids: int, tokens: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        held_out_windows(np.arange(n_ids), 11, tokens)
    assert "\n" not in str(caught.value)


SIGNS = "it 's 3 @-@ 4 , ( x ) — = é ? <unk> 50 % , \u8bed \u3002"
LINES = [*map(str, SENTENCES), *[SIGNS] * 9]


def make_tokenizer(kind: str) -> Tokenizer:
    size = 300 if kind == "bpe" else 0
    config = TokenizerConfig(kind, size)  # type: ignore[arg-type]
    return Tokenizer.train(config, lambda: iter(LINES))


KINDS = ["basic_english", "wikitext", "bpe", "char"]


@pytest.mark.parametrize("kind", KINDS)
def test_punctuation_is_what_has_neither_letter_nor_digit(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = torch.arange(tokenizer.vocab_size).view(-1, 1)
    signs = is_punctuation(tokenizer, ids)
    assert signs.shape == ids.shape
    found = {piece.strip("␣") for piece in tokenizer.pieces(ids[signs].flatten().tolist())}
    found = {piece for piece in found if not piece.startswith("<0x")}  # a byte, of a sign too
    assert {",", ".", "(", ")", "=", "?", "%"} <= found
    assert ("@-@" in found) == (kind in ("basic_english", "wikitext"))
    assert not any(c.isalnum() or c.isspace() for piece in found for c in piece)
    wordlike = set(tokenizer.pieces(ids[~signs].flatten().tolist()))
    assert {"3", "é"} <= wordlike or kind == "bpe"
    assert "<eos>" in wordlike


def test_no_figure_comes_from_a_model_that_has_diverged() -> None:
    tokenizer, windows = make_tokenizer("wikitext"), random_ids(2, T + 1)
    model = make_model(replace(MODERN, vocab_size=tokenizer.vocab_size, context_length=31))
    with torch.no_grad():
        model.norm.weight[5] = math.nan
    for nats in (window_nats, loss_changes):
        with pytest.raises(UserError, match="the model's loss is not finite: its training has div"):
            nats(model, windows)
    with torch.no_grad():  # torch's fast attention makes 0 of this, so the loss would hide it
        model.blocks[1].attention.key.weight[3, 5] = math.nan
    for read in (
        lambda: list(recorded_windows(model, windows)),
        lambda: score_relation(model, tokenizer, SENTENCES[:3]),
    ):
        with pytest.raises(UserError, match="the model's attention is not finite: its training"):
            read()


# --- heads switched off ---


def test_window_nats_are_doubled_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac's graphics chip has no float64: what comes from the model must first come home."""
    at_home: list[Tensor] = []
    real_cpu, real_double = Tensor.cpu, Tensor.double

    def cpu(tensor: Tensor) -> Tensor:
        at_home.append(real_cpu(tensor))
        return at_home[-1]

    def double(tensor: Tensor) -> Tensor:
        assert any(tensor is known for known in at_home)
        return real_double(tensor)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr(Tensor, "double", double)
    window_nats(make_model(MODELS["gpt2"]), random_ids(2, T + 1))
    assert at_home


@pytest.mark.parametrize("name", MODELS)
def test_window_nats_are_those_of_evaluation(name: str) -> None:
    model, ids = make_model(MODELS[name]), random_ids(3, T + 1)
    for nats, window in zip(window_nats(model, ids), ids.numpy(), strict=True):
        alone = token_nats(model, window[1:], eos_id=int(window[0]), context=T)
        assert float(nats) == pytest.approx(float(alone.mean()), abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_silenced_head_adds_nothing_and_the_others_all(name: str) -> None:
    """Silencing a head is the same as taking its columns out of the output projection."""
    model, ids = make_model(MODELS[name]), random_ids(3, T)
    config = model.config
    for layer, head in product(range(config.n_layers), range(config.n_heads)):
        without = copy.deepcopy(model)
        columns = slice(head * config.d_head, (head + 1) * config.d_head)
        with torch.no_grad():
            without.blocks[layer].attention.output.weight[:, columns] = 0.0
        with silenced(model, layer, head):
            torch.testing.assert_close(model(ids), without(ids), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(model(ids), without(ids), atol=1e-3)


def test_without_its_only_head_attention_adds_its_bias_alone() -> None:
    config = replace(MODELS["gpt2"], n_heads=1, d_head=13, n_layers=1)
    model, ids = make_model(config), random_ids(2, T)
    without = copy.deepcopy(model)
    without.blocks[0].attention.forward = lambda x, *_: without.blocks[
        0
    ].attention.output.bias.expand_as(x)
    with silenced(model, 0, 0):
        torch.testing.assert_close(model(ids), without(ids))


def test_nothing_stays_on_the_model() -> None:
    model = make_model(replace(MODERN, dropout=0.1)).train()
    model.blocks[1].eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    names = [sorted(vars(part)) for part in model.modules()]
    state = torch.get_rng_state()
    windows = random_ids(N, T + 1)
    loss_changes(model, windows)
    list(recorded_windows(model, windows[:, :-1]))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert [sorted(vars(part)) for part in model.modules()] == names
    assert all(block.attention.attend is fast_causal_attention for block in model.blocks)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_inside_restores_the_model_too() -> None:
    model = make_model(MODERN)
    with pytest.raises(RuntimeError, match="boom"), silenced(model, 1, 2):
        raise RuntimeError("boom")
    for layer, head in ((1, H), (L, 0), (-1, 0), (0, -1)):
        with pytest.raises(UserError, match=f"head {layer}.{head} does not exist"):
            silenced(model, layer, head).__enter__()
    assert all(block.attention.attend is fast_causal_attention for block in model.blocks)


def test_silenced_heads_add_up_and_can_be_recorded() -> None:
    model, ids = make_model(MODERN), random_ids(1, T)
    with silenced(model, 0, 0), silenced(model, 0, 1), silenced(model, 0, 2):
        none = model(ids)
    with torch.no_grad():
        without = copy.deepcopy(model)
        without.blocks[0].attention.output.weight.zero_()
        torch.testing.assert_close(none, without(ids), atol=1e-5, rtol=1e-5)
    with recorded(model) as weights, silenced(model, 0, 1):
        model(ids)
    torch.testing.assert_close(weights[0][0], attention_maps(model, ids[0].tolist()).weights[0])


def test_a_compiled_model_is_silenced_as_it_is_written() -> None:
    model, windows = make_model(MODERN), random_ids(2, T + 1)
    expected = loss_changes(model, windows)

    def refuse(*_: object) -> None:
        pytest.fail("compiled")

    for block in model.blocks:
        block.compile(backend=refuse)
    assert torch.equal(loss_changes(model, windows).change, expected.change)
    with silenced(model, 1, 2):
        model(windows[:, 1:])


def test_a_head_that_writes_nothing_is_worth_exactly_nothing() -> None:
    model = make_model(MODERN)
    with torch.no_grad():
        model.blocks[1].attention.output.weight[:, K : 2 * K] = 0.0
    found = loss_changes(model, random_ids(N, T + 1))
    assert found.change.shape == found.error.shape == (L, H)
    assert float(found.change[1, 1]) == 0.0
    assert float(found.error[1, 1]) == 0.0
    assert (found.change != 0).sum() == L * H - 1


def test_changes_are_paired_differences_with_their_error() -> None:
    model, windows = make_model(MODERN), random_ids(N, T + 1)
    found = loss_changes(model, windows)
    whole = [float(n) for n in window_nats(model, windows)]
    assert found.loss == pytest.approx(sum(whole) / N)
    with silenced(model, 1, 2):
        without = [float(n) for n in window_nats(model, windows)]
    differences = [b - a for a, b in zip(whole, without, strict=True)]
    mean = sum(differences) / N
    variance = sum((d - mean) ** 2 for d in differences) / (N - 1)
    assert float(found.change[1, 2]) == pytest.approx(mean)
    assert float(found.error[1, 2]) == pytest.approx(math.sqrt(variance / N))


def test_windows_of_many_passes_are_put_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = make_model(MODERN), random_ids(N, T + 1)
    at_once = window_nats(model, windows)
    monkeypatch.setattr(head_scores, "_IDS_PER_PASS", 2 * T)
    torch.testing.assert_close(window_nats(model, windows), at_once)


# --- relations ---


def slow_relation(
    model: torch.nn.Module, tokenizer: Tokenizer, sentences: list[Sentence]
) -> tuple[Tensor, Tensor]:
    """Return accuracy and of_two, a sentence at a time, each read as a whole."""
    hits, wins = [], []
    for sentence in sentences:
        ids = [tokenizer.eos_id, *tokenizer.encode(str(sentence))]
        # Where each word ends: the ids of a text are the first of a longer one's.
        ends = [
            1 + len(tokenizer.encode(" ".join(sentence.words[:n])))
            for n in range(len(sentence.words) + 1)
        ]
        weights = attention_maps(model, ids).weights  # type: ignore[arg-type]
        row = weights[:, :, ends[sentence.looker + 1] - 1]
        words = torch.stack(
            [row[..., ends[n] : ends[n + 1]].sum(-1) for n in range(sentence.looker)], dim=-1
        )
        hits.append(words.argmax(-1) == sentence.target)
        wins.append(words[..., sentence.target] > words[..., sentence.rival])
    return torch.stack(hits).double().mean(0), torch.stack(wins).double().mean(0)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("wikitext", name) for name in MODELS), *((k, "paper") for k in KINDS)]
)
def test_relations_are_what_a_slow_count_gives(kind: str, name: str) -> None:
    tokenizer = make_tokenizer(kind)
    config = replace(MODELS[name], vocab_size=tokenizer.vocab_size, context_length=131)
    model, sentences = make_model(config), SENTENCES[::7]
    found = score_relation(model, tokenizer, sentences)
    accuracy, of_two = slow_relation(model, tokenizer, sentences)
    # Sums of float32 in another order may settle a close race the other way, in one sentence.
    assert (found.accuracy - accuracy).abs().max() < 1.5 / len(sentences)
    assert (found.of_two - of_two).abs().max() < 1.5 / len(sentences)
    assert (found.accuracy - accuracy).abs().mean() < 0.2 / len(sentences)
    assert (found.n_sentences, found.n_skipped) == (len(sentences), 0)
    assert found.accuracy.max() > 0
    assert found.fixed_place == best_fixed_place(sentences).name
    assert all(block.attention.attend is fast_causal_attention for block in model.blocks)


def test_sentences_that_cannot_be_read_are_left_out_and_counted() -> None:
    tokenizer = Tokenizer.train(
        TokenizerConfig("wikitext", 0), lambda: (s for s in LINES if "letter" not in s)
    )
    config = replace(MODERN, vocab_size=tokenizer.vocab_size, context_length=17)
    found = score_relation(make_model(config), tokenizer, SENTENCES)
    readable = [
        s for s in SENTENCES if s.looker + 2 <= 17 and not {"letter", "letters"} & {*s.words}
    ]
    known = [s for s in readable if tokenizer.unk_id not in tokenizer.encode(str(s))]
    assert found.n_sentences == len(known) > 50
    assert found.n_skipped == 200 - len(known)
    none = score_relation(make_model(replace(config, context_length=2)), tokenizer, SENTENCES)
    assert (none.n_sentences, none.n_skipped) == (0, 200)
    assert none.accuracy.shape == none.of_two.shape == (L, H)
    assert none.accuracy.isnan().all()
    assert math.isnan(none.fixed_accuracy)
    assert (none.p_place == 1).all()
    assert (none.p_rival == 1).all()


def look_by(rule: Callable[[Sentence], int | None]) -> Callable[..., Iterator[Tensor]]:
    """Return a stand-in for the model's rows: all weight on one word, or on all alike."""

    def rows(model: object, texts: list[list[int]], padding: int) -> Iterator[Tensor]:
        assert len(texts) == 100
        for sentence, text in zip(SENTENCES[100:], texts, strict=True):
            row = torch.full((L, H, len(text)), 1 / len(text))
            place = rule(sentence)
            if place is not None:
                row[:] = 0.0
                row[..., 0] = 0.6  # <eos> takes most, and does not count
                row[..., 1 + place] = 0.4
            yield row

    return rows


@pytest.mark.parametrize(
    ("rule", "accuracy", "of_two", "beats_place", "beats_rival"),
    [
        (lambda s: s.target, 1.0, 1.0, True, True),
        (lambda s: s.rival, 0.0, 0.0, False, False),
        (lambda s: max(s.target, s.rival), 0.5, 0.5, True, False),
        (lambda s: min(s.target, s.rival), 0.5, 0.5, True, False),
        (lambda s: 1, 0.26, 0.5, False, False),
        (lambda s: None, 0.0, 0.5, False, False),
    ],
    ids=["antecedent", "rival", "nearer noun", "first noun", "second word", "all alike"],
)
def test_only_who_tells_the_nouns_apart_tracks_them(
    monkeypatch: pytest.MonkeyPatch,
    rule: Callable[[Sentence], int | None],
    accuracy: float,
    of_two: float,
    beats_place: bool,
    beats_rival: bool,
) -> None:
    tokenizer = make_tokenizer("wikitext")
    config = replace(MODERN, vocab_size=tokenizer.vocab_size, context_length=31)
    monkeypatch.setattr(head_scores, "_last_rows", look_by(rule))
    found = score_relation(make_model(config), tokenizer, SENTENCES[100:])
    torch.testing.assert_close(found.accuracy, torch.full((L, H), accuracy, dtype=torch.float64))
    torch.testing.assert_close(found.of_two, torch.full((L, H), of_two, dtype=torch.float64))
    assert found.fixed_accuracy == 0.26
    assert bool((found.p_place < 0.01).all()) == beats_place
    assert bool((found.p_rival < 0.01).all()) == beats_rival


def test_the_sign_test_counts_the_tosses() -> None:
    for wins, losses in [(0, 0), (1, 0), (0, 3), (4, 2), (5, 5), (9, 1)]:
        n = wins + losses
        as_good = sum(sum(tosses) >= wins for tosses in product([0, 1], repeat=n))
        assert float(sign_test(torch.tensor(wins), torch.tensor(losses))) == as_good / 2**n
    assert sign_test(torch.zeros(L, H, dtype=torch.long), torch.ones(L, H).long()).shape == (L, H)


@pytest.mark.parametrize("n_windows", [*range(2, 19), 41, 1000])
def test_students_t_lies_within_in_95_of_100(n_windows: int) -> None:
    freedom, most = n_windows - 1, t_quantile(n_windows)
    t = torch.linspace(-most, most, 200_001, dtype=torch.float64)
    density = (1 + t**2 / freedom) ** (-n_windows / 2) / math.sqrt(freedom * math.pi)
    scale = math.exp(math.lgamma(n_windows / 2) - math.lgamma(freedom / 2))
    assert float(torch.trapezoid(density, t)) * scale == pytest.approx(0.95, abs=1e-4)
