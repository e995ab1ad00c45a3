"""The loop that writes text: what it reads, what it draws, what it lets out."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minigpt.config import ModelConfig, TokenizerConfig, UserError
from minigpt.generate import (
    Sampling,
    ban,
    choose,
    decoded,
    filters_of,
    generate,
    generate_text,
    keep_top_k,
    keep_top_p,
    samples,
    scale,
    until,
    window_start,
)
from minigpt.model import MiniGPT
from minigpt.tokenizer import Tokenizer

B, T, H, K, F, V = 5, 17, 3, 14, 31, 89  # T is the context
SINES = ModelConfig(
    vocab_size=V,
    context_length=T,
    d_model=22,
    n_heads=H,
    d_head=K,
    d_ff=F,
    n_layers=2,
    position="sinusoidal",
    norm="layer",
    norm_placement="post",
    feed_forward="relu",
    bias=True,
    dropout=0.5,
)
CONFIGS = {
    "sinusoidal": SINES,
    "learned": ModelConfig(
        V, T, 23, H, 0, K, F, 2, position="learned", norm_placement="pre", dropout=0.5
    ),
    "grouped": ModelConfig(V, T, 23, H, 1, K, F, 2, qk_norm=True, dropout=0.5),
    "adaptive": ModelConfig(
        V, T, 23, H, 0, K, F, 2, output="adaptive", cutoffs=(29, 61), tail_divisor=2
    ),
}
GREEDY = Sampling(temperature=0, max_new_tokens=T)
LINES = [
    "The river ran past the old mill , and nobody knew where it went .",
    "",
    " = A title = ",
    "A mill by a river : the smile of a 😊 and the word 语 , twice : 语 😊",
] * 7


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make_model(config: ModelConfig = SINES, seed: int = 1) -> MiniGPT:
    torch.manual_seed(seed)
    model = MiniGPT(config)
    with torch.no_grad():  # fresh weights say nearly the same of everything: make them opinionated
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model


def make_even(model: MiniGPT) -> None:
    """Make every word as likely as any other."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def make_tokenizer(kind: str) -> Tokenizer:
    size = {"basic_english": 19, "wikitext": 17, "bpe": 300, "char": 300}[kind]
    return Tokenizer.train(TokenizerConfig(kind, size), lambda: LINES)


def text_model(kind: str) -> tuple[MiniGPT, Tokenizer]:
    tokenizer = make_tokenizer(kind)
    config = ModelConfig(tokenizer.vocab_size, T, 23, H, 0, K, F, 2)
    return make_model(config), tokenizer


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_logits(seed: int, *, ties: bool) -> Tensor:
    logits = 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


# Sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**32),
        ("max_new_tokens", 0),
    ],
)
def test_a_value_that_no_draw_could_follow_is_named(name, value):
    with pytest.raises(UserError, match=rf"^{name} is {value}: it must"):
        Sampling(**{name: value})


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(7))
def test_filters_are_those_of_transformers(seed, ties):
    logits, none = random_logits(seed, ties=ties), torch.zeros(B, 0, dtype=torch.int64)
    for top_k in (1, 2, 11, V, V + 100):
        assert torch.equal(keep_top_k(logits, top_k), TopKLogitsWarper(top_k)(none, logits))
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0):
        assert torch.equal(keep_top_p(logits, top_p), TopPLogitsWarper(top_p)(none, logits))
    for temperature in (0.05, 0.8, 1.0, 7.0):
        ours = scale(logits, temperature).softmax(-1)
        theirs = TemperatureLogitsWarper(temperature)(none, logits).softmax(-1)
        torch.testing.assert_close(ours, theirs)


def test_filters_follow_each_other_as_in_transformers():
    logits, none = random_logits(3, ties=False), torch.zeros(B, 0, dtype=torch.int64)
    ours, theirs = logits, logits
    for apply in filters_of(Sampling(0.7, 23, 0.8)):
        ours = apply(ours)
    for warp in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(23), TopPLogitsWarper(0.8)):
        theirs = warp(none, theirs)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))


