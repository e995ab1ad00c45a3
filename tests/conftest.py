"""What every test file may use: the real data where it is, a cache of its own, one thread.

`make test` runs files side by side, each process on a core of its own, with all that it starts:
threads of two that share cores wait for each other ten times as long as they compute.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    """Keep the tests of a worker on its own core, before anything has counted cores.

    And let Ctrl-C be heard by what tests start: a shell hides it from what runs in the background,
    and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the user's cache out of the tests, and the tests out of it."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGPT_CACHE", str(folder))
        patch.setenv("HF_HOME", str(folder / "huggingface"))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Leave the other cores alone: small tensors gain nothing from them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def wikitext2() -> Iterator[Path]:
    """Return the folder of the real WikiText-2, under which `open_corpus` finds it too."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    data = Path(os.environ.get("MINIGPT_DATA") or beside)
    if not (data / "wikitext-2" / "wiki.train.tokens").is_file():
        pytest.skip(f"needs WikiText-2 in {data}/wikitext-2 (or elsewhere: set MINIGPT_DATA)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGPT_DATA", str(data))
        yield data / "wikitext-2"
