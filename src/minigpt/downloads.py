"""Texts of the Hugging Face hub: which files they are, how they come, how they are proven right.

In: the name of a text and a folder. Out: the files in that folder, whole and verified, or one
UserError that says how to supply them by hand.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import UserError
from minigpt.files import atomic_write


class Part(NamedTuple):
    """One split: its files on the hub, its name here, and what proves it whole."""

    sources: tuple[str, ...]
    file: str
    proof: str | int  # sha256 of the text, or the number of its lines


class HubText(NamedTuple):
    """A text at one commit of its repository, so that it is the same text for ever."""

    repository: str
    revision: str
    parts: Mapping[str, Part]


def _wikitext(config: str, ending: str, proofs: tuple[str | int, ...], n_shards: int) -> HubText:
    train = tuple(f"{config}/train-{i:05d}-of-{n_shards:05d}.parquet" for i in range(n_shards))
    sources = {
        "train": train,
        "valid": (f"{config}/validation-00000-of-00001.parquet",),
        "test": (f"{config}/test-00000-of-00001.parquet",),
    }
    return HubText(
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        {
            split: Part(files, f"wiki.{split}.{ending}", proof)
            for (split, files), proof in zip(sources.items(), proofs, strict=True)
        },
    )


TEXTS = {
    "wikitext-2": _wikitext(
        "wikitext-2-v1",
        "tokens",
        (
            "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        ),
        n_shards=1,
    ),
    "wikitext-2-raw": _wikitext("wikitext-2-raw-v1", "raw", (36_718, 3_760, 4_358), n_shards=1),
    "wikitext-103": _wikitext("wikitext-103-v1", "tokens", (1_801_350, 3_760, 4_358), n_shards=2),
    # It has no test: corpus makes two of its valid.
    "tinystories": HubText(
        "roneneldan/TinyStories",
        "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
        {
            "train": Part(
                ("TinyStories-train.txt",),
                "TinyStories-train.txt",
                "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f",
            ),
            "valid": Part(
                ("TinyStories-valid.txt",),
                "TinyStories-valid.txt",
                "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4",
            ),
        },
    ),
}


def download(name: str, folder: Path) -> None:
    """Put the files of the text `name` into `folder`, each of them whole or not at all.

    Files in the cache of the hub's client serve without a network. Raises UserError, saying how to
    supply the files by hand, whatever goes wrong: no network, a refusal, a file cut short, wrong
    bytes.
    """
    text = TEXTS[name]
    for part in text.parts.values():
        if (folder / part.file).exists() and is_whole(folder / part.file, part):
            continue
        try:
            try:
                _write(text, part, folder / part.file, force=False)
            except _WrongBytesError:
                # What a proxy once left in the hub's cache must not stand in the way for ever.
                _write(text, part, folder / part.file, force=True)
        except Exception as error:  # the hub's client changes its exceptions between versions
            raise UserError(
                f"{name} could not be downloaded ({_reason(error)}): put "
                f"{', '.join(p.file for p in text.parts.values())} into data/{name}, "
                "or take python-docs, which needs no network"
            ) from error


def is_whole(path: Path, part: Part) -> bool:
    """Is the file at `path` the one that `part` describes, as far as can be told in a second?"""
    if isinstance(part.proof, int) or path.stat().st_size > 1 << 26:
        return True  # taken on trust; a download was proven when it was written
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == part.proof


def is_cached(name: str) -> bool:
    """Are all files of the text `name` in the cache of the hub's own client?"""
    from huggingface_hub import try_to_load_from_cache

    text = TEXTS[name]
    return all(
        isinstance(
            try_to_load_from_cache(
                text.repository, source, revision=text.revision, repo_type="dataset"
            ),
            str,
        )
        for part in text.parts.values()
        for source in part.sources
    )


class _WrongBytesError(Exception):
    """What came is not the text that was asked for."""


def _write(text: HubText, part: Part, path: Path, *, force: bool) -> None:
    """Fetch `part` and write it to `path`, unless it is not what its proof says."""
    with atomic_write(path) as file:
        digest, n_lines = hashlib.sha256(), 0
        for source in part.sources:
            for chunk in _chunks(_fetch(text, source, force=force)):
                file.write(chunk)
                digest.update(chunk)
                n_lines += chunk.count(b"\n")
        if part.proof not in (n_lines, digest.hexdigest()):
            raise _WrongBytesError(f"{part.sources[0]} came with other bytes than it should have")


def _fetch(text: HubText, source: str, *, force: bool) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(
        text.repository, source, revision=text.revision, repo_type="dataset"
    )
    if force or not isinstance(cached, str):
        require_network()
    path = hf_hub_download(
        text.repository,
        source,
        repo_type="dataset",
        revision=text.revision,
        etag_timeout=5,
        force_download=force,
    )
    return Path(path)


def require_network() -> None:
    """Raise ConnectionError where the hub does not answer within five seconds.

    One question, asked once: the client itself would try six times, and half a minute, in vain.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # of whichever HTTP library the client has
        raise ConnectionError(f"no connection to {constants.ENDPOINT}") from error


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the text of a file of the hub, a few thousand lines at a time.

    Its parquet files have a row for each line; a blank row was " \\n" in the official files.
    """
    if path.suffix != ".parquet":
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk
        return
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(columns=["text"]):
                rows = batch.column(0).to_pylist()
                yield "".join(row or " \n" for row in rows).encode()
    except (pyarrow.ArrowException, OSError) as error:
        raise _WrongBytesError(f"{path.name} is cut short or no parquet file") from error


def open_dataset(name: str) -> dict[str, Any]:
    """Return the splits of the data set that `hf:OWNER/NAME` or `hf:OWNER/NAME:CONFIG` names.

    Raises UserError where it cannot be had.
    """
    import datasets

    repository, _, config = name.removeprefix("hf:").partition(":")
    try:
        if not datasets.config.HF_HUB_OFFLINE:
            require_network()
        return dict(datasets.load_dataset(repository, config or None))
    except Exception as error:  # the library raises whatever its readers raise
        raise UserError(
            f"{name} could not be loaded ({_reason(error)}): check its name, "
            "write hf:OWNER/NAME:CONFIG where it has several, or give a .txt file"
        ) from error


_TEXT_TYPES = ("string", "large_string")


def text_column(name: str, features: Mapping[str, Any]) -> str:
    """Return the column of a data set that has its text. Raises UserError where that is unclear."""
    texts = [c for c, kind in features.items() if getattr(kind, "dtype", "") in _TEXT_TYPES]
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise UserError(
            f"{name} has no column called text: its columns are {', '.join(features)}, so write "
            "the one you want into a .txt file"
        )
    return texts[0]


def _reason(error: Exception) -> str:
    """Return in a few words what went wrong: the hub's answer where it gave one."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return f"the hub answers {status}"
        cause = cause.__cause__ or cause.__context__
    lines = str(error).strip().splitlines()
    return lines[0][:160].rstrip(".: ") if lines else type(error).__name__