@pytest.mark.parametrize(
    "apply",
    [
        partial(ban, banned=[0, 7]),
        partial(scale, temperature=0.3),
        partial(keep_top_k, top_k=4),
        partial(keep_top_p, top_p=0.6),
    ],
)
def test_a_filter_leaves_its_input_alone_and_sees_each_row_alone(apply):
    logits = random_logits(5, ties=True)
    before = logits.clone()
    together = apply(logits)
    assert torch.equal(logits, before)
    assert together.shape == (B, V)
    for row, alone in zip(together, logits, strict=True):
        assert torch.equal(apply(alone[None])[0], row)


def test_one_word_is_left_whatever_the_filters():
    filters = filters_of(Sampling(1e-4, 1000, 1e-9), banned=range(V - 1))
    logits = random_logits(0, ties=True)
    for apply in filters:
        logits = apply(logits)
    assert logits.isfinite().sum(dim=-1).tolist() == [1] * B
    assert choose(logits, None).tolist() == [V - 1] * B


def test_what_is_banned_takes_no_place_among_the_top_k():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    for apply in filters_of(Sampling(1.0, 2), banned=[0, 1]):
        logits = apply(logits)
    assert logits.isfinite().tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("temperature", [1e-2, 1e-7, 1e-38, 1e-300])
def test_cold_sampling_tends_to_the_likeliest_word(temperature):
    logits = random_logits(2, ties=False)
    scaled = scale(logits, temperature)
    assert torch.equal(scaled.softmax(-1).argmax(-1), logits.argmax(-1))
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(choose(scale(logits, 1e-7), generator), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e3, 1e300])
def test_hot_sampling_tends_to_an_even_draw_among_what_is_allowed(temperature):
    shares = scale(ban(random_logits(2, ties=False), [3]), temperature).softmax(-1)
    assert shares[:, 3].eq(0).all()
    torch.testing.assert_close(shares[:, 4], torch.full((B,), 1 / (V - 1)), rtol=0.02, atol=0)


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    ids = choose(logits, torch.Generator().manual_seed(1))
    shares = ids.bincount(minlength=3) / len(ids)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0)


# The window


@given(n_ids=st.integers(1, 2000), context=st.integers(1, 97))
def test_the_window_begins_at_the_first_stride_that_fits(n_ids, context):
    stride = context - context // 2
    start = window_start(n_ids, context)
    assert start % stride == 0
    assert 1 <= n_ids - start <= context
    assert start == 0 or n_ids - (start - stride) > context


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


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_id_is_the_choice_of_the_masked_model_that_reads_the_window(name, use_cache):
    model, prompt = make_model(CONFIGS[name]).eval(), random_ids(2 * T + 3)
    ids = list(prompt)
    for next_id in generate(model, prompt, GREEDY, use_cache=use_cache):
        window = torch.tensor([ids[window_start(len(ids), T) :]])
        assert next_id == int(model(window)[0, -1].argmax())
        ids.append(next_id)


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


def test_top_1_is_greedy_also_among_equals():
    model, prompt = make_model(), random_ids(5)
    greedy = list(generate(model, prompt, GREEDY))
    for seed in range(3):
        sampling = Sampling(1.9, top_k=1, seed=seed, max_new_tokens=T)
        assert list(generate(model, prompt, sampling)) == greedy
    make_even(model)
    assert list(generate(model, prompt, Sampling(1.9, top_k=1, max_new_tokens=5))) == [0] * 5


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


