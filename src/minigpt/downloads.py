"""Texts of the Hugging Face hub: how they come, and how they are proven right.

In: the name of a text and a folder. Out: the files in that folder, whole and verified, or one
UserError that says how to supply them by hand. Nothing comes over a line that others can write on
(https only), nothing grows larger than it may, and nothing that comes is run.
"""

import errno
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minigpt.catalogue import TEXTS, HubText, Part
from minigpt.errors import UserError
from minigpt.files import atomic_write


def download(name: str, folder: Path) -> None:
    """Put the files of the text `name` into `folder`, each of them whole or not at all.

    Files in the cache of the hub's client serve without a network. Raises UserError, saying how to
    supply the files by hand, whatever goes wrong: no network, a refusal, a file cut short, wrong
    bytes; for a full disk it says what to free.
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
        except UserError:
            raise
        except Exception as error:  # the hub's client changes its exceptions between versions
            raise UserError(
                f"{name} could not be downloaded ({_reason(error)}): "
                + _advice(
                    error,
                    f"put {', '.join(p.file for p in text.parts.values())} into data/{name}, "
                    "or take python-docs, which needs no network",
                )
            ) from error


def is_whole(path: Path, part: Part) -> bool:
    """Is the file at `path` the one that `part` describes? A file is read once in a process."""
    about = path.stat()
    if about.st_size != part.n_bytes:
        return False
    return part.proof in _fingerprints(path.resolve(), about.st_size, about.st_mtime_ns)


@lru_cache
def _fingerprints(path: Path, *_key: int) -> tuple[int, str]:
    """Return how many lines a file has, and its sha256; _key changes when the file does."""
    digest, n_lines = hashlib.sha256(), 0
    for chunk in _pieces(path):
        digest.update(chunk)
        n_lines += chunk.count(b"\n")
    return n_lines, digest.hexdigest()


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
    """Fetch `part` and write it to `path`, unless it is not what its size and proof say."""
    with atomic_write(path) as file:
        digest, n_bytes, n_lines = hashlib.sha256(), 0, 0
        for source in part.sources:
            for chunk in _chunks(_fetch(text, source, part.n_bytes, force=force)):
                n_bytes += len(chunk)
                if n_bytes > part.n_bytes:
                    raise _too_large(source, part.n_bytes)
                file.write(chunk)
                digest.update(chunk)
                n_lines += chunk.count(b"\n")
        if n_bytes != part.n_bytes or part.proof not in (n_lines, digest.hexdigest()):
            raise _WrongBytesError(f"{part.sources[0]} came with other bytes than it should have")


def _too_large(source: str, limit: int) -> _WrongBytesError:
    return _WrongBytesError(f"{source} has more than the {limit:,} bytes that it may have")


def _fetch(text: HubText, source: str, limit: int, *, force: bool) -> Path:
    """Return where a file of the hub is on this disk, fetched unless it was there.

    Raises _WrongBytesError where it has more than `limit` bytes, or others than the hub says.
    """
    from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache

    where, revision = text.repository, text.revision
    cached = try_to_load_from_cache(where, source, revision=revision, repo_type="dataset")
    sha256 = None
    if force or not isinstance(cached, str):
        require_network()
        url = hf_hub_url(where, source, revision=revision, repo_type="dataset")
        sha256 = _announced(url, source, limit)
    path = Path(
        hf_hub_download(
            where,
            source,
            repo_type="dataset",
            revision=revision,
            etag_timeout=5,
            force_download=force,
        )
    )
    if sha256 not in (None, _fingerprints(path.resolve(), path.stat().st_mtime_ns)[1]):
        raise _WrongBytesError(f"{source} came with other bytes than the hub has")
    return path


def _announced(url: str, source: str, limit: int) -> str | None:
    """Ask about a file before it is fetched: return its sha256, which the hub has of large ones.

    Raises _WrongBytesError where it has more than `limit` bytes or does not say how many,
    ConnectionError where it would come over an open line.
    """
    from huggingface_hub import get_hf_file_metadata

    found = get_hf_file_metadata(url, timeout=5)
    if not _is_private(found.location):
        raise ConnectionError(f"the hub gives {source} at {found.location[:60]}, not over https")
    if found.size is None or found.size > limit:
        raise _too_large(source, limit)
    return found.etag if re.fullmatch("[0-9a-f]{64}", found.etag or "") else None


def require_network() -> None:
    """Raise ConnectionError where the hub does not answer within five seconds.

    One question, asked once: the client itself would try six times, and half a minute, in vain.
    Raises UserError where the hub was moved to an address that is not https.
    """
    from huggingface_hub import constants, get_session

    if not _is_private(constants.ENDPOINT):
        raise UserError(
            f"HF_ENDPOINT is {constants.ENDPOINT}: give an address that begins with https://"
        )
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # of whichever HTTP library the client has
        raise ConnectionError(f"no connection to {constants.ENDPOINT}") from error


def _is_private(url: str) -> bool:
    """Is `url` one that nobody on the way can answer in the hub's place?"""
    parts = urlsplit(url)
    on_this_machine = parts.hostname in ("localhost", "127.0.0.1", "::1")
    return parts.scheme == "https" or (parts.scheme == "http" and on_this_machine)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the text of a file of the hub, a few thousand lines at a time.

    Its parquet files have a row for each line; a blank row was " \\n" in the official files.
    """
    if path.suffix != ".parquet":
        yield from _pieces(path)
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


def open_dataset(name: str) -> tuple[dict[str, Any], str]:
    """Return the splits of a data set, and the name by which just these can be had again.

    name   hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME@REVISION:CONFIG; a name without the
           revision may mean another text tomorrow, and gets the one of today
    Raises UserError where it cannot be had. Only data is read: a script in its place is refused.
    """
    import datasets
    from huggingface_hub import dataset_info

    repository, _, config = name.removeprefix("hf:").partition(":")
    repository, _, wanted = repository.partition("@")
    revision = wanted or None
    try:
        if not datasets.config.HF_HUB_OFFLINE:
            require_network()
            # Asked first, so that all of it is of one revision, and of one that can be named.
            revision = dataset_info(repository, revision=revision, timeout=5).sha
        found = dict(datasets.load_dataset(repository, config or None, revision=revision))
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its readers raise
        raise UserError(
            f"{name} could not be loaded ({_reason(error)}): "
            + _advice(
                error,
                "check its name, write hf:OWNER/NAME:CONFIG where it has several, "
                "or give a .txt file",
            )
        ) from error
    at = f"@{revision}" if revision else ""  # unknown where the client may not ask
    return found, f"hf:{repository}{at}" + (f":{config}" if config else "")


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


_DISK_FAULTS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
}


def _advice(error: Exception, otherwise: str) -> str:
    """Return what to do about an error of the disk, else `otherwise`."""
    if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
        return "free some space, or set MINIGPT_CACHE and HF_HOME to folders that have it"
    return otherwise
