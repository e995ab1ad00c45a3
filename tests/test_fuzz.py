"""Anything at all goes in: what comes out is right, or one line that says what is wrong.

Each test states a property and tries some dozens of cases of it; `make fuzz MINUTES=30` tries
them for as long as it is told to (tools/fuzz.py). What that found stands here as examples, and in
docs/experiments.md.
"""

import contextlib
import io
import json
import math
import os
import typing
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from minigpt.command_line import biases, parse_generate, parse_train, prompts_of
from minigpt.config import (
    BUDGETS,
    Config,
    TokenizerConfig,
    from_dict,
    key_names,
    load_file,
    load_preset,
    preset_names,
    to_dict,
)
from minigpt.corpus import SPLITS, Corpus, open_corpus
from minigpt.data import TrainingBatches, fit_tokenizer, prepare
from minigpt.decoding import choose
from minigpt.errors import UserError
from minigpt.evaluate import evaluate, token_nats
from minigpt.filters import FILTERS, Text, TokenRules, filtered, wishes_of
from minigpt.generate import StopStrings
from minigpt.metrics import cut_back, read_metrics, to_json
from minigpt.prompt_loop import obey
from minigpt.sampling import Sampling
from minigpt.spelling import Prose, taken_apart
from minigpt.text import basic_english
from minigpt.tokenizer import Tokenizer
from minigpt.vocabulary import DOCUMENT_MARK
from test_config import toml_file
from test_evaluate import EOS, stream_of
from test_tokenizer import EXACT, KINDS, TOKENIZERS
from tiny import MODELS, T, make_model


@contextlib.contextmanager
def one_line_or_none() -> Iterator[None]:
    """Let a UserError of one line end the case well, and nothing else."""
    caught = None
    try:
        yield
    except UserError as error:
        caught = str(error)
    assert caught is None or (caught.strip() and len(caught.splitlines()) == 1)


