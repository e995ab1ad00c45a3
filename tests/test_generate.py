"""Text at both ends: what is shown, where it stops, and several at once."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.decoding import generate
from minigpt.errors import UserError
from minigpt.generate import (
    StopStrings,
    Wording,
    best_continuations,
    continuations,
    generate_text,
    samples,
)
from minigpt.sampling import Sampling
from writers import make_even, text_model


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def until(pieces, stop):
    """Yield what a watch for stop strings lets through, and stop asking once one is complete."""
    watch = StopStrings(stop)
    for piece in pieces:
        yield watch.add(piece)
        if watch.found:
            break
    yield watch.rest()


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
    shown = list(until(iter(["ab", "c#", "#d", "##", "#e"]), ["###"]))
    assert shown == ["ab", "c", "##d", "", "", ""]
    assert list(until(iter(["ab", "#", "#"]), ["###"])) == ["ab", "", "", "##"]


def test_nothing_is_drawn_after_the_stop_string():
    def pieces():
        yield from ("one ", "two ")
        pytest.fail("asked for more")

    assert "".join(until(pieces(), ["two"])) == "one "


# litgpt#1822: streamed text without blanks.
# nanoGPT#434, #169, #273: KeyError on an unseen character.
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
        wording = Wording(raw=raw, stop_at_eos=False)
        pieces = list(generate_text(model, tokenizer, prompt, sampling, wording))
        for piece in pieces:
            piece.encode("utf-8")
        start = tokenizer.encode(prompt) or [tokenizer.eos_id]
        new = list(generate(model, start, sampling, banned=banned))
        whole = tokenizer.decode(start + new, raw=raw)
        text = "".join(pieces)
        if set(start) == {tokenizer.unk_id} and not raw:
            # `decode` leaves out what the prompt shows, and so what the first word follows.
            assert text.startswith((" ", "\n", ".", ","))
            text = text.removeprefix(" ")
        assert tokenizer.decode(start, raw=raw) + text == whole


# graph4nlp#499: a run of <unk>.
@pytest.mark.parametrize("kind", ["basic_english", "wikitext"])
def test_unknown_words_are_never_written_unless_asked_for(kind):
    model, tokenizer = text_model(kind)
    sampling = Sampling(2.0, None, max_new_tokens=499)
    prompt = "qat zyzzyva"  # nothing but unknown words
    assert set(tokenizer.encode(prompt)) == {tokenizer.unk_id}
    assert "<" not in "".join(generate_text(model, tokenizer, prompt, sampling))
    (written,) = continuations(model, tokenizer, [prompt], sampling)
    assert tokenizer.unk_id not in written.ids  # neither written nor drawn and hidden
    asked_for = "".join(generate_text(model, tokenizer, prompt, sampling, Wording(raw=True)))
    assert "<unk>" in asked_for
    assert "<eos>" in asked_for


# nanoGPT#196: did not stop at the end token, or printed it.
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
    write = partial(generate_text, model, tokenizer, "", sampling)
    text, ended = "".join(write()), "".join(write(Wording(stop_at_eos=True)))
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
    cut = "".join(generate_text(model, tokenizer, "", sampling, Wording(stop=[stop])))
    assert cut == free[: free.index(stop)]
    with pytest.raises(UserError, match="stop string is empty"):
        Wording(stop=["x", ""])


def test_samples_are_the_same_each_time_and_unselected():
    model, tokenizer = text_model("wikitext")
    model.train()
    first, second = samples(model, tokenizer), samples(model, tokenizer)
    assert first == second
    assert [sample.prompt for sample in first] == ["", "The"]
    assert all(sample.text.strip() for sample in first)
    assert model.training


@pytest.mark.parametrize("kind", ["basic_english", "wikitext", "bpe", "char"])
def test_texts_written_together_are_those_written_alone(kind):
    model, tokenizer = text_model(kind)
    model = model.double()
    prompts = ["The river", "", "the mill by a river : the smile", "语"]
    sampling = Sampling(1.0, None, seed=3, max_new_tokens=43)
    free = continuations(model, tokenizer, prompts, sampling)
    stop = next(one.text for one in free if len(one.text) > 9)[4:8]
    wording = Wording(stop=[stop])
    found = continuations(model, tokenizer, prompts, sampling, wording, n_samples=2)
    assert [one.prompt for one in found] == [p for p in prompts for _ in range(2)]
    for number, one in enumerate(found):
        alone = Sampling(1.0, None, seed=3 + number % 2, max_new_tokens=43)
        expected = "".join(generate_text(model, tokenizer, one.prompt, alone, wording))
        assert one.text == expected
        assert len(one.log_probs) == len(one.ids)
        assert stop not in one.text
    assert "stop string" in {one.ended for one in found}


def test_the_best_text_is_likelier_than_the_greedy_one():
    model, tokenizer = text_model("wikitext")
    sampling = Sampling(0, max_new_tokens=11)
    (greedy,) = continuations(model, tokenizer, ["The"], sampling)
    best = best_continuations(model, tokenizer, "The", sampling, n_beams=5)
    assert len(best) == 5
    assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)
    assert sum(best[0].log_probs) >= sum(greedy.log_probs)
    assert best[0].text == tokenizer.decode([*tokenizer.encode("The"), *best[0].ids])[3:]
    (alone,) = best_continuations(model, tokenizer, "The", sampling, n_beams=1)
    assert alone.text == greedy.text


@pytest.mark.parametrize("n_samples", [0, -1, 10**9])
def test_samples_that_cannot_be(n_samples):
    with pytest.raises(UserError, match=f"n_samples is {n_samples}: it must lie between"):
        continuations(*text_model("char"), [""], n_samples=n_samples)
