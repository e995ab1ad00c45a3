"""Text on one side, batches of ids on the other, an array on disk between them.

    Corpus ──prepare──▶ TokenStream (ids, memory-mapped) ──TrainingBatches──▶ Batch(inputs, targets)

The array is found again by the hash of the text and of the tokenizer, so nothing stale is ever
used. Which ids stand in a batch follows from the seed and the number of the step alone: to resume
a run, its step is all there is to know.

B batch · T sequence
"""

import functools
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.config import TokenizerConfig
from minigpt.corpus import Corpus, Split, cache_folder
from minigpt.errors import UserError
from minigpt.files import atomic_write
from minigpt.tokenizer import Tokenizer

_FORMAT = 1  # of the files, and of what is counted: a new number leaves old files unused


@dataclass(frozen=True)
class _Counts:
    """What is known of a text beside its ids."""

    n_words: int  # words between blanks, and one <eos> a line: the unit that can be compared
    n_bytes: int  # in UTF-8, line ends included
    n_unknown: int  # ids that are <unk> though the text does not say so
    n_eos: int
    sha256: str  # of the text
    vocab_size: int


@dataclass(frozen=True)
class TokenStream(_Counts):
    """A split as one long row of ids."""

    ids: NDArray[Any]  # (n,) uint16, or uint32 for a large vocabulary; a memory map

    @property
    def unknown_share(self) -> float:
        """Share of the words, `<eos>` not counted, that became `<unk>` for want of an entry."""
        return self.n_unknown / max(1, len(self.ids) - self.n_eos)


def fit_tokenizer(corpus: Corpus, config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that `config` describes, learnt from train alone."""
    return Tokenizer.train(config, lambda: corpus.lines("train"))


def prepare(
    corpus: Corpus, split: Split, tokenizer: Tokenizer, cache_dir: Path | None = None
) -> TokenStream:
    """Return the ids of a split, from the cache when they are there and whole.

    cache_dir   where arrays are kept; default: `ids` in the cache folder
    Raises UserError where the split gives no ids at all, or where they cannot be written.
    """
    sha256 = corpus.sha256(split)
    key = hashlib.sha256(f"{_FORMAT} {sha256} {tokenizer.fingerprint}".encode()).hexdigest()
    path = (cache_dir or cache_folder() / "ids") / f"{key[:32]}.npy"
    stream = _load(path)
    if stream is None:
        try:
            _write(path, corpus.lines(split), tokenizer, sha256)
        except OSError as error:
            raise UserError(
                f"cache {path.parent} cannot be written to ({error.strerror or error}): "
                "set MINIGPT_CACHE to a folder that can"
            ) from None
        stream = _load(path)
    if stream is None or len(stream.ids) == stream.n_eos:  # blank lines alone, if any
        raise UserError(f"{corpus.name} has no words in {split}: give a longer text")
    return stream


def _load(path: Path) -> TokenStream | None:
    """Return the stream at `path`, or None where it is missing or damaged."""
    try:
        saved = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if zlib.crc32(ids.data) != saved.pop("crc32"):
            return None
        return TokenStream(ids=ids, **saved)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, lines: Iterable[str], tokenizer: Tokenizer, sha256: str) -> None:
    """Write the ids of `lines` to `path`, a batch at a time, and what was counted beside them."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts = dict.fromkeys(("n_words", "n_bytes", "n_spelt"), 0)

    def counted() -> Iterator[str]:
        for line in lines:
            counts["n_words"] += len(line.split()) + 1
            counts["n_bytes"] += len(line.encode()) + 1
            counts["n_spelt"] += tokenizer.n_spelt_unknown(line)
            yield line

    n_ids, n_unknown, n_eos, crc32 = 0, 0, 0, 0
    with atomic_write(path) as file:
        _write_header(file, dtype, 0)
        for batch in _joined(tokenizer.encode_lines(counted())):
            chunk = np.fromiter(batch, dtype, len(batch))
            n_ids += len(chunk)
            n_eos += int((chunk == tokenizer.eos_id).sum())
            if tokenizer.unk_id is not None:
                n_unknown += int((chunk == tokenizer.unk_id).sum())
            crc32 = zlib.crc32(chunk.data, crc32)
            file.write(chunk.data)
        # numpy leaves room in a header for its length to grow: the ids stay where they are.
        file.seek(0)
        _write_header(file, dtype, n_ids)
    saved = _Counts(
        n_words=counts["n_words"],
        n_bytes=counts["n_bytes"],
        n_unknown=n_unknown - counts["n_spelt"],
        n_eos=n_eos,
        sha256=sha256,
        vocab_size=tokenizer.vocab_size,
    )
    # Last, for it is what makes the ids count as whole.
    with atomic_write(path.with_suffix(".json")) as file:
        file.write(json.dumps({**asdict(saved), "crc32": crc32}).encode())


def _write_header(file: Any, dtype: np.dtype[Any], n_ids: int) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (n_ids,)}
    np.lib.format.write_array_header_1_0(file, header)


