"""Run folders: where a run lives, what its files are called, and who may write to them.

In: what a user calls a run. Out: its folder, config and tokenizer; `checkpoint` has the rest.

    config.json  tokenizer.json          what the run is
    checkpoints/STEP/                    where it stands: `checkpoint`
    last.json  best.json                 which STEP is which
    metrics.jsonl  samples.md  …         what people read: `report`

JSON alone is read here, and what it says is checked before it is believed: a folder may come from
anyone.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minigpt.config import Config, from_dict, to_dict
from minigpt.errors import UserError
from minigpt.files import atomic_write
from minigpt.reading import parse_json, read_text
from minigpt.tokenizer import Tokenizer


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write tree to path, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(tree, indent=1, ensure_ascii=False).encode() + b"\n")


# The run that comes with the package.
DEMO = Path(__file__).with_name("demo")


def run_folder(path: str | Path) -> Path:
    """Return the folder that a user names: "demo" is the package's, unless a run here is so too."""
    path = Path(path)
    return DEMO if path == Path("demo") and not (path / "config.json").exists() else path


# Held while a training writes to the folder.
LOCK = "lock"

# What stands in a run folder beside checkpoints/: nothing else may be written over these.
RUN_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "last.json", "best.json"}
RUN_FILES |= {LOCK, "metrics.jsonl", "samples.md", "loss.png", "report.json"}


def spare_run(run_dir: Path, out: Path) -> None:
    """Raise UserError where `out` is a file that makes up the run, or that its report wrote."""
    path, root = out.resolve(), run_folder(run_dir).resolve()
    own = path.parent == root and path.name in RUN_FILES
    if own or path.is_relative_to(root / "checkpoints"):
        raise UserError(f"--out is {out}: that is a file of the run, so take another name")
    # A folder that looks like a run would hide the package's from then on.
    hides = root == DEMO and path.is_relative_to(Path("demo").resolve())
    if hides or path.is_relative_to(DEMO):
        raise UserError(
            f"--out is {out}: demo is the run that comes with the package, so write elsewhere"
        )


# Of a model with ten thousand layers, trainer.json has 1 MB; all others are far smaller.
_MOST_BYTES = 1 << 22


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object at path. Raises UserError where there is none."""
    try:
        tree = parse_json(read_text(path, _MOST_BYTES))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is {path.parent} a run folder?") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it from a copy") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object: restore it from a copy")
    return tree


def check_run_folder(run_dir: Path, *, overwrite: bool) -> None:
    """Raise UserError where a new run may not be put at run_dir; what is there stays as it is."""
    if (run_dir / LOCK).exists():
        with locked(run_dir):
            pass  # the lock can be had: nobody trains there
    _check_contents(run_dir, overwrite=overwrite)
    if not run_dir.exists():
        try:
            run_dir.mkdir(parents=True)
            run_dir.rmdir()
        except OSError as error:
            raise UserError(f"{run_dir} cannot be written ({error}): take another --out") from None


def _check_contents(run_dir: Path, *, overwrite: bool) -> None:
    """Raise UserError where what is at run_dir may not make room for a new run."""
    if not run_dir.exists() or (run_dir.is_dir() and _is_unfinished(run_dir)):
        return
    # Only a run is replaced by a run: an --out that names anything else by mistake survives, and so
    # does what somebody put beside one. Without config.json it is what --overwrite, killed, left.
    if not (run_dir / "checkpoints").is_dir() or not _is_ours(run_dir / "config.json"):
        raise UserError(
            f"{run_dir} exists already and is not a run folder: remove it yourself or take another "
            "--out"
        )
    if not overwrite:
        raise UserError(
            f"{run_dir} exists already: take another --out, or --overwrite to replace it"
        )
    kept = {path.name for path in (run_dir / "checkpoints").iterdir() if not path.name[0].isdigit()}
    foreign = _names(run_dir) - RUN_FILES - {"checkpoints", "tensorboard", "attention.png"}
    foreign |= {name for name in kept if not name.endswith(".tmp")}
    if foreign:
        raise UserError(
            f"{run_dir} holds {min(foreign)}, which no training wrote: take it elsewhere, or take "
            "another --out"
        )


def _is_ours(config_path: Path) -> bool:
    """Is it the config of a run, or not there?"""
    try:
        return not config_path.exists() or {"data", "model"} <= read_json(config_path).keys()
    except UserError:
        return False


def _is_unfinished(run_dir: Path) -> bool:
    """Is the folder empty, or one that `new_run_folder` was filling when it was killed?"""
    begun = {"checkpoints", "last.json", "tokenizer.json", "tokenizer_config.json", LOCK}
    checkpoints = run_dir / "checkpoints"
    # A run that has lost its config.json may hold hours of work.
    return _names(run_dir) <= begun and (not checkpoints.is_dir() or _names(checkpoints) <= {"0"})


def _names(folder: Path) -> set[str]:
    """Return the names in a folder, without those of files that were never finished."""
    names = {path.name for path in folder.iterdir()}
    return {name for name in names if not (name.startswith(".") and name.endswith(".tmp"))}


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Within it, no other process trains in run_dir, which is made if it is not there.

    The operating system takes the lock from a process that ends, in whatever way: a file that was
    left behind locks nothing. Raises UserError where another process holds it, and where the folder
    may not be written to.
    """
    lock = FileLock(run_dir / LOCK)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{run_dir} is in use, another training writes there: wait until it has ended"
        ) from None
    except OSError as error:
        raise UserError(
            f"{run_dir} cannot be written ({error}): check its permissions and the space left"
        ) from None
    try:
        for path in run_dir.glob(".*.tmp"):  # files that a killed process never finished
            path.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


