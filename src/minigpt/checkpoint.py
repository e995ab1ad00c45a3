"""Checkpoints: all that a run needs to be used, or to go on, in a folder that anyone may open.

In: models, optimizers and plain values. Out: files in a run folder, and back.

    checkpoints/STEP/model.safetensors   weights
                     trainer.safetensors optimizer states, random generators
                     trainer.json        step, clock, best figure; sizes and hashes of the other
                                         two, and the hash of tokenizer.json

A run that is given away (`release`) has its best weights alone, in half precision: it can be used,
and not resumed. One comes with the package, by the name of "demo".

A checkpoint is written under another name and renamed when it is whole; a name points to it only
after that. Whenever the machine stops, the folder can be read. Tensors are safetensors and all else
is JSON: opening a stranger's folder runs nothing of theirs.
"""

import copy
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch.optim import Optimizer

from minigpt.config import LARGEST, Config
from minigpt.errors import UserError
from minigpt.machine import memory_bytes
from minigpt.model import MiniGPT
from minigpt.run_folder import (
    new_run_folder,
    read_config,
    read_json,
    read_tokenizer,
    run_folder,
    write_json,
)
from minigpt.tensor_files import check_states, check_weights
from minigpt.tokenizer import Tokenizer

Which = Literal["last", "best"]