def _joined(rows: Iterable[list[int]], n_ids: int = 1 << 18) -> Iterator[list[int]]:
    """Yield `rows` joined to lists of about n_ids."""
    joined: list[int] = []
    for row in rows:
        joined += row
        if len(joined) >= n_ids:
            yield joined
            joined = []
    yield joined


class Batch(NamedTuple):
    """What goes in, and what should come out: the target of a position is the id after it."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64


class TrainingBatches:
    """An endless run through a stream, in windows of T ids that do not overlap, shuffled.

    Every epoch starts its windows at another place, so that a window's first id is not always the
    one that is predicted from nothing; up to 2 T ids at the two ends are left out for it. Windows
    that fill no batch at the end of an epoch open the next one.
    """

    def __init__(
        self, stream: TokenStream, context_length: int, batch_size: int, seed: int
    ) -> None:
        """Raise UserError where the text is shorter than a window, or its ids are not its own."""
        n_ids = len(stream.ids)
        if n_ids < context_length + 1:
            raise UserError(
                f"the text has {n_ids} tokens: context_length {context_length} needs at least "
                f"{context_length + 1}, so give more text or a shorter context"
            )
        largest = int(stream.ids.max())
        if largest >= stream.vocab_size:
            raise UserError(
                f"the text has the id {largest} but the vocabulary has {stream.vocab_size} "
                "entries: it was prepared with another tokenizer"
            )
        self._ids = stream.ids
        self._context_length = context_length
        self._batch_size = batch_size
        self._seed = seed
        self.windows_per_epoch = max(1, (n_ids - context_length) // context_length)
        self.steps_per_epoch = self.windows_per_epoch / batch_size
        # A batch lies in two epochs at most, unless the text is tiny.
        self._starts = functools.lru_cache(maxsize=2)(self._starts_of_epoch)

    def __getitem__(self, step: int) -> Batch:
        """Return batch number `step`, a function of the seed and the step alone."""
        first = step * self._batch_size
        starts = np.array([self._start(first + i) for i in range(self._batch_size)])
        # (B, T + 1): one id more than the context, for the last target
        windows = self._ids[starts[:, None] + np.arange(self._context_length + 1)]
        ids = torch.from_numpy(windows.astype(np.int64))
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def _start(self, window: int) -> int:
        """Return where window number `window` of the endless run begins."""
        epoch, place = divmod(window, self.windows_per_epoch)
        return int(self._starts(epoch)[place])

    def _starts_of_epoch(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng([self._seed, epoch])
        unused = len(self._ids) - 1 - self.windows_per_epoch * self._context_length
        offset = int(random.integers(unused + 1))
        order = random.permutation(self.windows_per_epoch).astype(np.int64)
        return offset + order * self._context_length
