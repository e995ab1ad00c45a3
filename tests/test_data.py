"""Ids on disk are those of the text, and every window of them is seen once an epoch."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.config import TokenizerConfig
from minigpt.corpus import SPLITS, Corpus, open_corpus
from minigpt.data import TokenStream, TrainingBatches, fit_tokenizer, prepare
from minigpt.errors import UserError
from minigpt.tokenizer import Tokenizer


def corpus_of(**lines: list[str]) -> Corpus:
    return Corpus("own", "a test", {split: lambda s=split: iter(lines[s]) for split in SPLITS})


CORPUS = corpus_of(
    train=["the cat sat .", "", "the <unk> cat ä", " "],
    valid=["the dog <unk> sat .", ""],
    test=["zebra", "ä"],
)


def stream_of(ids: list[int] | np.ndarray, vocab_size: int = 60_013) -> TokenStream:
    return TokenStream(
        ids=np.asarray(ids, np.uint16),
        n_words=0,
        n_bytes=0,
        n_unknown=0,
        n_eos=0,
        sha256="",
        vocab_size=vocab_size,
    )


def test_what_is_counted(tmp_path: Path) -> None:
    tokenizer = fit_tokenizer(CORPUS, TokenizerConfig("wikitext", 0))
    train = prepare(CORPUS, "train", tokenizer, tmp_path)
    assert tokenizer.decode(train.ids.tolist(), raw=True) == (
        "the cat sat . <eos> <eos> the <unk> cat ä <eos> <eos>"
    )
    assert (train.n_words, train.n_bytes, train.n_unknown, train.n_eos) == (12, 34, 0, 4)
    assert train.sha256 == CORPUS.sha256("train")
    assert train.vocab_size == tokenizer.vocab_size == 7
    valid = prepare(CORPUS, "valid", tokenizer, tmp_path)
    # "dog" is in valid alone; the text's own <unk> is no loss of ours.
    assert tokenizer.token_to_id("dog") is None
    assert (valid.n_words, valid.n_unknown, valid.unknown_share) == (7, 1, 1 / 5)
    assert isinstance(valid.ids, np.memmap)


# pytorch/examples#913: a dictionary counted on train and test.
@pytest.mark.parametrize("kind", ["basic_english", "wikitext", "bpe", "char"])
def test_a_word_of_test_alone_is_unknown_to_train(kind: str, tmp_path: Path) -> None:
    tokenizer = fit_tokenizer(CORPUS, TokenizerConfig(kind, 300))  # type: ignore[arg-type]
    assert tokenizer.token_to_id("zebra") is None
    test = prepare(CORPUS, "test", tokenizer, tmp_path)
    if kind in ("basic_english", "wikitext"):
        assert test.ids[0] == tokenizer.unk_id
        assert test.n_unknown == 1
    else:
        assert test.n_unknown == test.unknown_share == 0
        assert tokenizer.decode(test.ids.tolist()) == "zebra\nä\n"
    assert (test.n_words, test.n_bytes) == (4, 9)


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fit_tokenizer(CORPUS, TokenizerConfig("wikitext", 0))
    first = prepare(CORPUS, "train", tokenizer, tmp_path)
    ids_path, counts_path = (next(tmp_path.glob(f"*.{end}")) for end in ("npy", "json"))
    whole = ids_path.read_bytes()

    def broken(*_: object) -> None:
        raise AssertionError("it was encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_lines", broken)
        again = prepare(CORPUS, "train", tokenizer, tmp_path)
        assert again.ids.tolist() == first.ids.tolist()
        assert again.n_words == first.n_words
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for path, damage in [
        (ids_path, whole[:-3]),
        (ids_path, flipped),
        (ids_path, b""),
        (counts_path, b'{"n_words": 3'),
        (counts_path, b"[]"),
        (counts_path, b'{"crc32": 1}'),
    ]:
        path.write_bytes(damage)
        assert prepare(CORPUS, "train", tokenizer, tmp_path).ids.tolist() == first.ids.tolist()
        assert ids_path.read_bytes() == whole
    other = fit_tokenizer(CORPUS, TokenizerConfig("wikitext", 5))
    assert prepare(CORPUS, "train", other, tmp_path).vocab_size == 5
    changed = corpus_of(train=["the cat"], valid=[], test=[])
    assert prepare(changed, "train", tokenizer, tmp_path).n_words == 3
    assert len(list(tmp_path.iterdir())) == 6, "three texts of ids and nothing half-written"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    class InterruptedHereError(Exception):
        pass

    def lines():  # type: ignore[no-untyped-def]
        yield "the cat"
        if reads.pop():
            raise InterruptedHereError

    reads = [True, False]  # the hash is taken first
    corpus = Corpus("own", "a test", {"train": lines, "valid": lines, "test": lines})
    tokenizer = fit_tokenizer(CORPUS, TokenizerConfig("wikitext", 0))
    with pytest.raises(InterruptedHereError):
        prepare(corpus, "train", tokenizer, tmp_path / "ids")
    assert not list((tmp_path / "ids").iterdir())
    (tmp_path / "a file").write_text("")
    with pytest.raises(UserError, match="set MINIGPT_CACHE to a folder"):
        prepare(CORPUS, "train", tokenizer, tmp_path / "a file" / "ids")
    with pytest.raises(UserError, match="own has no words in valid"):
        prepare(corpus_of(train=["a"], valid=[], test=[]), "valid", tokenizer, tmp_path)


def test_a_large_vocabulary_takes_wider_ids(tmp_path: Path) -> None:
    corpus = corpus_of(train=[" ".join(f"w{i}" for i in range(66_000))], valid=["a"], test=["a"])
    tokenizer = fit_tokenizer(corpus, TokenizerConfig("wikitext", 0))
    stream = prepare(corpus, "train", tokenizer, tmp_path)
    assert stream.ids.dtype == np.uint32
    assert int(stream.ids.max()) == 66_000 < stream.vocab_size == 66_002


# Batches


# transformers#47394: labels shifted twice.
# transformers#18167: blocks of unequal length, or none, of a small file.
# build-nanogpt#41: a length that batch × context does not divide.
@settings(deadline=None)
@given(
    n_ids=st.integers(4, 400),
    context_length=st.integers(1, 13),
    batch_size=st.integers(1, 11),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_window_of_an_epoch_is_seen_once(
    n_ids: int, context_length: int, batch_size: int, seed: int
) -> None:
    stream = stream_of(np.arange(n_ids))
    if n_ids < context_length + 1:
        with pytest.raises(UserError, match=f"has {n_ids} tokens: context_length {context_length}"):
            TrainingBatches(stream, context_length, batch_size, seed)
        return
    batches = TrainingBatches(stream, context_length, batch_size, seed)
    n_windows = batches.windows_per_epoch
    assert batches.steps_per_epoch == n_windows / batch_size
    assert n_ids - n_windows * context_length <= max(2 * context_length, n_ids - 1)
    rows = []
    for step in range(3 * n_windows // batch_size + 1):
        batch = batches[step]
        assert batch.inputs.shape == batch.targets.shape == (batch_size, context_length)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, batch.inputs + 1), "the target of i is the id after it"
        rows += batch.inputs.tolist()
    for epoch in range(3):
        seen = Counter(i for row in rows[epoch * n_windows :][:n_windows] for i in row)
        assert set(seen.values()) <= {1}
        first = min(seen)
        assert sorted(seen) == list(range(first, first + n_windows * context_length))


def test_batches_follow_from_seed_and_step() -> None:
    stream = stream_of(np.random.default_rng(3).integers(0, 59, 1009), 59)
    forward, other = (TrainingBatches(stream, 7, 5, seed) for seed in (11, 12))
    steps = [forward[step] for step in range(97)]
    resumed = TrainingBatches(stream, 7, 5, 11)
    for step in (96, 0, 41, 96, 29):
        assert torch.equal(resumed[step].inputs, steps[step].inputs)
        assert torch.equal(resumed[step].targets, steps[step].targets)
    assert not torch.equal(other[0].inputs, steps[0].inputs)
    n_windows = forward.windows_per_epoch
    starts = [forward._start(epoch * n_windows) % 7 for epoch in range(20)]
    assert len({*starts}) > 3, "epochs begin at different places"


# nanoGPT#131: ids beyond the vocabulary crashed in the cross entropy.
def test_ids_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(UserError, match="has the id 61 but the vocabulary has 61 entries"):
        TrainingBatches(stream_of([0, 61, 3, 5], vocab_size=61), 2, 1, 1)


# The real data


def test_wikitext2_is_ready_within_ten_seconds(wikitext2: Path, tmp_path: Path) -> None:
    figures = {
        ("wikitext", 0): [(2088628, 0), (217646, 0), (245569, 0)],
        # 23,767 + 2,461 + 2,891 lines that are not blank end in <eos> beside the classic words
        ("basic_english", 10_000): [(2073757, 111542), (216878, 9784), (244750, 10889)],
    }
    for (kind, size), expected in figures.items():
        started_at = time.perf_counter()
        corpus = open_corpus("wikitext-2")
        tokenizer = fit_tokenizer(corpus, TokenizerConfig(kind, size))  # type: ignore[arg-type]
        streams = [prepare(corpus, split, tokenizer, tmp_path) for split in SPLITS]
        seconds = time.perf_counter() - started_at
        assert [(len(s.ids), s.n_unknown) for s in streams] == expected
        assert [s.n_words for s in streams] == [2088628, 217646, 245569]
        assert [s.n_bytes for s in streams] == [10797148, 1121681, 1256449]
        assert all(s.ids.dtype == np.uint16 for s in streams)
        assert seconds < 20, "10 on an idle machine; this one may be shared"
    assert round(100 * streams[0].unknown_share, 2) == 5.44
    assert tokenizer.vocab_size == 10_000


def test_no_line_of_valid_is_trained_on(wikitext2: Path, tmp_path: Path) -> None:
    corpus = open_corpus("wikitext-2")
    tokenizer = fit_tokenizer(corpus, TokenizerConfig("wikitext", 0))
    train, valid = (prepare(corpus, split, tokenizer, tmp_path) for split in ("train", "valid"))
    assert not np.shares_memory(train.ids, valid.ids)
    batches = TrainingBatches(train, 251, 17, 1)
    n_ids = batches.windows_per_epoch * 251
    assert len(train.ids) - 2 * 251 < n_ids < len(train.ids)
    # Long windows of valid, as bytes, occur nowhere in train.
    text, width = train.ids.tobytes(), 64
    for start in range(0, len(valid.ids) - width, 9973):
        assert valid.ids[start : start + width].tobytes() not in text


# Memory


SMALL_MODEL = "--model.d-model 16 --model.n-heads 2 --model.n-layers 1 --model.d-ff 24"
SMALL_MODEL += " --tokenizer.kind wikitext --tokenizer.vocab-size 997 --validations 1"


def peak_of(argv: list[str], environment: dict[str, str]) -> int:
    """Return the most bytes of its own that a command held.

    Mapped files are left out: the system takes their pages back at any time.
    """
    peak = 0
    with subprocess.Popen(
        [sys.executable, "-m", "minigpt", *argv],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
            peak = max(peak, int(found[1]) << 10) if found else peak
            time.sleep(0.05)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/PID/status")
def test_half_a_gigabyte_of_text_passes_through_a_little_memory(
    wikitext2: Path, tmp_path: Path
) -> None:
    """Lines in, ids out, a few steps on them: never the whole text, nor its ids, in memory."""
    text = (wikitext2 / "wiki.train.tokens").read_bytes()
    peaks = []
    for n_bytes in (1 << 20, 512 << 20):
        data = tmp_path / "text.txt"
        with data.open("wb") as file:
            for _ in range(-(-n_bytes // len(text))):
                file.write(text[:n_bytes])
        run = str(tmp_path / f"run{n_bytes}")
        argv = ["train", "mini", "--data", str(data), "--out", run, "--steps", "3"]
        peaks.append(peak_of([*argv, *SMALL_MODEL.split()], {"MINIGPT_CACHE": str(tmp_path)}))
    small, large = peaks
    print(f"{small >> 20} MiB for 1 MiB of text, {large >> 20} for 512")
    assert large - small < 64 << 20


@pytest.mark.parametrize("kind", ["wikitext", "basic_english"])  # to others a line end is text
def test_a_split_of_blank_lines_alone_is_refused(tmp_path, kind):
    (tmp_path / "text.txt").write_text("some words here\n" * 38 + "\n\nthe end\nof it\n")
    corpus = open_corpus(str(tmp_path / "text.txt"))
    tokenizer = fit_tokenizer(corpus, TokenizerConfig(kind, 0))
    assert prepare(corpus, "test", tokenizer, tmp_path).n_words > 2
    with pytest.raises(UserError, match=r"has no words in valid: give a longer text"):
        prepare(corpus, "valid", tokenizer, tmp_path)