def tries(n: int) -> settings:
    """Return the settings of a property that is tried n times, or as much more as is asked for."""
    times = int(os.environ.get("MINIGPT_FUZZ_TIMES", "1"))
    # A busy machine is no fault of the property.
    return settings(
        max_examples=n * times, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


# ---- any value at all, in the shapes that TOML and JSON have

HUGE = st.sampled_from([2**31, 2**64, 10**400, -(10**400)])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | HUGE
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
KEYS = key_names(Config)
# An edit away from a name, a name of another code base, a part of one, and no name at all.
NAMES = (
    st.sampled_from(KEYS)
    | st.builds(lambda key, at: key[:at] + key[at + 1 :], st.sampled_from(KEYS), st.integers(0, 24))
    | st.sampled_from(["lr", "n_embd", "d_model", "model", "optim", "tokenizer", "sampling"])
    | st.text(max_size=12)
)


def hint_of(key: str) -> Any:
    kind: Any = Config
    for name in key.split("."):
        kind = typing.get_type_hints(kind)[name]
    return kind


def plausible(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a type, most of which a setting of that type could have."""
    options = typing.get_args(hint)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(0, 70) | st.sampled_from([2**31 - 1, 2**32 - 1, 257, 10_000])
    if hint is float:
        return st.floats(0, 1) | st.integers(0, 3) | st.floats()
    if hint is str:
        return st.sampled_from(["auto", "cpu", "cuda:1", "data.txt", "mps"]) | st.text(max_size=5)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(options)
    if typing.get_origin(hint) is tuple:
        return st.lists(st.integers(1, 99), max_size=3, unique=True).map(sorted)
    inner = next(option for option in options if option is not type(None))
    return plausible(inner) | st.sampled_from([None, "none"])


def setting(key: str) -> st.SearchStrategy[tuple[str, Any]]:
    value = plausible(hint_of(key)) if key in KEYS else ANYTHING
    return st.tuples(st.just(key), value)


def nested(settings: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings:
        *tables, last = key.split(".")
        table = tree
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                break
        else:
            table[last] = value
    return tree


def dotted(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


RIGHT = st.lists(st.sampled_from(KEYS).flatmap(setting), max_size=5).map(nested)
WRONG = st.lists(st.tuples(NAMES, ANYTHING) | NAMES.flatmap(setting), max_size=3).map(nested)


def read_back(name: str, content: str | bytes) -> Config:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_file(path)


@tries(120)
@given(RIGHT)
def test_a_config_comes_back_from_json_and_toml_and_resolves_once(tree: dict[str, Any]) -> None:
    with one_line_or_none():
        config = from_dict(Config, tree)
        saved = json.dumps(to_dict(config))
        assert from_dict(Config, json.loads(saved)) == config
        assert from_dict(Config, json.loads(saved), Config(minutes=7)) == config or not any(
            getattr(config, name) for name in BUDGETS
        )
        assert read_back("config.json", saved) == config
        assert read_back("config.toml", toml_file(to_dict(config))) == config
        model = config.model.resolved(config.model.vocab_size or 89)
        assert model.resolved() == model.resolved(model.vocab_size) == model
        assert all(getattr(model, name) > 0 for name in ("n_kv_heads", "d_head", "d_ff"))


@tries(150)
@given(RIGHT | WRONG | st.dictionaries(NAMES, ANYTHING, max_size=3))
def test_any_tree_is_a_config_or_one_line(tree: dict[str, Any]) -> None:
    with one_line_or_none():
        assert isinstance(from_dict(Config, tree), Config)
    # A file says the same: TOML has no null and no surrogates, and JSON no word for a long number.
    with one_line_or_none(), contextlib.suppress(UnicodeEncodeError):
        read_back("any.toml", toml_file(tree))
    with one_line_or_none(), contextlib.suppress(UnicodeEncodeError, ValueError):
        content = json.dumps(tree)
        read_back("any.json", content)


@tries(200)
@given(
    st.sampled_from(["a.toml", "a.json"]),
    st.binary(max_size=40)
    | st.text('[]{}="#.,:\n 0123456789_-+eTZabxinf\\"', max_size=40).map(str.encode),
)
@example("a.toml", b"[" * 10**5)
@example("a.json", b'{"a":' * 10**5)
@example("a.json", b"[1]")
@example("a.toml", b"seed = " + b"9" * 5000)
@example("a.json", b'{"seed": ' + b"9" * 5000 + b"}")
@example("a.toml", b"seed = 0x" + b"f" * 5000)
@example("a.toml", b"model = 0x" + b"f" * 5000)
@example("a.toml", b"model.cutoffs = [0x" + b"f" * 5000 + b"]")
@example("a.toml", b"minutes = 1" + b"0" * 400)
def test_any_file_is_a_config_or_one_line(name: str, content: bytes) -> None:
    with one_line_or_none():
        read_back(name, content)


# ---- command lines

FLAGS = [f"--{key}".replace("_", "-") for key in [*KEYS, "config", "out", "resume", "overwrite"]]
WORDS = (
    st.sampled_from(FLAGS)
    | NAMES.map(lambda name: f"--{name}")
    | st.builds("{}={}".format, st.sampled_from(FLAGS), PLAIN_WORDS := st.text(max_size=6))
    | st.sampled_from(["0", "1", "-1", "1e999", "nan", "none", "None", "on", "bpe", "9" * 5000, ""])
    | st.sampled_from([*preset_names(), "--", "-", "-h", "--help", "---", "=", "--=", "True"])
    | PLAIN_WORDS
)


def as_flags(tree: dict[str, Any]) -> list[str]:
    words = []
    for key, value in dotted(tree):
        if isinstance(value, bool):
            table, _, name = key.rpartition(".")
            words.append(f"--{table}.{'' if value else 'no-'}{name}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={value}")
    return words


def settings_or_refusal(read: Callable[[], Config]) -> Config | None:
    with one_line_or_none():
        return read()
    return None


@tries(60)
@given(RIGHT)
@example({"steps": None})
@example({"minutes": "none"})
@example({"epochs": 2, "steps": None})
def test_flags_and_a_file_say_the_same(tree: dict[str, Any]) -> None:
    assume(tree.get("model", {}).get("cutoffs") != [])  # which no flag can say
    preset = load_preset("mini")
    by_file = settings_or_refusal(lambda: from_dict(Config, tree, preset))
    words = ["mini", *as_flags(tree)]
    by_flags = settings_or_refusal(lambda: parse_train(words, "minigpt train")[1].settings)
    assert by_flags == by_file


@tries(60)
@given(st.lists(WORDS, max_size=5) | RIGHT.map(as_flags))
def test_any_command_line_is_read_or_refused_in_one_line(words: list[str]) -> None:
    words = [word.replace("\0", "") for word in words]  # which no argument can hold
    for read in (parse_train, parse_generate):
        said, helped = io.StringIO(), None
        try:
            with one_line_or_none(), contextlib.redirect_stdout(said):
                read(words if read is parse_train else ["demo", *words], "minigpt")
        except SystemExit as stop:
            helped = stop.code
        assert helped is None or (helped == 0 and "usage" in said.getvalue())


# ---- tokenizers

TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ["<unk>", "<eos>", "<|endoftext|>", " ", "\n", "\r", " = T = ", "the", "'s", "语"]
    )
    | st.text("aΣσ'\". ,@-0é\u200d😊\x1c\x85\u2028", max_size=4),
    max_size=12,
).map("".join)


@tries(150)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(257, 290) | st.just(0),
    lines=st.lists(TEXTS.map(lambda text: text.replace("\n", " ")), max_size=6),
    text=TEXTS,
)
@example("char", 0, [], "a")
def test_any_text_through_a_tokenizer_of_any_text(
    kind: Any, size: int, lines: list[str], text: str
) -> None:
    assume(kind not in EXACT or size > 260 or (kind == "char" and size == 0))
    tokenizer = Tokenizer.train(TokenizerConfig(kind, size), lambda: lines)
    for each in (text, "\n".join(lines)):
        ids = tokenizer.encode(each)
        whole = tokenizer.decode(ids)
        if kind in EXACT:
            assert whole == tokenizer.decode(ids, raw=True) == each
            assert tokenizer.eos_id not in ids
        speller = tokenizer.speller()
        assert "".join([*map(speller.add, ids), speller.rest()]) == whole
        assert len(tokenizer.pieces(ids)) == len(ids)
        assert all(piece.isprintable() for piece in tokenizer.pieces(ids))
        assert {*tokenizer.encode_prompt(each)} <= {*range(tokenizer.vocab_size)}
    streamed = [i for row in tokenizer.encode_lines(lines) for i in row]
    if kind in EXACT:
        # Of a line that is the mark of a document's end no text is left, but the mark.
        ends = [line for line in lines if line.strip() == DOCUMENT_MARK]
        texts = [i for i in streamed if i != tokenizer.eos_id]
        assert tokenizer.decode(texts) == "".join(f"{x}\n" for x in lines if x not in ends)
    assert Tokenizer(tokenizer._json).encode(text) == tokenizer.encode(text)


HALVES = st.text(st.characters(categories=["Cs"]) | st.sampled_from("ab <unk>"), max_size=9)


@tries(60)
@given(st.sampled_from(KINDS), st.lists(HALVES, max_size=5))
def test_half_a_character_is_no_text_to_learn_from(kind: Any, lines: list[str]) -> None:
    """No UTF-8 has one, so that no file has; a list of Python may."""
    lines = [line.replace("\n", "") for line in lines]
    try:
        "".join(lines).encode()
    except UnicodeEncodeError:
        with pytest.raises(UserError, match=r"a line to learn from has half a character"):
            Tokenizer.train(TokenizerConfig(kind, 300), lambda: lines)
    for text in lines:
        TOKENIZERS[kind].decode(TOKENIZERS[kind].encode(text)).encode()
        streamed = [i for row in TOKENIZERS[kind].encode_lines([text]) for i in row]
        assert {*streamed} <= {*range(TOKENIZERS[kind].vocab_size)}


@tries(200)
@given(TEXTS)
def test_basic_english_is_that_of_the_classic_rules(text: str) -> None:
    line = "".join(c for c in text if c.isascii() or c.isprintable()).replace("\n", " ")
    tokenizer = Tokenizer.train(TokenizerConfig("basic_english", 0), lambda: [line])
    ids = [tokenizer.token_to_id(word) for word in basic_english(line)]
    assert tokenizer.encode(line) == ids


@tries(150)
@given(st.lists(TEXTS.map(lambda text: "".join(text.split())).filter(bool)), st.booleans())
def test_prose_is_spelt_whatever_the_words(words: list[str], sentence_case: bool) -> None:
    prose = Prose(sentence_case=sentence_case)
    text = "".join([*map(prose.add, words), prose.rest(), prose.end_line()])
    assert text.endswith("\n")
    for word in words:
        taken_apart(word)


# ---- corpora

NUMBERED = [f"word{i} and {i}" for i in range(23)]
FILES = st.binary(max_size=60) | st.lists(TEXTS, max_size=30).map(lambda t: "\n".join(t).encode())
FILES |= st.lists(st.binary(max_size=5), min_size=18, max_size=24).map(b"\r\n".join)
FILES |= st.lists(st.sampled_from([*NUMBERED, "", " "]), min_size=18).map("\n".join).map(str.encode)
SOUND = st.lists(st.sampled_from(NUMBERED), min_size=1).map("\n".join).map(str.encode)
FILE_NAMES = st.sampled_from(
    [f"{split}.txt" for split in SPLITS]
    + [f"wiki.{split}.{end}" for split in SPLITS for end in ("tokens", "raw")]
    + ["a.txt", "b.txt", ".txt", "c.TXT", "语 言.txt", "folder"]
)


def require_parts(corpus: Corpus, text: bytes) -> None:
    """Require that the splits are the text, cut in three."""
    parts = [list(corpus.lines(split)) for split in SPLITS]
    lines = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8-sig").read().split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    joined = [line for part in parts for line in part]
    if len(lines) >= 20:
        assert joined == lines
    assert "".join("".join(joined).split()) == "".join("".join(lines).split())
    assert all("\n" not in line for line in joined)


@tries(100)
@given(FILES)
@example(b"\xef\xbb\xbf" + b"a\rb\r\n" * 10)
@example(b"\xff\xfea\0")
def test_any_file_is_three_splits_or_one_line(content: bytes) -> None:
    with TemporaryDirectory() as folder, one_line_or_none():
        path = Path(folder) / "any.txt"
        path.write_bytes(content)
        require_parts(open_corpus(str(path)), content)


@tries(120)
@given(
    st.dictionaries(FILE_NAMES, FILES | st.none(), max_size=5)
    | st.fixed_dictionaries({f"{split}.txt": FILES for split in SPLITS})
    | st.fixed_dictionaries({f"{name}.txt": SOUND for name in "abc"}, optional={"d.txt": SOUND}),
    st.text(max_size=5),
)
@example({"a.txt": b"word0 and 0\n" * 18 + b"\nword0 and 0"}, "")  # `data` refuses it
def test_any_folder_is_three_splits_or_one_line(files: dict[str, bytes | None], name: str) -> None:
    with TemporaryDirectory() as folder:
        for file, content in files.items():
            path = Path(folder) / file
            path.mkdir() if content is None else path.write_bytes(content)
        with one_line_or_none():
            corpus = open_corpus(folder)
            if sum(file.endswith(".txt") for file in files) > 1:  # of one, some may be blank
                assert all(any(map(str.strip, corpus.lines(split))) for split in SPLITS)
            if "b.txt" in files and "c.txt" in files and "train.txt" not in files:
                whole = b"\n".join(files[name] for name in sorted(files))  # type: ignore[misc]
                require_parts(corpus, whole)
        with one_line_or_none():
            open_corpus(f"{folder}/{name}")


@tries(40)
@given(
    lines=st.lists(
        TEXTS.map(lambda text: " ".join(text.replace("\0", "").split())), min_size=20, max_size=60
    ),
    kind=st.sampled_from(KINDS),
    context_length=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_token_of_a_text_is_counted_once(
    lines: list[str], kind: Any, context_length: int, batch_size: int, seed: int
) -> None:
    with TemporaryDirectory() as folder, one_line_or_none():
        path = Path(folder) / "text.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        corpus = open_corpus(str(path))
        tokenizer = fit_tokenizer(corpus, TokenizerConfig(kind, 280))
        streams = [prepare(corpus, split, tokenizer, Path(folder) / "ids") for split in SPLITS]
        for split, stream in zip(SPLITS, streams, strict=True):
            ids = [i for row in tokenizer.encode_lines(corpus.lines(split)) for i in row]
            assert stream.ids.tolist() == ids
            text = "".join(line + "\n" for line in corpus.lines(split))
            assert stream.n_bytes == len(text.encode())
            assert stream.n_words == len(text.split()) + text.count("\n")
            assert stream.n_eos == ids.count(tokenizer.eos_id)
            assert 0 <= stream.n_unknown <= len(ids)
        batches = TrainingBatches(streams[0], context_length, batch_size, seed)
        n_windows = batches.windows_per_epoch
        rows = [
            row
            for step in range(-(-n_windows // batch_size))
            for row in zip(*batches[step], strict=True)
        ]
        seen = np.sort(np.concatenate([row[1].numpy() for row in rows[:n_windows]]))
        # The targets of an epoch are one stretch of the text, each id of it once.
        n_seen, ids = n_windows * context_length, streams[0].ids
        stretches = (np.sort(ids[i : i + n_seen]) for i in range(1, len(ids) - n_seen + 1))
        assert any(np.array_equal(seen, stretch) for stretch in stretches)
        assert all((row[0][1:] == row[1][:-1]).all() for row in rows)


# ---- sampling

V = 11
LOGIT = st.floats(-9, 9, width=32) | st.sampled_from(
    [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 3e38, -3e38, 1e-45, 80.0]
)
SHARE = st.none() | st.floats(0, 1, exclude_min=True) | st.sampled_from([1e-9, 1.0])
PENALTY = st.none() | st.floats(-2, 2) | st.sampled_from([1e6, -1e6])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0, 5e-324, 1e300]) | st.floats(0, 9),
    top_k=st.none() | st.integers(1, V + 2),
    top_p=SHARE,
    min_p=SHARE,
    typical_p=SHARE,
    repetition_penalty=st.none() | st.floats(0.1, 9) | st.sampled_from([1e6, 1e-6]),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    no_repeat_ngram=st.none() | st.integers(1, 3),
    min_new_tokens=st.integers(0, 9),
)
IDS = st.integers(0, V - 1)


@tries(400)
@given(
    logits=st.lists(LOGIT, min_size=V, max_size=V)
    | st.lists(st.floats(-9, 9, width=16) | st.just(-math.inf), min_size=V, max_size=V)
    | st.builds(lambda i, x: [-math.inf] * i + [x] + [-math.inf] * (V - 1 - i), IDS, LOGIT),
    sampling=SAMPLINGS,
    banned=st.sets(IDS),
    bias=st.dictionaries(IDS, st.floats(-1e6, 1e6)),
    ends=st.sets(IDS, max_size=2),
    ids=st.lists(st.integers(0, V - 1), min_size=1, max_size=9),
)
def test_any_logits_leave_a_choice_or_one_line(
    logits: list[float],
    sampling: Sampling,
    banned: set[int],
    bias: dict[int, float],
    ends: set[int],
    ids: list[int],
) -> None:
    text = Text(ids, 1)
    row = torch.tensor(logits)
    with one_line_or_none():
        wishes = wishes_of(sampling, TokenRules(banned, bias, tuple(ends)))
        found = filtered(row[None], [text], wishes)[0]
        shares = found.softmax(-1)
        assert shares.isfinite().all()
        assert shares.sum().item() == pytest.approx(1, abs=1e-5)
        out = {i for i in range(V) if logits[i] == -math.inf} | banned
        out |= ends if text.n_new < sampling.min_new_tokens else set()
        assert not shares[sorted(out)].any()
        generator = None if sampling.greedy else torch.Generator().manual_seed(1)
        assert shares[choose(found, generator)] > 0


WARPERS = {
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
    "typical_p": transformers.TypicalLogitsWarper,
    "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
    "no_repeat_ngram": transformers.NoRepeatNGramLogitsProcessor,
}


@tries(200)
@given(
    logits=st.lists(st.floats(-9, 9, width=16) | st.just(-math.inf), min_size=V, max_size=V),
    name=st.sampled_from(sorted(WARPERS)),
    sampling=SAMPLINGS,
    ids=st.lists(IDS, min_size=1, max_size=9),
)
@example(
    logits=[0.0 if i == 2 else -math.inf for i in range(V)],
    name="no_repeat_ngram",
    sampling=Sampling(no_repeat_ngram=1),
    ids=[2],
)
def test_filters_of_any_logits_are_those_of_transformers(
    logits: list[float], name: str, sampling: Sampling, ids: list[int]
) -> None:
    value, row = getattr(sampling, name), torch.tensor([logits])
    assume(value is not None and row.isfinite().any())
    if name == "temperature":
        assume(0.01 < value < 100)  # where theirs neither overflows nor goes under
    if name == "typical_p":
        assume(value < 1)  # which theirs refuses
    theirs = WARPERS[name](value)(torch.tensor([ids]), row.clone())
    ours = FILTERS[name](row, [Text(ids, 1)], value)
    # Where nothing is left to draw, neither has numbers; `decoding` says so to whoever writes.
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), equal_nan=True)
    assert torch.equal(ours == -math.inf, theirs == -math.inf)


# ---- windows of evaluation

MODEL = make_model(MODELS["gpt2"])


@torch.no_grad()
def plain_loop(ids: np.ndarray, context: int) -> float:
    """Score disjoint windows one by one, each of its ids once."""
    nats = 0.0
    for begin in range(0, len(ids), context):
        targets = torch.from_numpy(ids[begin : begin + context].astype(np.int64))
        before = int(ids[begin - 1]) if begin else EOS
        inputs = torch.cat((torch.tensor([before]), targets[:-1]))
        log_probs = MODEL(inputs[None])[0].double().log_softmax(-1)
        nats -= log_probs.gather(1, targets[:, None]).sum().item()
    return nats


@tries(80)
@given(
    n=st.integers(0, 90),
    context=st.integers(-1, T + 1),
    stride=st.integers(-1, T + 1) | st.none(),
    batch_sizes=st.lists(st.integers(0, 20), min_size=2, max_size=2),
)
def test_any_windows_score_every_target_once(
    n: int, context: int, stride: int | None, batch_sizes: list[int]
) -> None:
    stream = stream_of(n)
    with one_line_or_none():
        sizes = {"context": context, "stride": stride}
        one, other = (evaluate(MODEL, stream, EOS, batch_size=b, **sizes) for b in batch_sizes)
        assert one.tokens == n
        assert one.nats == pytest.approx(other.nats, rel=1e-5)
        nats = token_nats(MODEL, stream.ids, EOS, **sizes)
        assert nats.shape == (n,)
        assert (nats > 0).all()
        if stride in (None, context):
            assert one.nats == pytest.approx(plain_loop(stream.ids, context), rel=1e-5)


# ---- what else is read from outside

RECORD = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["step", "validation"]) | ANYTHING,
        "step": st.integers(0, 9) | ANYTHING,
        "loss": st.floats() | ANYTHING,
    },
)
LINES = st.binary(max_size=20) | RECORD.map(to_json).map(str.encode)


@tries(100)
@given(st.lists(LINES, max_size=5), st.integers(0, 9))
@example([b"[" * 10**5], 1)
@example([b'{"kind": "step", "step": ' + b"9" * 5000 + b"}"], 1)
@example([b'{"kind": "step", "step": "3"}'], 1)
@example([b'{"kind": "step", "step": 1, "text": "\\ud83d"}'], 1)
def test_any_lines_of_metrics_are_read_or_passed_over(lines: list[bytes], step: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(b"\n".join(lines))
        found = list(read_metrics(path))
        assert all(type(record["step"]) is int for record in found)
        cut_back(path, step)
        kept = list(read_metrics(path))
        assert len(kept) == sum(record["step"] <= step for record in found)
        assert all(record["step"] <= step for record in kept)
        cut_back(path, step)
        assert to_json(list(read_metrics(path))) == to_json(kept)


@tries(300)
@given(
    text=st.text("ab<", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stop=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_is_found_wherever_pieces_end(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    strings = StopStrings(stop)
    ends = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    shown = [strings.add(text[a:b]) for a, b in pairwise(ends)]
    shown.append(strings.rest())
    # The string that is complete first ends the text; of two that end together, the longer.
    complete = (n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop))
    end = next(complete, None)
    longest = 0 if end is None else max(len(s) for s in stop if text[:end].endswith(s))
    assert "".join(shown) == (text if end is None else text[: end - longest])
    assert strings.found == (end is not None)


@tries(200)
@given(
    st.builds(
        "/{} {}".format,
        st.sampled_from(["temperature", "top-k", "seed", "min_p", "Max-new-tokens"]),
        TEXTS | st.integers(0, 99) | st.floats(0, 1) | st.just("none"),
    )
    | st.builds("/{}".format, TEXTS)
    | st.sampled_from([f"/seed {'9' * 5000}", "/temperature 1e999", "/top-k １", "/seed 1_0"])
)
def test_any_command_of_the_prompt_loop_is_obeyed_or_refused(line: str) -> None:
    with one_line_or_none():
        sampling, said = obey(line, Sampling())
        assert isinstance(sampling, Sampling)
        assert said


@tries(100)
@given(
    words=st.lists(st.builds("{}={}".format, TEXTS, st.floats() | TEXTS) | TEXTS, max_size=3),
    piped=FILES,
)
def test_any_bias_and_any_pipe_is_read_or_refused(words: list[str], piped: bytes) -> None:
    with one_line_or_none():
        for i, added in biases(words, TOKENIZERS["bpe"]):
            assert 0 <= i < TOKENIZERS["bpe"].vocab_size
            assert abs(added) <= 1e6
    with one_line_or_none():
        prompts = list(prompts_of(io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8")))
        assert prompts == [""] or all(prompt.strip() for prompt in prompts)
        assert len(prompts) <= piped.count(b"\n") + piped.count(b"\r") + 1
