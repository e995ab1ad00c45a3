"""The loop that writes ids: what it reads, what it draws, and that company changes nothing."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from minigpt.beams import beam_search
from minigpt.config import load_preset, preset_names
from minigpt.decoding import BY_LENGTH, BY_TOKEN, PIECE, Reader, generate, window_start, write
from minigpt.errors import UserError
from minigpt.filters import Text, TokenRules
from minigpt.sampling import Sampling
from writers import CONFIGS, GREEDY, T, V, make_even, make_model, random_ids


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# The window


@given(n_ids=st.integers(1, 2000), context=st.integers(1, 97))
def test_the_window_begins_at_the_first_stride_that_fits(n_ids, context):
    stride = context - context // 2
    start = window_start(n_ids, context)
    assert start % stride == 0
    assert 1 <= n_ids - start <= context
    assert start == 0 or n_ids - (start - stride) > context


# x-transformers#219, transformers#18104: another text with the cache on.
@pytest.mark.parametrize("n_prompt", [1, T - 1, T, T + 1, 3 * T])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_is_uncached_for_300_tokens(name, n_prompt):
    # In float64, so that no two words lie closer together than the rounding of the two ways.
    model, prompt = make_model(CONFIGS[name]).double(), random_ids(n_prompt)
    for sampling in (Sampling(0, max_new_tokens=41), Sampling(3.0, None, max_new_tokens=300)):
        cached = list(generate(model, prompt, sampling))
        assert list(generate(model, prompt, sampling, use_cache=False)) == cached
    assert len(cached) == 300
    assert len(set(cached)) > 30


# x-transformers#219, transformers#18104: another text with the cache on.
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_writes_with_its_cache_what_it_writes_without(name):
    sizes = {"vocab_size": V, "d_model": 32, "n_heads": 2, "d_head": 0, "d_ff": 40, "n_layers": 2}
    config = replace(load_preset(name).model, context_length=T, cutoffs=(29, 61), **sizes)
    model, prompt = make_model(config), random_ids(5)
    for sampling in (Sampling(0), Sampling(3.0, None)):
        long = replace(sampling, max_new_tokens=3 * T)
        cached = list(generate(model, prompt, long))
        assert list(generate(model, prompt, long, use_cache=False)) == cached
        with_cache, without = (Reader(model, 1, use_cache=kept) for kept in (True, False))
        text = prompt + cached
        for n_ids in range(5, len(text)):
            exact = without.next_logits([text], n_ids)
            assert_close(with_cache.next_logits([text], n_ids), exact, atol=1e-5, rtol=1e-5)


# gpt-2#121: an index error past the context.
# LLMs-from-scratch#925: wrong at the edge of the window.
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("n_prompt", [T - 1, T, T + 1, 3 * T])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_each_id_is_the_choice_of_the_masked_model_that_reads_the_window(name, n_prompt, use_cache):
    model, prompt = make_model(CONFIGS[name]).eval(), random_ids(n_prompt)
    ids = list(prompt)
    for next_id in generate(model, prompt, GREEDY, use_cache=use_cache):
        window = torch.tensor([ids[window_start(len(ids), T) :]])
        assert next_id == int(model(window)[0, -1].argmax())
        ids.append(next_id)


# pytorch/tutorials#2478: no causal mask, and a perplexity of 2.9.
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_id_depends_on_later_ones(name, use_cache):
    """Trained with a mask, generates without: one pass over the whole would tell another story."""
    model, text = make_model(CONFIGS[name]).eval(), random_ids(T)
    in_one_pass = model(torch.tensor([text]))[0].argmax(-1).tolist()
    one = Sampling(0, max_new_tokens=1)
    for t in range(1, T + 1):
        assert next(generate(model, text[:t], one, use_cache=use_cache)) == in_one_pass[t - 1]


def test_going_on_is_going_on():
    model, prompt = make_model(), random_ids(7)
    whole = list(generate(model, prompt, Sampling(0, max_new_tokens=41)))
    first = list(generate(model, prompt, Sampling(0, max_new_tokens=30)))
    rest = list(generate(model, prompt + first, Sampling(0, max_new_tokens=11)))
    assert first + rest == whole


def test_only_the_last_position_gets_logits():
    model, shapes = make_model(), []
    model.output.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
    list(generate(model, random_ids(11), Sampling(max_new_tokens=2)))
    assert shapes == [(1, 1, 22), (1, 1, 22)]


def test_each_position_is_read_once_while_the_window_lasts():
    model, lengths = make_model(), []
    model.embedding.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].size(1)))
    list(generate(model, random_ids(T - 2), Sampling(max_new_tokens=5)))
    # Two more fit; then the newest half, 9 of 18 ids, is read again.
    assert lengths == [T - 2, 1, 1, T + 1 - (T - T // 2), 1]


# Chance and modes


# pytorch/examples#829: always the same text.
def test_the_seed_alone_decides():
    model, prompt = make_model(), random_ids(3)
    draw = lambda seed: list(generate(model, prompt, Sampling(1.0, seed=seed)))  # noqa: E731
    torch.manual_seed(5)
    first = draw(1)
    torch.manual_seed(6)
    assert draw(1) == first
    assert draw(2) != first


def test_the_global_generator_is_not_touched():
    model = make_model().train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    list(generate(model, random_ids(3), Sampling(1.0)))
    assert torch.equal(torch.get_rng_state(), before)


# minGPT#10: top-k filled with a small positive number.
def test_top_1_is_greedy_also_among_equals():
    model, prompt = make_model(), random_ids(5)
    greedy = list(generate(model, prompt, GREEDY))
    for seed in range(3):
        sampling = Sampling(1.9, top_k=1, seed=seed, max_new_tokens=T)
        assert list(generate(model, prompt, sampling)) == greedy
    make_even(model)
    assert list(generate(model, prompt, Sampling(1.9, top_k=1, max_new_tokens=5))) == [0] * 5


# minGPT#10: top-k filled with a small positive number.
@torch.no_grad()
def test_nothing_beyond_the_top_k_is_drawn_however_hot():
    model, ids = make_model().eval(), random_ids(2)
    for next_id in generate(model, ids, Sampling(99.0, top_k=3, max_new_tokens=T - 2)):
        assert next_id in model(torch.tensor([ids]))[0, -1].topk(3).indices
        ids = [*ids, next_id]


# pytorch/examples#114: dropout on while generating.
def test_dropout_is_off_and_the_mode_is_as_it_was():
    model, prompt = make_model(), random_ids(5)
    expected = list(generate(model.eval(), prompt, GREEDY))
    model.train()
    model.blocks[1].eval()  # someone froze a block
    modes = [part.training for part in model.modules()]
    iterator = generate(model, prompt, GREEDY)
    seen = []
    for next_id in iterator:
        seen.append(next_id)
        assert [part.training for part in model.modules()] == modes
        assert not torch.is_inference_mode_enabled()
    assert seen == expected


def test_an_abandoned_iterator_leaves_no_trace():
    model = make_model().train()
    modes = [part.training for part in model.modules()]
    next(generate(model, random_ids(5)))
    kept = generate(model, random_ids(5))
    next(kept)
    assert [part.training for part in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_still_learns_after_it_wrote(name):
    model = make_model(CONFIGS[name])
    list(generate(model, random_ids(2 * T)))
    model.train()(torch.tensor([random_ids(T)])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_compiled_model_is_not_compiled_again_for_each_length():
    model, prompt = make_model(), random_ids(5)
    expected = list(generate(model, prompt, GREEDY))

    def refuse(*_):
        pytest.fail("compiled")

    for block in model.blocks:
        block.compile(backend=refuse)
    assert list(generate(model, prompt, GREEDY)) == expected


# Ends and errors


# nanoGPT#196: did not stop at the end token, or printed it.
def test_a_stop_id_ends_the_text_and_is_not_part_of_it():
    model, prompt = make_model(), random_ids(5)
    free = list(generate(model, prompt, GREEDY))
    stop = next(i for i in free if i != free[0])
    assert list(generate(model, prompt, GREEDY, stop_ids=[stop])) == free[: free.index(stop)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(2.0, None, max_new_tokens=97)])
def test_banned_ids_are_never_drawn(sampling):
    model, prompt = make_model(), random_ids(5)
    banned = set(list(generate(model, prompt, sampling))[:11])
    assert not banned & set(generate(model, prompt, sampling, banned=banned))


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, "the prompt has no ids"),
        ([3, V], {}, rf"prompt ids \[{V}\] lie outside"),
        ([-1], {}, r"prompt ids \[-1\] lie outside"),
        ([3], {"banned": [V + 1]}, r"banned ids \[90\] lie outside"),
        ([3], {"stop_ids": [-2]}, r"stop ids \[-2\] lie outside"),
        ([3], {"banned": range(V)}, f"all {V} ids are banned"),
    ],
)
def test_what_cannot_be_generated_is_told_at_once(prompt, more, message):
    with pytest.raises(UserError, match=message):
        generate(make_model(), prompt, **more)


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY])
def test_a_diverged_model_is_a_users_mistake_and_no_crash(sampling):
    model = make_model().train()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        list(generate(model, [3], sampling))
    assert model.training


# Several at once


# transformers#17490: padding changed the logits.
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_of_unequal_length_are_written_as_if_alone(name, use_cache):
    model = make_model(CONFIGS[name]).double()
    prompts = [random_ids(n, seed=n) for n in (5, 1, T, 2 * T + 3, 5, T - 1)]
    for sampling in (Sampling(0, max_new_tokens=41), Sampling(3.0, None, max_new_tokens=53)):
        texts = [Text.of(prompt) for prompt in prompts]
        for grown in write(model, texts, sampling, use_cache=use_cache):
            assert all(row < len(texts) for row in grown)
        for text, prompt in zip(texts, prompts, strict=True):
            assert text.new_ids == list(generate(model, prompt, sampling))
            assert text.ended == BY_LENGTH


def test_one_that_has_ended_does_not_stop_the_others():
    model = make_model().double()
    ends = set(range(0, V, 11))
    alone = [
        list(
            generate(
                model,
                random_ids(5, n),
                Sampling(3.0, None, seed=n, max_new_tokens=23),
                stop_ids=ends,
            )
        )
        for n in range(7)
    ]
    assert len({len(ids) for ids in alone}) > 3
    texts = [Text.of(random_ids(5, n), n) for n in range(7)]
    sampling = Sampling(3.0, None, seed=0, max_new_tokens=23)
    for _ in write(model, texts, sampling, TokenRules(ends=ends)):
        pass
    assert [text.new_ids for text in texts] == alone
    reasons = [BY_LENGTH if len(ids) == 23 else BY_TOKEN for ids in alone]
    assert [text.ended for text in texts] == reasons


def test_several_samples_read_their_prompt_once_and_part_there():
    model, shapes = make_model(CONFIGS["pointer"]).double(), []
    model.embedding.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
    prompt = random_ids(9)
    texts = [Text.of(prompt, sample) for sample in range(3)]
    for _ in write(model, texts, Sampling(2.0, None, seed=5, max_new_tokens=23)):
        pass
    assert shapes[:3] == [(1, 9), (3, 1), (3, 1)]
    for sample, text in enumerate(texts):
        sampling = Sampling(2.0, None, seed=5 + sample, max_new_tokens=23)
        assert text.new_ids == list(generate(model, prompt, sampling))
    assert len({tuple(text.new_ids) for text in texts}) == 3


def test_whoever_looks_on_may_end_a_text():
    model, texts = make_model(), [Text.of([3]), Text.of([4])]
    for rows in write(model, texts, GREEDY):
        if texts[0].n_new == 2:
            texts[0].ended = "enough"
        assert 1 in rows
    assert [text.n_new for text in texts] == [2, T]


def test_log_probs_are_those_of_the_model_before_any_filter():
    model, text = make_model(CONFIGS["pointer"]).eval(), Text.of(random_ids(4))
    for _ in write(model, [text], Sampling(0.3, 3, max_new_tokens=T - 4), TokenRules(banned=[1])):
        pass
    log_probs = model(torch.tensor([text.ids]))[0].log_softmax(-1)
    expected = [log_probs[t - 1, text.ids[t]].item() for t in range(4, T)]
    assert text.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    model, prompt = make_model().double(), random_ids(T)
    expected = list(generate(model, prompt, GREEDY))
    monkeypatch.setattr("minigpt.decoding.PIECE", 5)
    lengths = []
    model.embedding.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].size(1)))
    assert list(generate(model, prompt, GREEDY)) == expected
    assert lengths[:4] == [5, 5, 5, 2]
    assert PIECE >= 128


def test_a_text_has_at_least_as_many_ids_as_are_asked_for():
    model = make_model()
    make_even(model)
    sampling = Sampling(1.0, None, max_new_tokens=60, min_new_tokens=20)
    ends = range(0, V, 2)  # half of all ids
    lengths = [
        len(list(generate(model, [1], Sampling(1.0, None, seed=seed), stop_ids=ends)))
        for seed in range(5)
    ]
    assert max(lengths) < 20
    for seed in range(5):
        text = Text.of([1], seed)
        for _ in write(model, [text], sampling, TokenRules(ends=ends)):
            pass
        assert 20 <= text.n_new < 60
        assert all(i % 2 for i in text.new_ids)


# Beams


def test_all_beams_find_what_enumeration_finds():
    model, prompt, end = make_model(), [3, 1], 5
    log_probs = lambda ids: model.eval()(torch.tensor([ids]))[0, -1].log_softmax(-1)  # noqa: E731
    some = [0, 2, 5, 7]
    banned = sorted(set(range(V)) - set(some))
    found = []
    for n in (1, 2, 3):
        for ids in itertools.product(some, repeat=n):
            ends = ids[-1] == end
            if end in ids[:-1] or (n < 3 and not ends):
                continue
            total = sum(log_probs([*prompt, *ids[:i]])[ids[i]].item() for i in range(n))
            score = total / ((5 + n) / 6) ** 0.6
            found.append((not ends, -score, list(ids[:-1] if ends else ids)))
    found.sort()
    beams = beam_search(
        model,
        prompt,
        Sampling(max_new_tokens=3),
        TokenRules(banned=banned, ends=[end]),
        n_beams=4**3,
    )
    assert [text.new_ids for text, _ in beams] == [ids for _, _, ids in found]
    assert [score for _, score in beams] == pytest.approx([-s for _, s, _ in found], abs=1e-4)
    for text, _ in beams:
        assert len(text.log_probs) == len(text.new_ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_beam_is_greedy(name):
    model, prompt = make_model(CONFIGS[name]), random_ids(T - 3)
    ((text, score),) = beam_search(model, prompt, Sampling(max_new_tokens=23), n_beams=1)
    assert text.new_ids == list(generate(model, prompt, Sampling(0, max_new_tokens=23)))
    assert score == pytest.approx(sum(text.log_probs) / (28 / 6) ** 0.6)


def test_more_beams_find_likelier_texts():
    gained = []
    for seed in range(5):
        model, prompt = make_model(CONFIGS["pointer"], seed), random_ids(5, seed)
        scores = [
            beam_search(model, prompt, Sampling(max_new_tokens=9), n_beams=n, length_penalty=0.0)[
                0
            ][1]
            for n in (1, 4, 16)
        ]
        gained.append(scores[2] - scores[0])
    assert sum(gained) > 0.5


def test_filters_hold_for_beams_too():
    model, prompt = make_model(), random_ids(5)
    sampling = Sampling(max_new_tokens=40, no_repeat_ngram=2)
    for text, _ in beam_search(model, prompt, sampling, n_beams=3):
        pairs = list(itertools.pairwise(text.ids))
        assert len(set(pairs[4:])) == len(pairs[4:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_beams": 0}, "n_beams is 0: it must lie between 1 and 1,024"),
        ({"n_beams": 10**9}, "n_beams is 1000000000"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
    ],
)
def test_beams_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        beam_search(make_model(), [3], **options)
