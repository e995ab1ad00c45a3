"""What each head does: planted heads are named, idle ones too, and luck earns no role."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from torch import Tensor

from minigpt.config import ModelConfig, TokenizerConfig
from minigpt.errors import UserError
from minigpt.head_roles import DOES_NOTHING, UNDECIDED, UNEXPLAINED, HeadRoles, measure_heads
from minigpt.head_scores import PLACES, HeadScore, LossChange, RelationScore, t_quantile
from minigpt.model import MiniGPT
from minigpt.sentences import pronoun_sentences, verb_object_sentences
from minigpt.tokenizer import Tokenizer
from tiny import MODELS, make_model

T, K, LETTERS = 19, 23, "abcdefghijk"
L, H = 2, 2


def train_tokenizer(kind: str, lines: list[str]) -> Tokenizer:
    config = TokenizerConfig(kind, 300 if kind == "bpe" else 0)  # type: ignore[arg-type]
    return Tokenizer.train(config, lambda: iter(lines))


def planted_model(vocab_size: int) -> MiniGPT:
    """Return a model made by hand: head 0.0 looks one back, head 1.0 is an induction head.

    The stream holds, one behind the other: which token, which position, which token came before
    (head 0.0 writes it), which token comes next (head 1.0 writes it). Heads 0.1 and 1.1 look evenly
    and write nothing.
    """
    token, position, before, after = (
        range(start, start + size)
        for start, size in (
            (0, vocab_size),
            (vocab_size, T),
            (vocab_size + T, vocab_size),
            (2 * vocab_size + T, vocab_size),
        )
    )
    config = ModelConfig(
        vocab_size=vocab_size,
        context_length=T,
        d_model=after.stop,
        n_heads=H,
        d_head=K,
        d_ff=5,
        n_layers=L,
        position="learned",
        norm="layer",
        norm_placement="pre",
        feed_forward="gelu",
        bias=True,
        tie_embeddings=False,
    )
    model = MiniGPT(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for i in token:
            model.embedding.weight[i, i] = 1.0  # type: ignore[union-attr, operator]
            model.output.table[i, after[i]] = 1.0  # type: ignore[union-attr, operator]
        for i in range(T):
            model.positions.weight[i, position[i]] = 1.0  # type: ignore[union-attr, operator]
        first, second = (block.attention for block in model.blocks)
        for i in range(T):
            first.query.weight[i, position[i]] = 4.0
            if i + 1 < T:
                first.key.weight[i + 1, position[i]] = 4.0
        for i in token:
            second.query.weight[i, token[i]] = 4.0
            second.key.weight[i, before[i]] = 4.0
            for attention, block in ((first, before), (second, after)):
                attention.value.weight[i, token[i]] = 1.0
                attention.output.weight[block[i], i] = 0.2
    return model


def rounds(tokenizer: Tokenizer, periods: list[int]) -> np.ndarray:
    """Return a window for each period, in which as many letters come round and round."""
    draw = torch.Generator().manual_seed(5)
    windows = []
    for period in periods:
        letters = [LETTERS[i] for i in torch.randperm(len(LETTERS), generator=draw)[:period]]
        windows += tokenizer.encode(" ".join((letters * T)[:T]))
    return np.array([*windows, tokenizer.eos_id])


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return train_tokenizer("wikitext", [" ".join(LETTERS)])


@pytest.fixture(scope="module")
def planted(letters: Tokenizer) -> HeadRoles:
    ids = rounds(letters, [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11])
    return measure_heads(planted_model(letters.vocab_size), letters, ids)


def test_planted_heads_are_found(planted: HeadRoles) -> None:
    assert planted.roles() == [
        ["previous token", DOES_NOTHING],
        ["induction", DOES_NOTHING],
    ]
    assert float(planted.scores["previous_token"].measured[0, 0]) > 0.99
    assert float(planted.scores["induction"].measured[1, 0]) > 0.9
    assert planted.excess()["induction"][1, 0] > 0.5


def test_the_loss_shows_what_planted_heads_are_worth(planted: HeadRoles) -> None:
    # What came before helps no one but the head that looks for it: together they stand or fall.
    assert planted.loss.loss < math.log(len(LETTERS)) - 0.5
    assert float(planted.loss.change[0, 0]) > 0.5
    assert float(planted.loss.change[1, 0]) > 0.5
    assert planted.loss.change[:, 1].tolist() == [0.0, 0.0]
    assert planted.matters().tolist() == [[True, False]] * 2


def test_sentences_of_unknown_words_are_said_to_be_left_out(planted: HeadRoles) -> None:
    for relation in planted.relations.values():
        assert (relation.n_sentences, relation.n_skipped) == (0, 100)
    assert [line for line in planted.summary() if "not measured (100 sentences left out" in line]
    legend = dict(planted.legend())
    assert legend["even"].endswith("the best fixed place (– and –)")
    assert dict(made().legend())["even"].endswith("(2 words back and 2 words back)")
    assert planted.summary()[0].startswith("2 of 4 heads have a role (1 previous token, 1 indu")


def test_induction_at_one_distance_might_as_well_be_a_place(letters: Tokenizer) -> None:
    """With one period everywhere the average map knows where to look: no role of words."""
    ids = rounds(letters, [7] * 14)
    found = measure_heads(planted_model(letters.vocab_size), letters, ids)
    assert float(found.scores["induction"].measured[1, 0]) > 0.9
    assert float(found.scores["induction"].position_only[1, 0]) > 0.9
    assert found.roles()[1][0] != "induction"


# --- the rule that makes a role ---


def made(
    excess: dict[str, float] | None = None,
    *,
    n_rows: int = 100,
    p_place: float = 1.0,
    p_rival: float = 1.0,
    change: float = 0.0,
    error: float = 0.0,
    n_windows: int = 7,
) -> HeadRoles:
    """Return what one head has that scores so much over 0.2, in a model of 1 × 1."""

    def one(value: float) -> Tensor:
        return torch.tensor([[value]], dtype=torch.float64)

    scores = {
        name: HeadScore(one(0.2 + (excess or {}).get(name, 0.0)), one(0.1), 0.2, n_rows)
        for name in PLACES
    }
    relation = RelationScore(
        one(0.5), one(0.5), one(p_place), one(p_rival), "2 words back", 0.2, 97, 3
    )
    return HeadRoles(
        {**scores, "entropy": HeadScore(one(0.9), one(0.95), 1.0, n_rows)},
        {"verb_object": relation, "pronoun_antecedent": replace(relation, p_rival=one(1.0))},
        LossChange(4.0, one(change), one(error)),
        n_windows=n_windows,
        context=T,
    )


def role_of(**more: object) -> str:
    return made(**more).roles()[0][0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLACES)
def test_a_role_takes_a_tenth_more_than_nothing(name: str) -> None:
    assert role_of(excess={name: 0.101}) == name.replace("_", " ")
    assert role_of(excess={name: 0.099}) == DOES_NOTHING
    assert role_of(excess={name: 0.5}, n_rows=29) == DOES_NOTHING
    assert role_of(excess={name: 0.5, "itself": 0.51}) == "itself"


@pytest.mark.parametrize("name", PLACES)
def test_only_words_are_compared_with_the_average_map(name: str) -> None:
    heads = made({name: 0.3})
    score = replace(heads.scores[name], position_only=torch.tensor([[0.45]], dtype=torch.float64))
    heads = replace(heads, scores={**heads.scores, name: score})
    of_words = name in ("same_token", "induction", "punctuation")
    assert heads.roles()[0][0] == (DOES_NOTHING if of_words else name.replace("_", " "))
    assert float(heads.excess()[name]) == pytest.approx(0.05 if of_words else 0.3)


def test_what_has_no_role_may_still_matter() -> None:
    # Seven windows: the interval is 2.447 standard errors to each side.
    assert role_of(change=0.025, error=0.01) == UNEXPLAINED
    assert role_of(change=-0.025, error=0.01) == UNEXPLAINED
    assert role_of(change=0.024, error=0.01) != UNEXPLAINED
    assert role_of(excess={"itself": 0.4}, change=0.0) == "itself"


def test_a_head_does_nothing_only_where_that_is_known() -> None:
    # Change and 2.447 standard errors must fit into 0.01 nats.
    for sign in (1, -1):
        assert role_of(change=sign * 0.0050, error=0.00204) == UNEXPLAINED
        assert role_of(change=sign * 0.0049, error=0.00205) == DOES_NOTHING
        assert role_of(change=sign * 0.0049, error=0.00210) == UNDECIDED
    assert role_of(change=0.1, error=0.08, n_windows=2) == UNDECIDED  # ±1.02 by two windows
    assert role_of(error=0.00080, n_windows=2) == UNDECIDED
    assert role_of(error=0.00078, n_windows=2) == DOES_NOTHING


@pytest.mark.parametrize("n_windows", [2, 3, 8, 16, 17, 40])
def test_one_idle_head_in_twenty_seems_to_matter(n_windows: int) -> None:
    """Whatever the number of windows: heads whose changes are pure noise."""
    n_heads = 20_000
    draw = torch.Generator().manual_seed(7)
    changes = torch.randn(1, n_heads, n_windows, generator=draw, dtype=torch.float64)
    error = changes.std(-1) / math.sqrt(n_windows)
    heads = replace(made(n_windows=n_windows), loss=LossChange(4.0, changes.mean(-1), error))
    assert float(heads.matters().double().mean()) == pytest.approx(0.05, abs=0.006)
    assert torch.equal(heads.interval(), t_quantile(n_windows) * error)
    assert any(f"chance in 1000.0 of {n_heads} heads" in text for _, text in heads.legend())


def test_a_relation_takes_both_tests_and_pays_for_each_try() -> None:
    # One head, two relations: the level is 0.025.
    assert role_of(p_place=0.024, p_rival=0.024) == "verb → object"
    assert role_of(p_place=0.026, p_rival=0.001) == DOES_NOTHING
    assert role_of(p_place=0.001, p_rival=0.026) == DOES_NOTHING
    assert role_of(p_place=0.0, p_rival=0.0, excess={"itself": 0.4}) == "itself"


def test_the_summary_says_what_came_out() -> None:
    place = "the best fixed place (2 words back, 20%)"
    left_out = " (3 sentences left out: words not in the vocabulary, or longer than the context)"
    assert made(change=1.0).summary() == [
        "0 of 1 heads have a role; without a role: 1 whose removal changes the loss, "
        "0 doing nothing, 0 undecided",
        f"verb → object: no head beats {place}{left_out}",
        f"pronoun → antecedent: no head beats {place}{left_out}",
    ]
    others = (
        made(change=-1.0),
        made({"itself": 0.5}, change=-1.0),
        made(),
        made(change=0.3, error=0.2),
    )
    assert [heads.summary()[0].partition("changes the loss")[2] for heads in others] == [
        " (lower without 1 of them), 0 doing nothing, 0 undecided",
        ", 0 doing nothing, 0 undecided",
        ", 1 doing nothing, 0 undecided",
        ", 0 doing nothing, 1 undecided",
    ]
    half = f"1 head beats {place}, but none tells the target from its rival"
    assert made(p_place=0.0).summary()[1] == f"verb → object: {half}{left_out}"
    whole = f"tracked by 0.0: better than {place}, and than a coin"
    both = made(p_place=0.0, p_rival=0.0)
    assert both.summary()[0].startswith("1 of 1 heads have a role (1 verb → object); without")
    assert both.summary()[1] == f"verb → object: {whole}{left_out}"


# --- views ---


def test_the_table_has_a_row_a_head(planted: HeadRoles) -> None:
    names, even, *rows = planted.table()
    assert len({len(row) for row in planted.table()}) == 1
    assert [row[0] for row in rows] == ["0.0", "0.1", "1.0", "1.1"]
    assert [row[-1] for row in rows] == [role for of_layer in planted.roles() for role in of_layer]
    first = dict(zip(names, rows[0], strict=True))
    assert first["prev"] == "100"
    assert first["object"] == "–/–"
    score = planted.scores["induction"]
    shares = (score.measured[1, 0], score.position_only[1, 0])
    assert dict(zip(names, rows[2], strict=True))["induct"] == "/".join(
        f"{100 * float(share):.0f}" for share in shares
    )
    assert dict(zip(names, even, strict=True))["induct"] == f"{100 * score.even:.0f}"
    assert {name for name, _ in planted.legend()} >= {*names} - {"head"}
    assert dict(zip(names, made(p_place=0.0, p_rival=0.0).table()[2], strict=True))[
        "object"
    ].endswith("*")


def test_json_has_every_figure(planted: HeadRoles) -> None:
    told = json.loads(json.dumps(planted.to_json()))
    for name, score in planted.scores.items():
        for field in ("measured", "position_only"):
            values = torch.tensor(told["scores"][name][field])
            torch.testing.assert_close(
                values, getattr(score, field).float(), equal_nan=True, atol=1e-6, rtol=0
            )
        assert told["scores"][name]["n_rows"] == score.n_rows
    assert told["roles"] == planted.roles()
    assert told["loss"]["change"] == planted.loss.change.tolist()
    assert torch.tensor(told["relations"]["verb_object"]["accuracy"]).isnan().all()
    assert told["relations"]["verb_object"]["tracks"] == [[False] * H] * L
    assert told["summary"] == planted.summary()


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_notebook_shows_the_table(planted: HeadRoles) -> None:
    cells = _Cells()
    cells.feed(planted._repr_html_())
    assert set(cells.tags) == {"table", "tr", "th", "td", "p", "br"}
    assert cells.tags.count("tr") == 2 + L * H
    assert {cell for row in planted.table() for cell in row if cell} <= set(cells.text)
    odd = made()
    odd.relations["verb_object"] = replace(
        odd.relations["verb_object"], fixed_place="<b>&</b>", p_place=torch.zeros(1, 1)
    )
    assert "<b>" not in odd._repr_html_()


def n_pixels(path: Path, color: str) -> int:
    return int((np.abs(imread(path)[..., :3] - np.array(to_rgb(color))).sum(-1) < 0.05).sum())


def test_the_picture_shows_roles_and_bars(planted: HeadRoles, tmp_path: Path) -> None:
    planted.save_png(tmp_path / "new" / "planted.png")
    made().save_png(str(tmp_path / "none.png"))
    made(change=-0.1, error=0.01).save_png(tmp_path / "harm.png")
    assert min(imread(tmp_path / "new" / "planted.png").shape[:2]) > 300
    # Orange frames what gave a role, red is a bar of less loss.
    assert n_pixels(tmp_path / "new" / "planted.png", "#e8710a") > 400
    assert n_pixels(tmp_path / "none.png", "#e8710a") == 0
    assert n_pixels(tmp_path / "harm.png", "#b3261e") > 400
    assert n_pixels(tmp_path / "none.png", "#b3261e") == 0
    with pytest.raises(UserError, match=r"picture .*heads\.png cannot be written"):
        made().save_png(tmp_path / "none.png" / "heads.png")


# --- every kind of model and tokenizer ---

LINES = [str(s) for s in [*verb_object_sentences(), *pronoun_sentences()]] + ["( a ) , b ; 3 !"] * 5


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_measured(name: str) -> None:
    tokenizer = train_tokenizer("wikitext", LINES)
    config = replace(MODELS[name], vocab_size=tokenizer.vocab_size, context_length=29)
    model, ids = make_model(config).train(), np.array([*_encoded(tokenizer)])
    heads = measure_heads(model, tokenizer, ids, n_tokens=150)
    shape = (config.n_layers, config.n_heads)
    assert (heads.n_windows, heads.context) == (5, 29)
    for score in heads.scores.values():
        assert score.measured.shape == score.position_only.shape == shape
        assert ((score.measured >= 0) & (score.measured <= 1 + 1e-6)).all()
    for relation in heads.relations.values():
        assert relation.accuracy.shape == relation.of_two.shape == relation.p_place.shape == shape
        assert relation.n_sentences == 100
    assert [len(of_layer) for of_layer in heads.roles()] == [config.n_heads] * config.n_layers
    assert len(heads.table()) == 2 + config.n_layers * config.n_heads
    assert model.training


def _encoded(tokenizer: Tokenizer) -> list[int]:
    return [i for line in tokenizer.encode_lines(LINES) for i in line]


@pytest.mark.parametrize("kind", ["basic_english", "wikitext", "bpe", "char"])
@pytest.mark.parametrize("context", [41, 131])
def test_every_tokenizer_can_be_measured(kind: str, context: int) -> None:
    tokenizer = train_tokenizer(kind, LINES)
    config = replace(MODELS["modern"], vocab_size=tokenizer.vocab_size, context_length=context)
    ids, said = np.array(_encoded(tokenizer)), []
    heads = measure_heads(make_model(config), tokenizer, ids, n_tokens=2 * context, say=said.append)
    assert said == [f"measuring 6 heads on 2 windows of {context} tokens"]
    kept = [relation.n_sentences for relation in heads.relations.values()]
    if context == 41 and kind in ("bpe", "char"):  # longer than that when it is spelt in pieces
        assert all(0 < n < 100 for n in kept)
        assert all("sentences left out" in line for line in heads.summary()[1:])
    else:
        assert kept == [100, 100]
    assert heads.scores["punctuation"].n_rows > 0


def test_a_model_that_sees_one_token_has_nothing_to_measure() -> None:
    tokenizer = train_tokenizer("wikitext", LINES)
    config = replace(MODELS["paper"], vocab_size=tokenizer.vocab_size, context_length=1)
    heads = measure_heads(make_model(config), tokenizer, np.array(_encoded(tokenizer)))
    assert all(score.measured.isnan().all() for score in heads.scores.values())
    assert all(
        heads.roles()[layer][head] in (UNEXPLAINED, DOES_NOTHING, UNDECIDED)
        for layer, head in product(range(config.n_layers), range(config.n_heads))
    )
    assert heads.legend()


@pytest.mark.parametrize("part", ["blocks.1.attention.key.weight", "output.table"])
def test_a_model_that_has_diverged_gets_no_roles(part: str) -> None:
    tokenizer = train_tokenizer("wikitext", LINES)
    config = replace(MODELS["gpt2"], vocab_size=tokenizer.vocab_size, tie_embeddings=False)
    model = make_model(config)
    with torch.no_grad():
        model.get_parameter(part)[3, 1] = math.nan
    what = "loss" if part.startswith("output") else "attention"
    with pytest.raises(UserError, match=f"the model's {what} is not finite: its training has div"):
        measure_heads(model, tokenizer, np.array(_encoded(tokenizer)))


def test_too_short_a_text_is_refused_before_anything_is_said() -> None:
    tokenizer, said = train_tokenizer("wikitext", LINES), []
    config = replace(MODELS["paper"], vocab_size=tokenizer.vocab_size)
    with pytest.raises(UserError, match="the text has 22 tokens"):
        measure_heads(make_model(config), tokenizer, np.zeros(22, np.uint16), say=said.append)
    assert said == []
