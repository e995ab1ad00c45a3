"""What is downloaded is whole, official and no larger than it may be, or one line says why not."""

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from minigpt import downloads
from minigpt.catalogue import TEXTS
from minigpt.checkpoint import Run
from minigpt.corpus import SPLITS, available_offline, open_corpus
from minigpt.errors import UserError
from minigpt.train import train
from namespaces import within
from texts import texts, written
from tiny import run_config


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with no data given and nothing in either cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_DATA", raising=False)
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    return tmp_path


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def shrink(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `text` be each split of a text of the hub, known by its size and its hash."""
    real = TEXTS[name]
    parts = {
        split: part._replace(n_bytes=len(text.encode()), proof=sha256(text))
        for split, part in real.parts.items()
    }
    monkeypatch.setitem(TEXTS, name, real._replace(parts=parts))


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_is_pinned_to_a_commit_and_to_a_size(name: str) -> None:
    text = TEXTS[name]
    assert len(text.revision) == 40
    assert int(text.revision, 16)
    for part in text.parts.values():
        assert part.n_bytes > 1_000_000
        if name == "wikitext-103":  # of which nobody published a hash
            assert isinstance(part.proof, int)
        else:
            assert int(str(part.proof), 16) > 1 << 200


def test_sizes_agree_with_the_card_of_wikitext() -> None:
    """In Arrow a row costs 4 bytes more, and a blank line, " \\n" in the files, is an empty row."""
    rows = {"train": (36_718, 23_767), "valid": (3_760, 2_461), "test": (4_358, 2_891)}
    card = {
        "wikitext-2": {"train": 10_918_118, "valid": 1_134_123, "test": 1_270_947},
        "wikitext-2-raw": {"train": 11_061_717, "valid": 1_159_288, "test": 1_305_088},
        "wikitext-103": {"train": 545_141_915, "valid": 1_154_751, "test": 1_295_575},
    }
    for name, sizes in card.items():
        for split, in_arrow in sizes.items():
            n_rows, n_with_text = rows[split]
            if (name, split) == ("wikitext-103", "train"):
                n_rows, n_with_text = 1_801_350, 1_165_029
            n_bytes = in_arrow - 4 * n_rows + 2 * (n_rows - n_with_text)
            assert TEXTS[name].parts[split].n_bytes == n_bytes, (name, split)


@pytest.mark.parametrize("place", ["given", "data", "cache"])
def test_where_wikitext2_is_looked_for(
    elsewhere: Path, place: str, small_wikitext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIGPT_DATA", str(elsewhere / "given"))
    monkeypatch.setattr(downloads, "require_network", refuse)
    assert not available_offline("wikitext-2")
    for split in SPLITS:
        written(elsewhere / place / f"wikitext-2/wiki.{split}.tokens", small_wikitext)
    assert available_offline("wikitext-2")
    assert texts("wikitext-2")[2] + "\n" == small_wikitext
    written(elsewhere / place / "wikitext-2/wiki.test.tokens", small_wikitext.replace("\n", "\r\n"))
    message = "no network today" if place == "cache" else "is not the official file .its bytes"
    with pytest.raises(UserError, match=message):
        open_corpus("wikitext-2")


def refuse(*_: object, **__: object) -> None:
    raise ConnectionError("no network today\nand a second line")


# A hub that is stood in for


@pytest.fixture
def small_wikitext(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a small text be the whole of WikiText-2: each split, verified by the hash it has."""
    text = " \n = Title = \n \n The text of an <unk> article . \n"
    shrink("wikitext-2", text, monkeypatch)
    return text


def rows_of(text: str) -> list[str]:
    """Return the rows as the hub has them: a blank line is an empty row."""
    return ["" if line == " \n" else line for line in text.splitlines(keepends=True)]


def saved_parquet(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"text": rows_of(text)}), path)
    return path