@contextmanager
def new_run_folder(
    run_dir: Path, config: Config, tokenizer: Tokenizer, *, overwrite: bool
) -> Iterator[None]:
    """Make run_dir anew, with its config and tokenizer; the block adds what else a run needs.

    The folder is a run once config.json is there, which is written last: whoever is killed before
    leaves a folder that counts as empty. Raises UserError as check_run_folder, and where the disk
    is full or may not be written to.
    """
    try:
        _check_contents(run_dir, overwrite=overwrite)
        if run_dir.exists():
            _empty(run_dir)
        (run_dir / "checkpoints").mkdir(parents=True)
        tokenizer.save(run_dir / "tokenizer.json")
        yield
        write_json(run_dir / "config.json", to_dict(config))
    except OSError as error:
        with suppress(OSError):
            _empty(run_dir)
        raise UserError(f"{run_dir} cannot be written ({error}): take another --out") from None


def _empty(run_dir: Path) -> None:
    """Remove all that is in a run folder, but the lock: first what made it a run."""
    (run_dir / "config.json").unlink(missing_ok=True)
    for path in sorted(run_dir.iterdir(), key=lambda path: path.name == "checkpoints"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def read_config(run_dir: Path) -> Config:
    """Return the config of a run. Raises UserError where run_dir is not a run folder."""
    run_dir = run_folder(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run folder {run_dir} is a file: give the folder that it lies in")
    if not run_dir.is_dir():
        raise UserError(
            f"run folder {run_dir} does not exist: check the path (the run of the package is demo)"
        )
    if not (run_dir / "config.json").is_file():
        raise UserError(f"{run_dir} is not a run folder (no config.json): check the path")
    tree = read_json(run_dir / "config.json")
    try:
        return from_dict(Config, tree)
    except UserError as error:
        raise UserError(f"{run_dir / 'config.json'}: {error}") from None


def read_tokenizer(run_dir: Path, config: Config) -> Tokenizer:
    """Return the tokenizer of a run. Raises UserError where it is not the one of its config."""
    tokenizer = Tokenizer.load(run_dir / "tokenizer.json")
    if config.model.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{run_dir}: config.json has {config.model.vocab_size} vocabulary entries, "
            f"tokenizer.json {tokenizer.vocab_size}: restore the one that was changed"
        )
    return tokenizer