# Text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=23),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 23), max_size=11),
)
def test_a_stop_string_is_cut_wherever_the_pieces_part(text, stop, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(until(pieces, stop)) == expected


def test_text_that_can_begin_no_stop_string_is_let_out_at_once():
    assert list(until(iter(["ab", "c#", "#d", "##", "#e"]), ["###"])) == ["ab", "c", "##d"]
    assert list(until(iter(["ab", "#", "#"]), ["###"])) == ["ab", "##"]


def test_nothing_is_drawn_after_the_stop_string():
    def pieces():
        yield from ("one ", "two ")
        pytest.fail("asked for more")

    assert "".join(until(pieces(), ["two"])) == "one "


@pytest.mark.parametrize("kind", ["bpe", "char"])
@pytest.mark.parametrize("text", ["😊", "语", "a 😊 b 语言 é", "  two blanks\n\nhere "])
def test_a_character_comes_whole(kind, text):
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    for n_prompt in (0, 1):
        prompt, new = tokenizer.encode("A ") * n_prompt, ids
        pieces = list(decoded(tokenizer.decode, prompt, iter(new)))
        assert "".join(pieces) == text
        assert all(pieces)
        assert "\ufffd" not in "".join(pieces)


def test_half_a_character_at_the_end_is_shown_as_such():
    tokenizer = make_tokenizer("bpe")
    ids = tokenizer.encode("a 龘")[:-1]  # not in the text: three bytes, the last is missing
    pieces = list(decoded(tokenizer.decode, [], ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).startswith("a ")
    assert pieces[-1].startswith("\ufffd")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "prompt", ["", "The river", "zyzzyva qat", "the mill\nby a", "语 😊", "  "]
)
@pytest.mark.parametrize("kind", ["basic_english", "wikitext", "bpe", "char"])
def test_pieces_joined_are_the_decoded_whole(kind, prompt, raw):
    model, tokenizer = text_model(kind)
    for seed in range(2):
        sampling = Sampling(1.0, None, seed=seed, max_new_tokens=43)
        banned = set() if raw else tokenizer.special_ids
        pieces = generate_text(
            model, tokenizer, prompt, sampling, raw=raw, banned=banned, stop_at_eos=False
        )
        start = tokenizer.encode(prompt) or [tokenizer.eos_id]
        new = list(generate(model, start, sampling, banned=banned))
        whole = tokenizer.decode(start + new, raw=raw)
        assert tokenizer.decode(start, raw=raw) + "".join(pieces) == whole


@pytest.mark.parametrize("kind", ["basic_english", "wikitext"])
def test_unknown_words_are_never_written_unless_asked_for(kind):
    model, tokenizer = text_model(kind)
    sampling = Sampling(2.0, None, max_new_tokens=499)
    prompt = "qat zyzzyva"  # nothing but unknown words
    assert set(tokenizer.encode(prompt)) == {tokenizer.unk_id}
    assert "<" not in "".join(generate_text(model, tokenizer, prompt, sampling))
    asked_for = "".join(generate_text(model, tokenizer, prompt, sampling, raw=True))
    assert "<unk>" in asked_for
    assert "<eos>" in asked_for


@pytest.mark.parametrize(
    ("kind", "goes_on"),
    [("basic_english", True), ("wikitext", True), ("bpe", False), ("char", False)],
)
def test_eos_is_a_line_break_for_words_and_the_end_for_the_rest(kind, goes_on):
    model, tokenizer = text_model(kind)
    make_even(model)  # so that <eos> comes as often as any other
    sampling = Sampling(1.0, None, max_new_tokens=2 * tokenizer.vocab_size)
    banned = tokenizer.special_ids
    ids = list(generate(model, [tokenizer.eos_id], sampling, banned=banned))
    assert tokenizer.eos_id in ids
    write = partial(generate_text, model, tokenizer, "", sampling, banned=banned)
    text, ended = "".join(write()), "".join(write(stop_at_eos=True))
    if goes_on:
        assert text.count("\n") == ids.count(tokenizer.eos_id)
        assert text.startswith(ended)
        assert "\n" not in ended
    else:
        assert text == ended == tokenizer.decode(ids[: ids.index(tokenizer.eos_id)])


def test_stop_strings_end_the_text():
    model, tokenizer = text_model("bpe")
    sampling = Sampling(1.0, None, max_new_tokens=97)
    free = "".join(generate_text(model, tokenizer, "", sampling))
    stop = free[len(free) // 2 :][:5]  # straddles pieces, which are two letters or three
    cut = "".join(generate_text(model, tokenizer, "", sampling, stop=[stop]))
    assert cut == free[: free.index(stop)]
    with pytest.raises(UserError, match="stop string is empty"):
        generate_text(model, tokenizer, "", sampling, stop=["x", ""])


def test_samples_are_the_same_each_time_and_unselected():
    model, tokenizer = text_model("wikitext")
    model.train()
    first, second = samples(model, tokenizer), samples(model, tokenizer)
    assert first == second
    assert [sample.prompt for sample in first] == ["", "The"]
    assert all(sample.text.strip() for sample in first)
    assert model.training