@pytest.fixture
def hub(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[str], Path]]:
    """Stand in for the hub: `hub["give"]` says what comes for a file."""
    given: dict[str, Callable[[str], Path]] = {}
    announce(monkeypatch)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repository, source, **_: str(given["give"](source)),
    )
    return given


def announce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be there, and say of every file that it is small."""
    monkeypatch.setattr(downloads, "require_network", lambda: None)
    found = SimpleNamespace(location="https://hub.example/file", size=1, etag="no hash")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: found)


def test_a_download_gives_the_official_bytes(
    elsewhere: Path, hub: dict[str, Callable[[str], Path]], small_wikitext: str
) -> None:
    hub["give"] = lambda source: saved_parquet(elsewhere / "hub" / source, small_wikitext)
    corpus = open_corpus("wikitext-2")
    assert corpus.source == "downloaded"
    files = sorted((elsewhere / "cache/wikitext-2").iterdir())
    assert [f.name for f in files] == [f"wiki.{s}.tokens" for s in ("test", "train", "valid")]
    assert all(f.read_bytes() == small_wikitext.encode() for f in files)
    assert open_corpus("wikitext-2").source == str(elsewhere / "cache/wikitext-2")


def forbidden(source: str) -> Path:
    raise RuntimeError("403 Forbidden: None.\nCannot access content at …")


@pytest.mark.parametrize("fault", ["403", "cut", "wrong", "longer", "page", "column"])
def test_a_failed_download_is_one_line_and_leaves_nothing(
    elsewhere: Path, hub: dict[str, Callable[[str], Path]], small_wikitext: str, fault: str
) -> None:
    # pytorch/text#2247 and #2233: an address that answers 403, and one whose file is none.
    def give(source: str) -> Path:
        if fault == "403":
            return forbidden(source)
        text = small_wikitext + "more\n" if fault == "longer" else small_wikitext
        text = text.replace("The", "the") if fault == "wrong" else text
        path = saved_parquet(elsewhere / "hub" / source, text)
        if fault == "cut":
            path.write_bytes(path.read_bytes()[:-99])
        if fault == "page":
            path.write_text("<html>log in to the hotel</html>")
        if fault == "column":
            parquet.write_table(pyarrow.table({"words": ["a"]}), path)
        return path

    hub["give"] = give
    says = {
        "403": "403 Forbidden",
        "cut": "cut short",
        "page": "no parquet",
        "wrong": "other bytes",
        "longer": "has more than the 49 bytes that it may have",
    }
    with pytest.raises(UserError, match=says.get(fault, "wikitext-2 could not")) as error:
        open_corpus("wikitext-2")
    message = str(error.value)
    assert message.startswith("wikitext-2 could not be downloaded (")
    assert (
        "put wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens into data/wikitext-2" in message
    )
    assert "\n" not in message
    assert not [path for path in (elsewhere / "cache").rglob("*") if path.is_file()]
    assert not available_offline("wikitext-2")


def test_what_a_proxy_left_in_the_hubs_cache_is_fetched_anew(
    elsewhere: Path, small_wikitext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(repository: str, source: str, force_download: bool, **_: object) -> str:
        path = saved_parquet(elsewhere / "hub" / source, small_wikitext)
        if not force_download:
            path.write_text("<html>log in to the hotel</html>")
        return str(path)

    announce(monkeypatch)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", give)
    assert texts("wikitext-2")[0] + "\n" == small_wikitext


def test_tinystories_has_no_test_of_its_own(
    elsewhere: Path, hub: dict[str, Callable[[str], Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    story = "Once upon a time .\n<|endoftext|>\n"
    shrink("tinystories", story, monkeypatch)
    hub["give"] = lambda source: Path(written(elsewhere / "hub" / source, story))
    assert texts("tinystories") == [story[:-1], "Once upon a time .", "<|endoftext|>"]


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
@pytest.mark.parametrize("damage", ["cut", "longer", "flipped"])
def test_a_damaged_cache_is_noticed_and_made_anew(
    elsewhere: Path,
    name: str,
    damage: str,
    hub: dict[str, Callable[[str], Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = " \n = Title = \n \n The text of an <unk> article . \n"
    shrink(name, text, monkeypatch)
    if name == "wikitext-103":
        real = TEXTS[name]
        parts = {s: part._replace(proof=text.count("\n")) for s, part in real.parts.items()}
        monkeypatch.setitem(TEXTS, name, real._replace(parts=parts))
    for part in TEXTS[name].parts.values():
        written(elsewhere / "cache" / name / part.file, text)
    file = elsewhere / "cache" / name / "wiki.valid.tokens"
    whole = text.encode()
    file.write_bytes(
        {
            "cut": whole[:-9],
            "longer": whole + b"more\n",
            "flipped": whole[:-3] + b"\n.\n",
        }[damage]
    )
    asked = []

    def give(source: str) -> Path:
        asked.append(source)
        rows = "" if len(asked) < len(TEXTS[name].parts["valid"].sources) else text
        return saved_parquet(elsewhere / "hub" / source, rows)

    hub["give"] = give
    assert open_corpus(name).sha256("valid") == sha256(text)
    assert {source.split("/")[1].split("-")[0] for source in asked} == {"validation"}


@pytest.fixture
def server() -> Iterator[str]:
    """Answer 403 to everything, as the old address of WikiText-2 does."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815, the name that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{refusing.server_port}"
        refusing.shutdown()