# What the libraries raise where a file is whole but says something else than the config.
_UNFIT = (
    SafetensorError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


_WEIGHTS, _TRAINER = "model.safetensors", "trainer.safetensors"


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: MiniGPT,
    optimizers: list[Optimizer],
    trainer: Mapping[str, Any],
    names: list[Which],
    keep: int = 0,
    when_whole: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint, let `names` point to it, and remove those that no name points to.

    trainer      plain values that go into trainer.json
    names        in this order; the last one is where a run goes on from, so it comes last
    keep         so many of the newest that no name points to stay, too
    when_whole   called once its files are there, before names point to it
    Raises OSError where the disk is full or may not be written to; what was there is still there.
    """
    folder = run_dir / "checkpoints"
    in_use = _named(run_dir)
    # A folder in use may not be missed for a moment: a run that was just resumed from this very
    # step, and saves it anew, takes another name. At most two are in use.
    name = next(n for n in (str(step), f"{step}-2", f"{step}-3") if n not in in_use)
    # No last.json can name this, so what a killed process leaves behind is never taken for whole.
    temporary = folder / f".{step}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_files(temporary, model, optimizers, {"step": step, **trainer})
        _remove(folder / name)  # whole, but never named
        temporary.rename(folder / name)
        _flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    when_whole()
    try:
        for which in names:
            write_json(run_dir / f"{which}.json", {"step": step, "folder": name})
    except OSError:
        if name not in _named(run_dir):
            _remove(folder / name)  # it would only fill the disk some more
        raise
    _remove_old(folder, _named(run_dir), keep)


def _remove_old(folder: Path, in_use: set[str], keep: int) -> None:
    """Remove what killed processes left, and all checkpoints but those in use and `keep` others."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    others = [path for path in folder.glob("[0-9]*") if path.name not in in_use]
    others.sort(key=lambda path: [int(n) if n.isdecimal() else -1 for n in path.name.split("-")])
    for path in others[: max(0, len(others) - keep)]:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint under another name, so that half of it is never taken for one."""
    condemned = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(condemned, ignore_errors=True)
    if path.exists():
        path.rename(condemned)
        shutil.rmtree(condemned, ignore_errors=True)


def _named(run_dir: Path) -> set[str]:
    """Return the names of the checkpoint folders that last.json and best.json point to."""
    names = [name for name in ("last", "best") if _is_named(run_dir, name)]
    return {_folder_of(run_dir, name) for name in names}


def _write_files(
    folder: Path, model: MiniGPT, optimizers: list[Optimizer], trainer: Mapping[str, Any]
) -> None:
    """Write the three files of a checkpoint, and wait until the disk has them."""
    tensors, states = _pack(optimizers)
    tensors["generator.cpu"] = torch.get_rng_state()
    device = next(model.parameters()).device
    if device.type == "cuda":
        tensors["generator.cuda"] = torch.cuda.get_rng_state(device)
    try:
        _write_weights(model, folder / _WEIGHTS)
        save_file(tensors, str(folder / _TRAINER))
    except SafetensorError as error:  # its word for a full disk too
        raise OSError(str(error)) from error
    written = {
        **trainer,
        "optimizers": states,
        "files": _noted(folder, [_WEIGHTS, _TRAINER]),
        "tokenizer": _sha256_of_tokenizer(folder),
    }
    write_json(folder / "trainer.json", written)
    for path in folder.iterdir():
        _flush(path)
    _flush(folder)


def _write_weights(model: MiniGPT, path: Path) -> None:
    """Write each parameter once, a tied table too: the same weights give the same bytes.

    The library's own way notes beside them which names are one table, in an order of no account.
    """
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, path)


def _noted(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what is noted of files, by which it is found later whether they are whole."""
    return {
        name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in names
    }


def _flush(path: Path) -> None:
    """Wait until what path holds is on the disk; Windows knows that of files only."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_tokenizer(folder: Path) -> str | None:
    """Return the hash of the tokenizer.json of a checkpoint's run; None where it is gone."""
    path = folder.parents[1] / "tokenizer.json"
    return _sha256(path) if path.is_file() else None


def _require_its_tokenizer(folder: Path) -> None:
    """Raise UserError where the run's tokenizer is not the one that the weights know.

    Another of the same size would open, and every word would be another. Runs of before noted none.
    """
    noted = read_json(folder / "trainer.json").get("tokenizer")
    if noted is not None and noted != _sha256_of_tokenizer(folder):
        raise UserError(
            f"{folder.parents[1] / 'tokenizer.json'} is not the one that the run learned with (its "
            "sha256 differs): restore it from a copy"
        )


def _is_named(run_dir: Path, name: str) -> bool:
    return (run_dir / f"{name}.json").exists()


def _step_of(run_dir: Path, name: str) -> int:
    """Return the step that last.json or best.json names. Raises UserError where it names none."""
    step = read_json(run_dir / f"{name}.json").get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST:
        raise UserError(f"{run_dir / name}.json names step {step!r}: restore it from a copy")
    return step


def _folder_of(run_dir: Path, name: str) -> str:
    """Return the folder that last.json or best.json names. Raises UserError for any other name."""
    step = _step_of(run_dir, name)
    folder = read_json(run_dir / f"{name}.json").get("folder", str(step))
    if folder not in (str(step), f"{step}-2", f"{step}-3"):
        raise UserError(f"{run_dir / name}.json names folder {folder!r}: restore it from a copy")
    return str(folder)


def _pack(optimizers: list[Optimizer]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Part the optimizers' states into tensors, by name, and plain values.

    optimizer.0.12.exp_avg is the exp_avg of parameter 12 of the first optimizer, as PyTorch counts.
    """
    tensors: dict[str, torch.Tensor] = {}
    states = []
    for i, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for parameter, values in state["state"].items():
            for name, tensor in values.items():
                tensors[f"optimizer.{i}.{parameter}.{name}"] = tensor
        states.append({"param_groups": state["param_groups"]})
    return tensors, states


def _unpack(
    tensors: Mapping[str, torch.Tensor], states: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put together again what `_pack` parted."""
    packed = [{"state": {}, "param_groups": state["param_groups"]} for state in states]
    for key, tensor in tensors.items():
        kind, *rest = key.split(".")
        if kind == "optimizer":
            i, parameter, name = rest
            packed[int(i)]["state"].setdefault(int(parameter), {})[name] = tensor
    return packed


def checkpoint_folder(run_dir: Path, which: Which | int) -> Path:
    """Return the folder that `which` points to, once its files have been found to be whole.

    which   last, best, or the step of one that was kept (`keep_checkpoints`)
    Raises UserError for a run that has none yet, and for files of another size or hash than noted.
    """
    run_dir = run_folder(run_dir)
    if isinstance(which, int):
        return _whole(run_dir / "checkpoints" / _kept(run_dir, which))
    if not _is_named(run_dir, which):
        is_given_away = not any((run_dir / "checkpoints").glob(f"[0-9]*/{_TRAINER}"))
        if is_given_away and _is_named(run_dir, "best"):
            raise UserError(
                f"{run_dir} has its best weights alone, not the state of its training, so it "
                "cannot be resumed: train anew"
            )
        if any((run_dir / "checkpoints").glob("[0-9]*")):
            raise UserError(f"{run_dir / which}.json is missing: restore it from a copy")
        raise UserError(f"{run_dir} has no checkpoint yet: train longer, or train it anew")
    return _whole(run_dir / "checkpoints" / _folder_of(run_dir, which))


def _kept(run_dir: Path, step: int) -> str:
    """Return the name of the newest checkpoint of a step. Raises UserError where there is none."""
    names = [path.name for path in (run_dir / "checkpoints").glob("[0-9]*")]
    for name in (f"{step}-3", f"{step}-2", str(step)):
        if name in names:
            return name
    steps = sorted({int(name.split("-")[0]) for name in names if name.split("-")[0].isdecimal()})
    raise UserError(
        f"{run_dir} has no checkpoint of step {step}: it has those of "
        f"{', '.join(map(str, steps)) or 'none'}"
    )


def _whole(folder: Path) -> Path:
    """Return folder. Raises UserError where its files are not of the size and hash as noted."""
    files = read_json(folder / "trainer.json").get("files")
    if not isinstance(files, dict) or set(files) not in ({_WEIGHTS, _TRAINER}, {_WEIGHTS}):
        raise UserError(f"{folder / 'trainer.json'} lists no files: restore it from a copy")
    for name, noted in files.items():
        path = folder / name
        if not path.is_file():
            what = "is no file" if path.exists() else "is missing"
            raise UserError(f"{path} {what}: restore it from a copy")
        # A file with holes takes no room on the disk, but its hash hours.
        if path.stat().st_size > memory_bytes() / 2:
            raise UserError(f"{path} is too large for this machine: take one with more memory")
        try:
            found = {"size": path.stat().st_size, "sha256": _sha256(path)}
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}): restore it from a copy") from None
        if noted != found:
            raise UserError(f"{path} is damaged (size or sha256 differ): restore it from a copy")
    return folder


