"""The setting of a figure: which preset it is about, which command made it, on what machine.

In: what the command line says. Out: a `Config`, and what every result file tells of its origin.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Any

from minigpt.config import Config, load_file, load_preset
from minigpt.report import hardware, versions


def named_config(name: str) -> Config:
    """Return a preset by name, or what a .toml file says. Raises UserError for any other name."""
    return load_file(Path(name)) if name.endswith(".toml") else load_preset(name)


def command(script: str, words: list[str]) -> str:
    """Return the command line of a script of this folder, with names in place of paths."""
    return shlex.join(["python", f"benchmarks/{script}", *map(without_folder, words)])


def without_folder(word: str) -> str:
    """Return a word of a command line, `--flag=` and all, without the folder of its path."""
    flag, equals, value = word.rpartition("=")
    return flag + equals + (Path(value).name if "/" in value else value)


def machine(rates: dict[str, float]) -> dict[str, Any]:
    """Return the machine: its matrix rates, as measured, its software, its processor and cores."""
    return {
        "matrix_gflops": rates,
        "versions": versions(),
        "hardware": {**hardware(), "cores": os.cpu_count()},
    }


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    # Not getrusage: a child's peak there begins with what its parent held when it was born.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    return 1024 * int(peak)
