"""Kill a training again and again, resume it each time, and compare with the unbroken run.

    python tests/killing.py FOLDER KILLS KILLS_INSIDE_A_WRITE SEED

Prints a line of JSON for each run: its kills, whether the folder could be read after each, and
whether the files came out equal to the bit. Every attempt is a fork of this process, so that it
need not load PyTorch again; SIGKILL leaves it no time for anything.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from minigpt import checkpoint, report, training_state
from minigpt.checkpoint import Run, checkpoint_folder
from minigpt.config import Config, ModelConfig
from minigpt.report import Report
from minigpt.train import resume, train
from tiny import D, F, H, T, run_config, write_corpus

N_STEPS = 200
# What a write to a folder does, as Python's audit hooks tell of it.
WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def config_of(data: Path) -> Config:
    """Return a run of 200 steps with all that is drawn at random: dropout, sampled words, order."""
    model = ModelConfig(
        context_length=T,
        d_model=D,
        n_heads=H,
        d_ff=F,
        n_layers=2,
        dropout=0.1,
        edge_dropout=0.1,
        token_shift=True,
        pointer=True,
        output="sampled",
        n_frequent=11,
        n_sampled=13,
    )
    return run_config(
        data, steps=N_STEPS, accumulation=2, validations=3, model=model, save_minutes=0.1 / 60
    )


def attempt(config: Config, run_dir: Path) -> None:
    """Begin the run, or go on with it where there is one."""
    torch.manual_seed(random.randrange(2**31))  # a new process has other random numbers
    with Report(run_dir, config, Console(quiet=True)) as told:
        if (run_dir / "config.json").exists():
            resume(run_dir, told)
        else:
            train(config, run_dir, told)


def die_inside_a_write(n_th_checkpoint: int, n_th_write: int) -> None:
    """Let this process die at that operation on files of that checkpoint; the first is 0."""
    save, state = checkpoint.save_checkpoint, {"checkpoint": -1, "write": -1, "inside": False}

    def watched(*args: Any) -> None:
        state.update(checkpoint=state["checkpoint"] + 1, write=-1, inside=True)
        save(*args)
        state["inside"] = False

    def listen(event: str, args: tuple[Any, ...]) -> None:
        if event not in WRITES or not state["inside"]:
            return
        state["write"] += 1
        if (state["checkpoint"], state["write"]) == (n_th_checkpoint, n_th_write):
            os.kill(os.getpid(), signal.SIGKILL)

    training_state.save_checkpoint = watched
    sys.addaudithook(listen)


def forked(work: Callable[[], None], kill_after: float | None = None) -> bool:
    """Do work in a process of its own, and kill it after so many seconds. Was it killed?"""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("an attempt failed, see above")
    return os.WIFSIGNALED(status)


def files_of(run_dir: Path) -> dict[str, Any]:
    """Return what a run came to: weights, optimizers and generators, and the losses on the way."""
    found: dict[str, Any] = {}
    for which in ("last", "best"):
        folder = checkpoint_folder(run_dir, which)  # type: ignore[arg-type]
        for name in ("model.safetensors", "trainer.safetensors"):
            found[f"{which} {name}"] = (folder / name).read_bytes()
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found["losses"] = [
        (record["step"], record.get("loss", record.get("valid_loss")))
        for record in map(json.loads, lines)
    ]
    return found


def is_readable(run_dir: Path) -> bool:
    """Can the run be opened, if it has come to be a run?"""
    if not (run_dir / "config.json").exists():
        return True  # the next attempt begins it, in the same place
    return Run.open(run_dir, which="last").step <= N_STEPS and Run.open(run_dir).step <= N_STEPS


def main(folder: Path, n_kills: int, n_inside: int, seed: int) -> None:
    """Kill n_kills times in all, n_inside of them while a checkpoint is written."""
    torch.set_num_threads(1)
    # What takes longer than the run itself: measuring the machine, drawing the curve.
    training_state.matrix_rates = lambda device: {"float32": 1.0, "bfloat16": 1.0}
    report.write_figure = lambda figure, path: None
    random.seed(seed)
    config = config_of(write_corpus(folder / "text.txt"))
    began_at = time.perf_counter()
    forked(lambda: attempt(config, folder / "whole"))
    took = time.perf_counter() - began_at
    expected = files_of(folder / "whole")
    kinds = ["inside"] * n_inside + ["anywhere"] * (n_kills - n_inside)
    random.shuffle(kinds)
    n_runs = 0
    while kinds:
        run_dir = folder / f"run-{n_runs}"
        n_runs += 1
        kills, readable = [], True
        for _ in range(random.randint(1, 3)):
            if not kinds:
                break
            kind = kinds.pop()
            where = (random.randrange(3), random.randrange(20))
            if kind == "inside":

                def work(where: tuple[int, int] = where) -> None:
                    die_inside_a_write(*where)
                    attempt(config, run_dir)  # noqa: B023

                was_killed = forked(work)
            else:
                delay = random.uniform(0, took)
                was_killed = forked(lambda: attempt(config, run_dir), kill_after=delay)  # noqa: B023
            if was_killed:
                kills.append(kind)
            else:  # it had ended before: this one does not count
                kinds.insert(0, kind)
            readable = readable and is_readable(run_dir)
        forked(lambda: attempt(config, run_dir))  # noqa: B023
        found = files_of(run_dir)
        same = [name for name in expected if found[name] == expected[name]]
        left = [path.name for path in run_dir.rglob(".*.tmp")]
        line = {"kills": kills, "readable": readable, "same": same, "left": left}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
