"""Checkpoints: bit-exact, whole or not there, and no folder of a stranger's does any harm."""

import copy
import hashlib
import json
import random
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minigpt import checkpoint, training_state
from minigpt.checkpoint import (
    Run,
    checkpoint_folder,
    load_trainer,
    load_weights,
    release,
    save_checkpoint,
)
from minigpt.compilation import compile_blocks
from minigpt.config import Config, OptimConfig, TokenizerConfig
from minigpt.errors import UserError
from minigpt.model import MiniGPT, Objective
from minigpt.optim import make_optimizers
from minigpt.run_folder import (
    DEMO,
    new_run_folder,
    read_config,
    read_json,
    run_folder,
    write_json,
)
from minigpt.tokenizer import Tokenizer
from minigpt.train import resume
from tiny import MODELS, B, T, V, make_model, random_ids

TOKENIZER = Tokenizer.train(
    TokenizerConfig("wikitext", 0), lambda: [" ".join(f"w{i}" for i in range(V - 2))]
)


def create_run_folder(path: Path, config: Config, *, overwrite: bool) -> None:
    with new_run_folder(path, config, TOKENIZER, overwrite=overwrite):
        pass


def config_of(name: str = "modern") -> Config:
    return Config(steps=3, model=MODELS[name].resolved(), compile="off")


def stepped(model: MiniGPT, optimizers: list[torch.optim.Optimizer], n_steps: int = 3) -> None:
    """Take steps whose dropout is drawn from PyTorch's generator."""
    for seed in range(n_steps):
        noise = torch.rand(())
        nats, count = Objective(model)(random_ids(B, T, seed=seed), random_ids(B, T, seed=9))
        (nats / count * noise).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def new_run(path: Path, name: str = "modern") -> tuple[MiniGPT, list[torch.optim.Optimizer]]:
    """Make a run folder and return a model that has learnt for three steps."""
    config = config_of(name)
    create_run_folder(path, config, overwrite=False)
    model = make_model(config.model)
    optimizers = make_optimizers(model, OptimConfig())
    stepped(model, optimizers)
    return model, optimizers


@pytest.fixture
def run_dir(tmp_path):
    """Return a run folder with one checkpoint, number 3, called last and best."""
    model, optimizers = new_run(tmp_path / "run")
    save_checkpoint(
        tmp_path / "run", 3, model, optimizers, {"progress": {"step": 3}}, ["last", "best"]
    )
    return tmp_path / "run"


def test_a_checkpoint_in_use_is_never_gone_for_a_moment(run_dir, monkeypatch):
    """The step that a run was resumed from is saved again beside it, then named, then removed."""
    model = Run.open(run_dir).model
    optimizers = make_optimizers(model, OptimConfig())
    write = checkpoint.write_json

    def and_the_old_one_is_whole(path, tree):
        checkpoint_folder(run_dir, "last")
        write(path, tree)

    monkeypatch.setattr(checkpoint, "write_json", and_the_old_one_is_whole)
    for n, folder in ((7, "3-2"), (8, "3"), (9, "3-2")):
        progress = {"progress": {"step": 3, "n": n}}
        save_checkpoint(run_dir, 3, model, optimizers, progress, ["last", "best"])
        assert checkpoint_folder(run_dir, "last").name == folder
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [folder]
        assert read_json(checkpoint_folder(run_dir, "best") / "trainer.json")["progress"]["n"] == n


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_opens_as_it_was_saved(tmp_path, name):
    model, optimizers = new_run(tmp_path / "run", name)
    save_checkpoint(tmp_path / "run", 3, model, optimizers, {}, ["best"])
    run = Run.open(tmp_path / "run")
    assert run.step == 3
    assert run.config == config_of(name)
    assert run.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert run.report == {}
    assert not run.model.training
    expected = model.state_dict()
    found = run.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    if run.config.model.tie_embeddings:  # still one tensor, not two equal ones
        adaptive = run.config.model.output == "adaptive"
        output, embedding = run.model.output, run.model.embedding
        tied = (
            (output.tables[0], embedding.tables[0])
            if adaptive
            else (output.table, embedding.weight)
        )
        assert tied[0] is tied[1]