def load_weights(folder: Path, config: Config) -> MiniGPT:
    """Return the model of a checkpoint. Raises UserError where its weights do not fit config."""
    try:
        check_weights(folder / _WEIGHTS, config.model)
        model = MiniGPT(config.model)
        load_model(model, str(folder / _WEIGHTS))
    except _UNFIT as error:
        raise UserError(
            f"{folder} does not fit its config.json ({_one_line(error)}): restore it from a copy"
        ) from None
    return model


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def load_trainer(folder: Path, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Restore optimizers and random generators from a checkpoint; return its plain values.

    Rates and decays are those that the optimizers have, from the config.
    Raises UserError where the folder does not hold what these optimizers need, and where what it is
    part of has links: a run that goes on writes there, and removes its old checkpoints.
    """
    _require_no_links(folder)
    _require_its_tokenizer(folder)
    trainer = read_json(folder / "trainer.json")
    try:
        check_states(folder / _TRAINER, optimizers)
        tensors = load_file(str(folder / _TRAINER))
        states = _unpack(tensors, trainer["optimizers"])
        for optimizer, state in zip(optimizers, states, strict=True):
            ours = optimizer.state_dict()["param_groups"]
            if [g["params"] for g in state["param_groups"]] != [g["params"] for g in ours]:
                raise ValueError("its optimizers have other parameters")
            optimizer.load_state_dict({**state, "param_groups": ours})
        torch.set_rng_state(tensors["generator.cpu"])
        if "generator.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["generator.cuda"])
    except _UNFIT as error:
        raise UserError(
            f"{folder} cannot be resumed ({_one_line(error)}): restore it from a copy"
        ) from None
    return trainer


def _require_no_links(folder: Path) -> None:
    """Raise UserError where a file of the run leads elsewhere, or is a pipe or a device."""
    run_dir = folder.parents[1]
    for path in (*run_dir.iterdir(), *folder.parent.iterdir(), *folder.iterdir()):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"{path} is a link or no file, and a run that goes on writes there: "
                "put a copy in its place, or take it away"
            )


@dataclass(frozen=True)
class Run:
    """A run folder, opened: all that is needed to use what was trained."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    model: MiniGPT
    step: int
    report: dict[str, Any]
    """The figures of report.json; empty while the run has not ended."""

    @classmethod
    def open(cls, path: str | Path, device: str = "cpu", which: Which | int = "best") -> "Run":
        """Open the run at path with its best (or last) weights, in evaluation mode on device.

        which   best, last, or the step of a checkpoint that was kept
        Raises UserError where path is not a run folder, or anything in it is missing or damaged.
        """
        path = run_folder(path)
        config = read_config(path)
        tokenizer = read_tokenizer(path, config)
        if which == "best" and not _is_named(path, "best"):
            which = "last"  # it was broken off before its first validation
        folder = checkpoint_folder(path, which)
        _require_its_tokenizer(folder)
        model = load_weights(folder, config)
        report = read_json(path / "report.json") if (path / "report.json").exists() else {}
        step = which if isinstance(which, int) else _step_of(path, which)
        return cls(path, config, tokenizer, model.to(device).eval(), step, report)


def release(run: Run, folder: Path) -> None:
    """Write a run that can be given away: its best weights in float16, and nothing of its training.

    Raises UserError where the folder holds something already.
    """
    inner = folder / "checkpoints" / str(run.step)
    with new_run_folder(folder, run.config, run.tokenizer, overwrite=False):
        inner.mkdir()
        _write_weights(copy.deepcopy(run.model).half(), inner / _WEIGHTS)
        noted = {"files": _noted(inner, [_WEIGHTS]), "tokenizer": _sha256_of_tokenizer(inner)}
        write_json(inner / "trainer.json", {"step": run.step, **noted})
        write_json(folder / "best.json", {"step": run.step, "folder": str(run.step)})
        write_json(folder / "report.json", run.report)
