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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.config import Config, from_dict, to_dict
from minigpt.errors import UserError
from minigpt.files import atomic_write
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


# What stands in a run folder beside checkpoints/: nothing else may be written over these.
RUN_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "last.json", "best.json"}
RUN_FILES |= {"metrics.jsonl", "samples.md", "loss.png", "report.json"}


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


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object at path. Raises UserError where there is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is {path.parent} a run folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it from a copy") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object: restore it from a copy")
    return tree


def check_run_folder(run_dir: Path, *, overwrite: bool) -> None:
    """Raise UserError where a new run may not be put at run_dir; nothing is changed."""
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return
    if not overwrite:
        raise UserError(
            f"{run_dir} exists already: take another --out, or --overwrite to replace it"
        )
    # Only a run is replaced by a run: an --out that names anything else by mistake survives.
    if not (run_dir / "config.json").is_file() or not (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir} is not a run folder: remove it yourself or take another --out")


def create_run_folder(
    run_dir: Path, config: Config, tokenizer: Tokenizer, *, overwrite: bool
) -> None:
    """Make run_dir anew, with its config and tokenizer. Raises UserError as check_run_folder."""
    check_run_folder(run_dir, overwrite=overwrite)
    try:
        if run_dir.exists():
            shutil.rmtree(run_dir)
        (run_dir / "checkpoints").mkdir(parents=True)
        tokenizer.save(run_dir / "tokenizer.json")
        write_json(run_dir / "config.json", to_dict(config))
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written ({error}): take another --out") from None


def read_config(run_dir: Path) -> Config:
    """Return the config of a run. Raises UserError where run_dir is not a run folder."""
    run_dir = run_folder(run_dir)
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