# transformers#33336, #17032: generators that were not restored.
def test_optimizers_and_generators_come_back_to_the_bit(tmp_path):
    model, optimizers = new_run(tmp_path / "run")
    torch.manual_seed(11)
    torch.rand(7)
    save_checkpoint(
        tmp_path / "run", 3, model, optimizers, {"progress": {"x": [0.1, None]}}, ["last"]
    )
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    stepped(model, optimizers)
    after = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    expected, next_number = copy.deepcopy(model.state_dict()), torch.rand(5)

    folder = checkpoint_folder(tmp_path / "run", "last")
    again = load_weights(folder, config_of())
    optimizers = make_optimizers(again, OptimConfig())
    torch.manual_seed(12)
    assert load_trainer(folder, optimizers)["progress"] == {"x": [0.1, None]}
    assert_same_states([optimizer.state_dict() for optimizer in optimizers], saved)
    stepped(again, optimizers)
    assert_same_states([optimizer.state_dict() for optimizer in optimizers], after)
    assert torch.equal(torch.rand(5), next_number)
    assert all(torch.equal(again.state_dict()[key], expected[key]) for key in expected)


def assert_same_states(found: list, expected: list) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["state"].keys() == other["state"].keys()
        for parameter, values in other["state"].items():
            assert one["state"][parameter].keys() == values.keys()
            for key, tensor in values.items():
                assert torch.equal(one["state"][parameter][key], tensor)
                assert one["state"][parameter][key].dtype == tensor.dtype
        for group, other_group in zip(one["param_groups"], other["param_groups"], strict=True):
            # JSON knows no tuples; nobody asks.
            assert json.dumps(group) == json.dumps(other_group)


# PyTorch's compiler trips over a part of itself that it has retired.
# litgpt#1729: a checkpoint saved under compile that its project could not load.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_saved_under_compile_it_opens_into_a_plain_model(tmp_path):
    model, optimizers = new_run(tmp_path / "run")
    names = list(model.state_dict())
    compile_blocks(model)
    assert list(model.state_dict()) == names
    save_checkpoint(tmp_path / "run", 3, model, optimizers, {}, ["last"])
    assert not any(
        "_orig_mod" in n
        for n in load_file(checkpoint_folder(tmp_path / "run", "last") / "model.safetensors")
    )
    plain = Run.open(tmp_path / "run", which="last").model
    weights = model.state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in plain.state_dict().items())


def test_two_names_may_point_to_two_checkpoints_and_no_third_is_kept(run_dir):
    run = Run.open(run_dir)
    optimizers = make_optimizers(run.model, OptimConfig())

    def kept() -> set[str]:
        return {path.name for path in (run_dir / "checkpoints").iterdir()}

    (run_dir / "checkpoints" / ".7.999.tmp").mkdir()  # of a run that was killed while it wrote
    save_checkpoint(run_dir, 5, run.model, optimizers, {}, ["last"])
    assert kept() == {"3", "5"}
    assert (Run.open(run_dir).step, Run.open(run_dir, which="last").step) == (3, 5)
    save_checkpoint(run_dir, 7, run.model, optimizers, {}, ["last"])
    assert kept() == {"3", "7"}
    save_checkpoint(run_dir, 8, run.model, optimizers, {}, ["last", "best"])
    assert kept() == {"8"}
    assert Run.open(run_dir).step == Run.open(run_dir, which="last").step == 8


def test_saving_a_step_again_replaces_it(run_dir):
    model = make_model(config_of().model, seed=5)
    save_checkpoint(run_dir, 3, model, make_optimizers(model, OptimConfig()), {}, ["last"])
    table = Run.open(run_dir, which="last").model.embedding.weight
    assert torch.equal(table, model.embedding.weight)


def test_a_run_that_has_no_best_yet_opens_with_its_last(tmp_path):
    model, optimizers = new_run(tmp_path / "run")
    save_checkpoint(tmp_path / "run", 2, model, optimizers, {}, ["last"])
    assert Run.open(tmp_path / "run").step == 2


@pytest.mark.parametrize(
    "broken", ["_write_weights", "save_file", "write_json", "_sha256", "_flush"]
)
def test_when_writing_fails_the_old_checkpoint_stands_alone(run_dir, monkeypatch, broken):
    run = Run.open(run_dir)
    optimizers = make_optimizers(run.model, OptimConfig())
    before = files_under(run_dir)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, broken, full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(run_dir, 5, run.model, optimizers, {}, ["last", "best"])
    monkeypatch.undo()
    assert files_under(run_dir) == before
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["3"]
    assert Run.open(run_dir).step == 3