# pytorch/text#2247, #2233: an address that answers 403, a file that is no zip.
@pytest.mark.parametrize("name", ["wikitext-2", "hf:someone/something"])
@pytest.mark.parametrize("network", ["refuses", "none"])
def test_the_real_client_gives_up_within_seconds(
    tmp_path: Path, server: str, name: str, network: str
) -> None:
    program = (
        "from minigpt.corpus import *\n"
        f"try: open_corpus({name!r})\n"
        "except ValueError as e: print(e)"
    )
    endpoint = server if network == "refuses" else "http://127.0.0.1:9"
    started_at = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "MINIGPT_CACHE": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert time.perf_counter() - started_at < 20
    message = result.stdout.decode()
    assert message.count("\n") == 1
    why = {"refuses": "(the hub answers 403)", "none": "(no connection to http://127.0.0.1:9)"}
    assert why[network] in message
    assert not list(tmp_path.rglob("*.tokens*"))


# The real client, and a hub on this machine


class Hub:
    """A hub that gives one text for every file, in the way that it is told to."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.size = len(self.text)
        self.etag = sha256(text)
        self.location: str | None = None
        self.drips = False  # a little at a time, without end
        self.n_sent = 0
        self.n_asked = 0
        self.address = ""


@pytest.fixture
def real_hub(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve small stories to the real client, whose cache is empty."""
    hub = Hub("Once upon a time .\n<|endoftext|>\n")
    shrink("tinystories", hub.text.decode(), monkeypatch)

    class Serving(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            elsewhere = hub.location if "/resolve/" in self.path else None
            self.send_response(302 if elsewhere else 200)
            self.send_header("X-Repo-Commit", TEXTS["tinystories"].revision)
            self.send_header("X-Linked-Size", str(hub.size))
            self.send_header("X-Linked-Etag", f'"{hub.etag}"')
            self.send_header("Content-Length", str(hub.size))
            if elsewhere:
                self.send_header("Location", elsewhere)
            self.end_headers()

        def do_GET(self) -> None:
            hub.n_asked += 1
            self.do_HEAD()
            if not hub.drips:
                self.wfile.write(hub.text)
                return
            with suppress(OSError):  # whoever asked is gone
                while True:
                    self.wfile.write(b"word " * 2_000)
                    hub.n_sent += 10_000
                    time.sleep(0.02)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "ENDPOINT": hub.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(elsewhere / "huggingface" / "hub"),
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield hub
        server.shutdown()


def files_below(folder: Path) -> list[str]:
    """Return the names of what was written, locks left out."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return sorted(path.name for path in found)


def test_what_the_real_client_brings(elsewhere: Path, real_hub: Hub) -> None:
    assert open_corpus("tinystories").sha256("train") == sha256(real_hub.text.decode())
    names = ["TinyStories-train.txt", "TinyStories-valid.txt"]
    assert files_below(elsewhere / "cache") == names
    assert real_hub.n_asked >= 1
    n_asked = real_hub.n_asked
    assert open_corpus("tinystories").source == str(elsewhere / "cache" / "tinystories")
    assert real_hub.n_asked == n_asked, "nothing is downloaded twice"


@pytest.mark.parametrize("fault", ["too large", "other bytes", "an open line"])
def test_what_the_hub_must_not_bring(
    elsewhere: Path, real_hub: Hub, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "too large":
        real_hub.size += 1
        says = f"has more than the {len(real_hub.text)} bytes that it may have"
    elif fault == "other bytes":  # as many, and as many lines, where no hash of the text is known
        real = TEXTS["tinystories"]
        parts = {split: part._replace(proof=2) for split, part in real.parts.items()}
        monkeypatch.setitem(TEXTS, "tinystories", real._replace(parts=parts))
        real_hub.text = real_hub.text.replace(b"Once", b"Thus")
        says = "came with other bytes than the hub has"
    else:
        real_hub.location = "http://cdn.example/file"
        says = "at http://cdn.example/file, not over https"
    with pytest.raises(UserError, match=says) as error:
        open_corpus("tinystories")
    assert "\n" not in str(error.value)
    assert not files_below(elsewhere / "cache")
    if fault != "other bytes":
        assert real_hub.n_asked == 0, "it is refused before it comes"


@pytest.mark.parametrize("name", ["wikitext-2", "hf:someone/something"])
def test_a_hub_over_an_open_line_is_refused(
    elsewhere: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.example")
    message = "^HF_ENDPOINT is http://hub.example: give an address that begins with https://$"
    with pytest.raises(UserError, match=message):
        open_corpus(name)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_download_that_is_stopped_leaves_nothing_half(
    elsewhere: Path, real_hub: Hub, number: signal.Signals
) -> None:
    real_hub.drips = True
    story, real_hub.size = real_hub.size, 1_924_281_556
    environment = {"HF_ENDPOINT": real_hub.address, "HF_HOME": str(elsewhere / "huggingface")}
    argv = [sys.executable, "-m", "minigpt", "tokenize", "char", "a", "--data", "tinystories"]
    with subprocess.Popen(
        argv, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not real_hub.n_sent and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert not files_below(elsewhere / "cache")
    assert not files_below(elsewhere / "huggingface" / "hub")
    # The next start finds no lock held and nothing in its way.
    real_hub.drips, real_hub.size = False, story
    assert open_corpus("tinystories").sha256("train") == sha256(real_hub.text.decode())


# A disk that takes no more

STOP_AND_GO = """
import subprocess, sys
from pathlib import Path
from minigpt import catalogue, downloads
from minigpt.corpus import open_corpus
remount, name, given, cache = sys.argv[1:]
text = Path(given).read_text()
real = catalogue.TEXTS[name]
parts = {s: p._replace(n_bytes=len(text), proof=text.count("\\n")) for s, p in real.parts.items()}
catalogue.TEXTS[name] = real._replace(parts=parts)
downloads._fetch = lambda *_, **__: Path(given)
try:
    open_corpus(name)
except ValueError as error:
    print(error)
print(*(path.name for path in Path(cache).rglob("*") if path.is_file()))
subprocess.run(["mount", "-o", remount, cache], check=True)
print(open_corpus(name).sha256("train"))
"""


@pytest.mark.parametrize(
    ("mount", "remount", "why", "left"),
    [
        # The first file fits, the second does not.
        ("size=64k", "remount,size=1m", "No space left on device", "TinyStories-train.txt"),
        ("ro", "remount,rw", "Read-only file system", ""),
    ],
)
def test_a_disk_that_takes_no_more_costs_the_download_alone(
    elsewhere: Path, mount: str, remount: str, why: str, left: str
) -> None:
    text = "Once upon a time .\n" * 2_000
    given, cache = written(elsewhere / "given.txt", text), elsewhere / "cache"
    cache.mkdir()
    done = subprocess.run(
        [
            *within(f"mount -t tmpfs -o {mount} none '{cache}'"),
            *(sys.executable, "-c", STOP_AND_GO, remount, "tinystories", given, str(cache)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    error, files, digest = done.stdout.splitlines()
    assert error.startswith("tinystories could not be downloaded (")
    assert why in error
    assert error.endswith(
        "free some space, or set MINIGPT_CACHE and HF_HOME to folders that have it"
    )
    assert files == left
    assert digest == sha256(text)


# Data sets of the hub

REVISION = "a" * 40


def at_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be there, and every data set stand at one revision unless another is named."""
    monkeypatch.setattr(downloads, "require_network", lambda: None)
    monkeypatch.setattr(
        "huggingface_hub.dataset_info",
        lambda name, revision, timeout: SimpleNamespace(sha=revision or REVISION),
    )


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"train": 101, "validation": 7, "test": 5}, [101, 7, 5]),
        ({"train": 101}, [91, 5, 5]),
        ({"train": 101, "test": 11}, [101, 5, 6]),
        ({"train": 101, "validation": 11}, [101, 5, 6]),
    ],
)
def test_a_data_set_of_the_hub(
    given: dict[str, int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {
        s: {"id": [*range(n)], "story": [f"{s} {i}\n" for i in range(n)]} for s, n in given.items()
    }
    found = {split: datasets.Dataset.from_dict(column) for split, column in columns.items()}
    at_revision(monkeypatch)
    asked = []

    def load_dataset(name: str, config: str, revision: str) -> dict[str, object]:
        asked.append((name, config, revision))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = open_corpus("hf:someone/stories:small")
    # What was loaded can be loaded again, though the data set may change tomorrow.
    assert asked == [("someone/stories", "small", REVISION)]
    assert corpus.name == f"hf:someone/stories@{REVISION}:small"
    assert open_corpus(corpus.name).name == corpus.name
    assert asked[1] == asked[0]
    other = f"hf:someone/stories@{'b' * 40}:small"
    assert open_corpus(other).name == other
    assert asked[2][2] == "b" * 40
    lines = [list(corpus.lines(split)) for split in SPLITS]
    assert [len(split) for split in lines] == sizes
    assert len({line for split in lines for line in split}) == sum(sizes)
    assert lines[0][3] == "train 3"


def test_a_run_keeps_the_revision_of_its_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    at_revision(monkeypatch)
    found = {"train": datasets.Dataset.from_dict({"text": ["the cat sat on a mat"] * 600})}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    config = run_config(Path("hf:someone/stories"), steps=1, validations=1)
    train(config, tmp_path / "run")
    assert Run.open(tmp_path / "run").config.data == f"hf:someone/stories@{REVISION}"


def test_a_data_set_without_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    at_revision(monkeypatch)
    for columns in ({"label": [1, 2, 3]}, {"question": ["a"] * 3, "answer": ["b"] * 3}):
        found = {"train": datasets.Dataset.from_dict(columns)}
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, found=found, **__: found)
        with pytest.raises(UserError, match=f"its columns are {', '.join(columns)}"):
            open_corpus("hf:someone/numbers")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"test": None})
    with pytest.raises(UserError, match="has no train split, only test"):
        open_corpus("hf:someone/numbers")


def test_a_data_set_may_not_bring_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    at_revision(monkeypatch)
    ran = tmp_path / "ran"
    written(tmp_path / "evil" / "evil.py", f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(UserError, match="could not be loaded"):
        open_corpus(f"hf:{tmp_path / 'evil'}")
    assert not ran.exists()