def test_a_disk_that_is_really_full_is_an_os_error(run_dir):
    """The library that writes tensors has an error of its own for it."""
    run = Run.open(run_dir)
    before = files_under(run_dir)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="os error"):
            save_checkpoint(run_dir, 5, run.model, [], {}, ["last"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert files_under(run_dir) == before


def test_a_json_file_is_whole_or_not_there(tmp_path):
    write_json(tmp_path / "a.json", {"text": "語", "number": 0.1})
    assert read_json(tmp_path / "a.json") == {"text": "語", "number": 0.1}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"thing": object()})
    assert read_json(tmp_path / "a.json") == {"text": "語", "number": 0.1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# ---- folders that are damaged, half there, or not made by us


def edit_json(path: Path, **changes: object) -> None:
    write_json(path, read_json(path) | changes)


def sign(folder: Path) -> None:
    """Write the hashes of what is there into trainer.json, as whoever made the files would."""
    names = ("model.safetensors", "trainer.safetensors")
    files = {
        name: {
            "size": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in names
    }
    edit_json(folder / "trainer.json", files=files)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_tensor(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    sign(folder)


def put_a_pickle(folder: Path) -> None:
    torch.save({"embedding.weight": torch.zeros(V, 42)}, folder / "model.safetensors")
    sign(folder)


def deepen(path: Path) -> None:
    path.write_text("[" * 100_000)


CKPT = "checkpoints/3"
DAMAGES = {
    "no config": lambda d: (d / "config.json").unlink(),
    "config cut off": lambda d: (d / "config.json").write_text('{"data": "wi'),
    "config empty": lambda d: (d / "config.json").write_bytes(b""),
    "config not UTF-8": lambda d: (d / "config.json").write_bytes(b'{"data": "\xff"}'),
    "config a list": lambda d: (d / "config.json").write_text("[]"),
    "config a folder": lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
    "config too deep": lambda d: deepen(d / "config.json"),
    "config with a key too many": lambda d: edit_json(d / "config.json", extra=1),
    "config of no sense": lambda d: edit_json(d / "config.json", batch_size="many"),
    "config of another model": lambda d: edit_json(
        d / "config.json", model=read_json(d / "config.json")["model"] | {"d_model": 45}
    ),
    "config of a deeper model": lambda d: edit_json(
        d / "config.json", model=read_json(d / "config.json")["model"] | {"n_layers": 3}
    ),
    "config of an impossible model": lambda d: edit_json(
        d / "config.json", model=read_json(d / "config.json")["model"] | {"d_ff": 10**15}
    ),
    "config of another vocabulary": lambda d: edit_json(
        d / "config.json", model=read_json(d / "config.json")["model"] | {"vocab_size": V + 1}
    ),
    "no tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "tokenizer cut off": lambda d: (d / "tokenizer.json").write_text('{"version": "1.0"'),
    "no names": lambda d: [(d / f"{name}.json").unlink() for name in ("last", "best")],
    "name of nothing": lambda d: write_json(d / "best.json", {}),
    "name of a path": lambda d: write_json(d / "best.json", {"step": "../../x"}),
    "name below zero": lambda d: write_json(d / "best.json", {"step": -3}),
    "folder elsewhere": lambda d: write_json(d / "best.json", {"step": 3, "folder": "../3"}),
    "folder of another step": lambda d: write_json(d / "best.json", {"step": 3, "folder": "4"}),
    "name that is no number": lambda d: write_json(d / "best.json", {"step": True}),
    "name of what is gone": lambda d: write_json(d / "best.json", {"step": 4}),
    "name cut off": lambda d: (d / "best.json").write_text('{"st'),
    "name of an endless number": lambda d: (d / "best.json").write_text(
        '{"step": 1' + 600 * "0" + "}"
    ),
    "no checkpoint": lambda d: shutil.rmtree(d / CKPT),
    "no weights": lambda d: (d / CKPT / "model.safetensors").unlink(),
    "weights cut off": lambda d: (d / CKPT / "model.safetensors").write_bytes(
        (d / CKPT / "model.safetensors").read_bytes()[:-100]
    ),
    "weights with a bit flipped": lambda d: flip_a_bit(d / CKPT / "model.safetensors"),
    "optimizer with a bit flipped": lambda d: flip_a_bit(d / CKPT / "trainer.safetensors"),
    "no manifest": lambda d: (d / CKPT / "trainer.json").unlink(),
    "manifest cut off": lambda d: (d / CKPT / "trainer.json").write_text("{"),
    "manifest without files": lambda d: edit_json(d / CKPT / "trainer.json", files={}),
    "manifest of other files": lambda d: edit_json(
        d / CKPT / "trainer.json", files={"../../config.json": {}}
    ),
    "manifest of no sense": lambda d: edit_json(
        d / CKPT / "trainer.json", files={"model.safetensors": 1, "trainer.safetensors": None}
    ),
    "a pickle, signed": lambda d: put_a_pickle(d / CKPT),
    "a tensor too many, signed": lambda d: replace_tensor(d / CKPT, {"extra": torch.zeros(3)}),
    "a tensor of another shape, signed": lambda d: replace_tensor(
        d / CKPT, {"embedding.weight": torch.zeros(V, 5)}
    ),
    "report cut off": lambda d: (d / "report.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_a_users_error_of_one_line(run_dir, damage):
    DAMAGES[damage](run_dir)
    with pytest.raises(UserError) as error:
        Run.open(run_dir)
    assert "\n" not in str(error.value)
    assert ":" in str(error.value)  # what to do
    assert str(run_dir) in str(error.value)


def edited_group(d: Path, **changes: object) -> None:
    trainer = read_json(d / CKPT / "trainer.json")
    trainer["optimizers"][0]["param_groups"][0] |= changes
    write_json(d / CKPT / "trainer.json", trainer)


def replace_state(d: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = d / CKPT / "trainer.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), path)
    sign(d / CKPT)


UNRESUMABLE = {
    "no optimizers": lambda d: edit_json(d / CKPT / "trainer.json", optimizers=[]),
    "optimizers of no sense": lambda d: edit_json(d / CKPT / "trainer.json", optimizers=5),
    "an optimizer of no sense": lambda d: edit_json(d / CKPT / "trainer.json", optimizers=["a", 1]),
    "groups of no sense": lambda d: edit_json(
        d / CKPT / "trainer.json", optimizers=[{"param_groups": [3]}, {"param_groups": [None]}]
    ),
    "a parameter too few": lambda d: edited_group(d, params=[0, 1, 2]),
    "no generator": lambda d: replace_state(d, "generator.cpu", None),
    "a generator of another size": lambda d: replace_state(
        d, "generator.cpu", torch.zeros(3, dtype=torch.uint8)
    ),
    "a generator of floats": lambda d: replace_state(d, "generator.cpu", torch.zeros(3)),
    "a state of no optimizer": lambda d: replace_state(d, "optimizer.9.0.x", torch.zeros(1)),
    "a state of no name": lambda d: replace_state(d, "optimizer.x", torch.zeros(1)),
    "no trainer state": lambda d: (
        (d / CKPT / "trainer.safetensors").write_bytes(b"\0" * 100),
        sign(d / CKPT),
    ),
}


@pytest.mark.parametrize("damage", UNRESUMABLE)
def test_a_run_that_cannot_go_on_is_a_users_error_of_one_line(run_dir, damage):
    UNRESUMABLE[damage](run_dir)
    folder = checkpoint_folder(run_dir, "last")
    optimizers = make_optimizers(make_model(config_of().model), OptimConfig())
    with pytest.raises(UserError, match="cannot be resumed") as error:
        load_trainer(folder, optimizers)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("progress", [None, 3, {}, {"step": 3, "extra": 1}])
def test_a_run_that_forgot_how_far_it_was_cannot_go_on(run_dir, tmp_path, monkeypatch, progress):
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3\n" * 100, encoding="utf-8")
    monkeypatch.setattr(training_state, "matrix_rates", lambda device: {})
    edit_json(run_dir / "config.json", data=str(text), device="cpu", threads=1)
    edit_json(run_dir / CKPT / "trainer.json", progress=progress)
    if progress == {}:
        trainer = read_json(run_dir / CKPT / "trainer.json")
        del trainer["progress"]
        write_json(run_dir / CKPT / "trainer.json", trainer)
    with pytest.raises(UserError, match="does not say how far the run was"):
        resume(run_dir)


# nanoGPT#131: ids beyond the vocabulary crashed in the cross entropy.
def test_a_tokenizer_of_another_size_cannot_go_on(run_dir):
    smaller = Tokenizer.train(TokenizerConfig("wikitext", 0), lambda: ["w1 w2"])
    smaller.save(run_dir / "tokenizer.json")
    edit_json(run_dir / "config.json", data="python-docs", device="cpu", threads=1)
    with pytest.raises(UserError, match="vocabulary entries"):
        resume(run_dir)


# PyTorchStepByStep#61: pickles that PyTorch 2.6 refuses.
def test_nothing_in_a_folder_is_run_or_written_by_opening_it(run_dir):
    put_a_pickle(run_dir / CKPT)
    before = files_under(run_dir)
    with pytest.raises(UserError, match="does not fit its config"):
        Run.open(run_dir)
    assert files_under(run_dir) == before


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_of_any_file_can_crash_the_reader(run_dir, seed):
    """Whatever one changes, the run opens as it was or is refused in one line."""
    draw = random.Random(seed)
    files = sorted(path for path in run_dir.rglob("*.json") if path.name != "tokenizer_config.json")
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)
    try:
        Run.open(run_dir)
    except UserError as refused:
        message = str(refused)
    else:
        message = ""
    assert "\n" not in message


# ---- which folders may be written to


def test_a_folder_that_is_no_run_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_config(tmp_path / "nothing")
    with pytest.raises(UserError, match="is not a run folder"):
        Run.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file is a file: give the folder"):
        Run.open(tmp_path / "file")


def test_a_run_is_replaced_only_when_asked(run_dir):
    before = files_under(run_dir)
    with pytest.raises(UserError, match=r"exists already: .* --overwrite"):
        create_run_folder(run_dir, config_of(), overwrite=False)
    assert files_under(run_dir) == before
    create_run_folder(run_dir, replace(config_of(), seed=7), overwrite=True)
    assert read_config(run_dir).seed == 7
    assert not list((run_dir / "checkpoints").iterdir())
    assert not (run_dir / "best.json").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "half a run"])
def test_overwrite_replaces_nothing_but_a_run(tmp_path, kind):
    out = tmp_path / "thesis"
    if kind == "file":
        out.write_text("years of work")
    else:
        out.mkdir()
        (out / ("config.json" if kind == "half a run" else "thesis.tex")).write_text(
            "years of work"
        )
    with pytest.raises(UserError, match="is not a run folder"):
        create_run_folder(out, config_of(), overwrite=True)
    with pytest.raises(UserError, match="exists already"):
        create_run_folder(out, config_of(), overwrite=False)
    assert "years of work" in {p.read_text() for p in tmp_path.rglob("*") if p.is_file()}


def test_an_empty_folder_may_be_used_and_one_that_cannot_be_written_not(tmp_path):
    (tmp_path / "empty").mkdir()
    create_run_folder(tmp_path / "empty", config_of(), overwrite=False)
    assert read_config(tmp_path / "empty") == config_of()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        create_run_folder(tmp_path / "file" / "run", config_of(), overwrite=False)


# Runs that are given away


def test_a_released_run_has_its_best_weights_in_half_the_bytes_and_all_of_its_words(run_dir):
    run = Run.open(run_dir)
    release(run, run_dir.parent / "given")
    given = Run.open(run_dir.parent / "given")
    assert (given.step, given.config, given.report) == (run.step, run.config, run.report)
    assert given.tokenizer.encode("w1 w2 w0") == run.tokenizer.encode("w1 w2 w0")
    for mine, theirs in zip(run.model.parameters(), given.model.parameters(), strict=True):
        assert theirs.dtype == torch.float32
        assert torch.equal(mine.half().float(), theirs)
    assert next(run.model.parameters()).dtype == torch.float32
    sizes = [path.stat().st_size for path in run_dir.parent.glob("*/checkpoints/3/model*")]
    assert min(sizes) < 0.6 * max(sizes)
    files = {path.name for path in (run_dir.parent / "given").rglob("*") if path.is_file()}
    assert "trainer.safetensors" not in files


def test_a_released_run_is_checked_like_any_other(run_dir):
    folder = run_dir.parent / "given"
    release(Run.open(run_dir), folder)
    with pytest.raises(UserError, match="exists already"):
        release(Run.open(run_dir), folder)
    weights = folder / "checkpoints/3/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="damaged"):
        Run.open(folder)


def test_a_released_run_cannot_be_resumed_and_says_so(run_dir):
    folder = run_dir.parent / "given"
    release(Run.open(run_dir), folder)
    with pytest.raises(UserError, match="cannot be resumed: train anew"):
        resume(folder)


def test_demo_is_the_packages_run_unless_there_is_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder("demo") == DEMO
    assert run_folder("runs/demo") == Path("runs/demo")
    Path("demo").mkdir()
    assert run_folder("demo") == DEMO
    Path("demo/config.json").touch()
    assert run_folder("demo") == Path("demo")
