"""Hostile folders: whatever a run folder holds, it opens as it was or is refused in one line.

Nothing in it is trusted, its hashes least of all: whoever makes a file signs it, too.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minigpt import cli, machine, tokenizer, training_state
from minigpt.checkpoint import Run
from minigpt.config import Config, TokenizerConfig, from_dict
from minigpt.errors import UserError
from minigpt.run_folder import read_config
from minigpt.tokenizer import Tokenizer
from minigpt.train import resume, train
from minigpt.vocabulary import learn
from tiny import run_config, write_corpus

STEP = "checkpoints/3"
JSONS = ["config.json", "tokenizer.json", "last.json", "best.json", "report.json"]
JSONS += [f"{STEP}/trainer.json"]
TENSORS = [f"{STEP}/model.safetensors", f"{STEP}/trainer.safetensors"]
FILES = JSONS + TENSORS
MOST_SECONDS, MOST_BYTES = 60, 1 << 30


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a run folder with all that a run leaves behind."""
    folder = tmp_path_factory.mktemp("hostile")
    config = run_config(write_corpus(folder / "text.txt"), steps=3, validations=1)
    report = {"steps": 3, "elapsed_seconds": 1.5, "valid": {"nats": 2.5}, "config": {"seed": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGPT_CACHE", str(folder / "cache"))
        patch.setattr(training_state, "matrix_rates", lambda device: {})
        patch.setattr(machine, "set_threads", lambda threads: 1)  # others may need the cores
        train(config, folder / "run")
        (folder / "run" / "report.json").write_text(json.dumps(report))
        for name in ("metrics.jsonl", "samples.md"):
            (folder / "run" / name).touch()
        yield folder / "run"


# What is done to a file


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def flip(path: Path, bits: list[tuple[float, int]]) -> None:
    content = bytearray(path.read_bytes())
    for share, bit in bits:
        content[int(len(content) * share)] ^= 1 << bit
    path.write_bytes(content)


def swap(path: Path, other: str) -> None:
    theirs = path.parents[2 if path.parent.parent.name == "checkpoints" else 0] / other
    mine = path.read_bytes()
    path.write_bytes(theirs.read_bytes())
    theirs.write_bytes(mine)


def lose(path: Path, _: None) -> None:
    path.unlink()


def put_beside(path: Path, name: str) -> None:
    with contextlib.suppress(OSError):  # some file systems know no such name
        (path.parent / f"extra{name}").write_bytes(b"x")


def put_in_place(path: Path, what: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if what in INSTEAD:
        path.write_bytes(INSTEAD[what])
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "copy elsewhere":
        path.with_name("elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    else:
        path.symlink_to(what)


INSTEAD = {
    "nothing": b"",
    "byte order mark": b"\xef\xbb\xbf",
    "zeros": bytes(100_000),
    "nested": b'{"a":' * 100_000,
    "nested less": b'{"step":' + b"[" * 900 + b"]" * 900 + b"}",
    "endless number": b'{"step": ' + b"9" * 100_000 + b"}",
    "too much": b"{" + b" " * (40 << 20) + b"}",
    "a pickle": b"\x80\x02cposix\nsystem\nX\x07\x00\x00\x00echo hi\x85R.",
}
LINKS = ["copy elsewhere", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "nowhere", "."]


def say(path: Path, edit: tuple[int, Any]) -> None:
    """Put a value in the place of any other of the file."""
    tree = json.loads(path.read_bytes())
    places = list(places_in(tree))
    holder, key = places[edit[0] % len(places)]
    holder[key] = edit[1]
    path.write_text(json.dumps(tree), encoding="utf-8")


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places_in(tree[key])


def say_twice(path: Path, value: Any) -> None:
    text = path.read_text(encoding="utf-8")
    key = next(iter(json.loads(text)))
    path.write_text(f"{{{json.dumps(key)}: {json.dumps(value)}, {text.lstrip()[1:]}")


def resize(path: Path, sizes: dict[str, int | str]) -> None:
    tree = json.loads(path.read_bytes())
    tree["model"] |= sizes
    path.write_text(json.dumps(tree))


def respell(path: Path, what: str) -> None:
    tree = json.loads(path.read_bytes())
    TOKENIZERS[what](tree, tree["model"]["vocab"])
    path.write_text(json.dumps(tree))


def added(tree: Any, **parts: object) -> None:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tree["added_tokens"].append({"id": 0, "content": "w1", "special": False, **usual, **parts})


def split_at(tree: Any, regex: str) -> None:
    tree["pre_tokenizer"]["pattern"]["Regex"] = regex


TOKENIZERS: dict[str, Callable[[Any, Any], object]] = {
    "a slow pattern": lambda tree, _: split_at(tree, r"(\w+\s?)*(\w+\s?)*(\w+\s?)*$"),
    "a large pattern": lambda tree, _: split_at(tree, "(" * 3_000 + "a{1000}" + "){1000}" * 3_000),
    "no pattern": lambda tree, _: split_at(tree, "(["),
    "another normalizer": lambda tree, _: tree.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b" * 10_000}
    ),
    "a decoder": lambda tree, _: tree.update(decoder={"type": "WordPiece", "prefix": "#"}),
    "padding": lambda tree, _: tree.update(
        padding={
            "strategy": {"Fixed": 1 << 40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
    ),
    "a negative id": lambda _, vocab: vocab.update(w1=-1),
    "an id twice": lambda _, vocab: vocab.update(w1=vocab["w2"]),
    "a far id": lambda _, vocab: vocab.update(w1=2**32 - 1),
    "a huge id": lambda _, vocab: vocab.update(w1=10**30),
    "an id of text": lambda _, vocab: vocab.update(w1="7"),
    "an id with a point": lambda _, vocab: vocab.update(w1=7.0),
    "half a character": lambda _, vocab: vocab.update({"\ud800": vocab.pop("w1")}),
    "an empty word": lambda _, vocab: vocab.update({"": vocab.pop("w1")}),
    "a far addition": lambda tree, _: added(tree, id=2**31, content="new"),
    "a special": lambda tree, _: added(tree, special=True),
    "an addition of no sense": lambda tree, _: tree["added_tokens"].append(3),
    "many additions": lambda tree, _: [added(tree, id=i, content=str(i)) for i in range(20_000)],
    "merges": lambda tree, _: tree["model"].update(type="BPE", merges=[["w1", "w2"]] * 9),
    "no entries": lambda tree, _: tree["model"].update(vocab=[]),
}


def edit_header(path: Path, edit: tuple[int, str, Any]) -> None:
    """Put a value in the place of what the header says of one tensor, or of its own length."""
    at, what, value = edit
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = names[at % len(names)]
    if what == "name":
        header[value] = header.pop(name)
    elif what != "length":
        header[name][what] = value
    spelt = json.dumps(header).encode()
    length = value if what == "length" else len(spelt)
    path.write_bytes(length.to_bytes(8, "little") + spelt + rest)


def edit_tensor(path: Path, edit: tuple[int, str]) -> None:
    at, what = edit
    tensors = load_file(path)
    name = sorted(tensors)[at % len(tensors)]
    tensor = tensors.pop(name)
    if what in ("nan", "inf", "-inf"):
        tensors[name] = torch.full_like(tensor.float(), float(what)).to(tensor.dtype)
    elif what == "flat":
        tensors[name] = tensor.flatten()
    elif what == "more":
        tensors |= {name: tensor, "more": tensor.clone()}
    elif what != "gone":
        tensors[name] = tensor.to(getattr(torch, what))
    save_file(tensors, path)


def sign(run_dir: Path) -> None:
    """Note sizes and hashes of what is there, as whoever made the files would."""
    manifest = run_dir / STEP / "trainer.json"
    needed = [*TENSORS, f"{STEP}/trainer.json", "tokenizer.json"]
    if not all((run_dir / name).is_file() for name in needed):
        return  # a pipe would wait for whoever writes to it
    # There may be nothing to sign, or what nests too deeply to be read.
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        tree = json.loads(manifest.read_bytes())
        contents = {Path(name).name: (run_dir / name).read_bytes() for name in TENSORS}
        tree["files"] = {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        }
        spelt = (run_dir / "tokenizer.json").read_bytes()
        tree["tokenizer"] = hashlib.sha256(spelt).hexdigest()
        manifest.write_text(json.dumps(tree))


# Which of it is tried


class Damage(NamedTuple):
    """One thing done to one file; the functions above are called by their names."""

    how: str
    file: str
    detail: Any

    def do(self, run_dir: Path) -> None:
        globals()[self.how](run_dir / self.file, self.detail)


NUMBERS = [0, -1, 1, 2, 13, 10**4, 10**5, 10**6, 10**7, 10**9, 2**31 - 1, 2**31, 2**63, 10**30]
SIZES = ["vocab_size", "context_length", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff"]
SIZES += ["n_layers", "n_frequent", "n_sampled", "tail_divisor"]
VALUES: list[Any] = [*NUMBERS, 10**400, float("inf"), float("nan"), -0.0, 1e308, True, None]
VALUES += ["", "\ud800", "a\0b", "../../x", "/etc/passwd", "a\nb\x1b[2J", "x" * 10_000, [], {}]
VALUES += [[1] * 1_000, {"a": {"b": [None]}}, [[[[[]]]]]]
NAMES = ["../../x", "/etc/passwd", "a\0b", "", "\ud800", "more", "blocks.-1.x", "__metadata__"]
SHAPES = [[-1], [], [0], [2**31, 2**31], [2**63], [10**30], [1.5], "x", [[1]]]
DTYPES = ["I64", "U8", "BOOL", "F8_E4M3", "F64", "BF16", "F16", "X", "", 3]
OFFSETS = [[-8, 0], [0, 2**62], [5, 3], [0], [0, 0], [0, 10**30], "x"]
LENGTHS = [0, 1, 2**31, 2**40, 2**63, 2**64 - 1, 100_000_001]


def done(how: Callable[..., None], files: list[str], detail: st.SearchStrategy[Any]) -> Any:
    return st.builds(Damage, st.just(how.__name__), st.sampled_from(files), detail)


at = st.integers(0, 10**6)
share = st.floats(0, 1, exclude_max=True)
header = st.one_of(
    st.tuples(at, st.just(what), st.sampled_from(values))
    for what, values in {
        "name": NAMES,
        "shape": SHAPES,
        "dtype": DTYPES,
        "data_offsets": OFFSETS,
        "length": LENGTHS,
    }.items()
)
parts = st.sampled_from(["sinusoidal", "learned", "rotary"]).map(lambda p: {"position": p})
sizes = st.dictionaries(st.sampled_from(SIZES), st.sampled_from(NUMBERS), min_size=1, max_size=3)
contents = ["gone", "nan", "inf", "-inf", "flat", "more", "float16", "bfloat16", "float64", "int32"]
DAMAGES = st.one_of(
    done(cut, FILES, share),
    done(flip, FILES, st.lists(st.tuples(share, st.integers(0, 7)), min_size=1, max_size=4)),
    done(swap, FILES, st.sampled_from(FILES)),
    done(lose, FILES, st.none()),
    done(put_beside, FILES, st.sampled_from([".json", "../x", "\n", "\udc80", " 語"])),
    done(put_in_place, FILES, st.sampled_from([*INSTEAD, "pipe", "folder", *LINKS])),
    done(say, JSONS, st.tuples(at, st.sampled_from(VALUES))),
    done(say_twice, JSONS, st.sampled_from(VALUES)),
    done(resize, ["config.json"], st.builds(lambda a, b: {**a, **b}, parts | st.just({}), sizes)),
    done(respell, ["tokenizer.json"], st.sampled_from(sorted(TOKENIZERS))),
    done(edit_header, TENSORS, header),
    done(edit_tensor, TENSORS, st.tuples(at, st.sampled_from(contents))),
)


# What must come of it


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail where what is done within takes too long, or too much memory."""

    def late(*_: object) -> None:
        raise AssertionError(f"takes more than {MOST_SECONDS} seconds")

    before = peak_bytes(anew=True)
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert peak_bytes() - before < MOST_BYTES


def peak_bytes(*, anew: bool = False) -> int:
    """Return the most memory this process had since it was last asked anew; 0 where none says."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def require_one_line(message: str) -> None:
    assert message.isprintable(), message
    assert ": " in message  # what and which value: what to do
    assert len(message) < 5_000


def copy_of(original: Path, damage: Damage, signed: bool) -> Path:
    run_dir = original.with_name("damaged")
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(original, run_dir)
    damage.do(run_dir)
    if signed:
        sign(run_dir)
    return run_dir


def require_as_it_was(run: Run, whole: Run, changed: set[str], signed: bool) -> None:
    """Each part comes from a file that is as it was, or is what another file says in plain words.

    Nobody can know of a person's config.json that it said something else once.
    """
    assert signed or not changed & {"tokenizer.json", *TENSORS}
    if "config.json" in changed:
        tree = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
        assert run.config == from_dict(Config, tree)
    else:
        assert run.config == whole.config
    text = (run.path / "tokenizer.json").read_bytes()
    assert run.tokenizer.fingerprint == hashlib.sha256(text).hexdigest()
    assert run.step == whole.step
    expected = whole.model.state_dict()
    if TENSORS[0] in changed:
        expected = {**expected, **load_file(run.path / TENSORS[0])}
    for name, tensor in run.model.state_dict().items():
        if name in expected and not (TENSORS[0] in changed and name == "output.table"):
            assert torch.equal(tensor.nan_to_num(), expected[name].to(tensor.dtype).nan_to_num())


def changed_files(original: Path, run_dir: Path) -> set[str]:
    def content(path: Path) -> bytes | None:
        with contextlib.suppress(OSError):  # of a link to what cannot be read
            return path.read_bytes() if path.is_file() else None
        return None

    return {name for name in FILES if content(run_dir / name) != content(original / name)}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(damage=DAMAGES, signed=st.booleans())
def test_a_folder_opens_as_it_was_or_is_refused_in_one_line(
    original: Path, damage: Damage, signed: bool
) -> None:
    run_dir = copy_of(original, damage, signed)
    try:
        with bounded():
            run = Run.open(run_dir)
    except UserError as error:
        require_one_line(str(error))
        return
    require_as_it_was(run, Run.open(original), changed_files(original, run_dir), signed)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(damage=DAMAGES, signed=st.booleans())
def test_a_folder_goes_on_or_is_refused_in_one_line(
    original: Path, damage: Damage, signed: bool
) -> None:
    run_dir = copy_of(original, damage, signed)
    outside = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    with bounded():
        try:
            resume(run_dir)
        except UserError as error:
            require_one_line(str(error))
    assert outside == {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}


COMMANDS = {
    "generate": "RUN --prompt w1 --max-new-tokens 5 --compile off --threads 1",
    "evaluate": "RUN --threads 1",
    "info": "RUN",
    "heads": "RUN --tokens 50 --threads 1",
    "tokenize": "RUN w1",
    "check": "RUN",
    "attention": "RUN w1",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_does_its_work_on_the_whole_folder(original: Path, name: str) -> None:
    assert require_command(name, original) == 0


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(damage=DAMAGES, signed=st.booleans(), name=st.sampled_from(sorted(COMMANDS)))
@example(
    damage=Damage("put_in_place", f"{STEP}/trainer.json", "nested"), signed=True, name="attention"
)
def test_a_command_does_its_work_or_refuses_in_one_line(
    original: Path, damage: Damage, signed: bool, name: str
) -> None:
    run_dir = copy_of(original, damage, signed)
    require_command(name, run_dir)


def require_command(name: str, run_dir: Path) -> int:
    """Run a command, whose exit status must be told of as it should; return that."""
    argv = [name, *(str(run_dir) if word == "RUN" else word for word in COMMANDS[name].split())]
    out, err = io.StringIO(), io.StringIO()
    with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(argv)
    if status == 2:
        line = err.getvalue()
        assert line.startswith("error: ")
        assert line.endswith("\n")
        require_one_line(line[:-1])
    else:
        assert "Traceback" not in err.getvalue()
        assert "internal:" not in err.getvalue()
        assert status == 0 or (status == 1 and name == "check")
    return status


# What once got through, or must never


HUGE = {
    "a width": {"d_model": 10**9},
    "a width of small heads": {"d_model": 10**9, "d_head": 2},
    "layers": {"n_layers": 10_000},
    "rotary positions": {"context_length": 10**9},
    "rotary positions, not so many": {"context_length": 10**6},
    "sinusoidal positions": {"context_length": 10**9, "position": "sinusoidal"},
    "learned positions": {"context_length": 10**9, "position": "learned"},
    "a feed-forward": {"d_ff": 2**31 - 1},
    "heads": {"n_heads": 2**31 - 1, "n_kv_heads": 1, "d_head": 2**31 - 2},
    "clusters": {"output": "adaptive", "cutoffs": list(range(1, 50_000))},
    "words": {"vocab_size": 2**31 - 1},
}


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_model_is_refused_before_anything_of_it_is_made(original: Path, what: str) -> None:
    run_dir = copy_of(original, Damage("resize", "config.json", HUGE[what]), signed=True)
    before = peak_bytes(anew=True)
    with bounded(), pytest.raises(UserError, match=r"does not fit|vocabulary entries"):
        Run.open(run_dir)
    assert peak_bytes() - before < 100 << 20


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_of_another_build_is_refused(original: Path, what: str) -> None:
    run_dir = copy_of(original, Damage("respell", "tokenizer.json", what), signed=True)
    with bounded(), pytest.raises(UserError, match=r"tokenizer\.json is damaged: .* from a copy"):
        Run.open(run_dir)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["pipe", "folder", "/dev/zero", "too much"])
def test_what_is_no_file_or_too_large_a_one_is_refused_at_once(
    original: Path, name: str, what: str
) -> None:
    run_dir = copy_of(original, Damage("put_in_place", name, what), signed=False)
    with bounded(), pytest.raises(UserError):
        Run.open(run_dir, which="last" if name == "last.json" else "best")
    if name != "report.json":  # the report of a run that goes on is written anew
        with bounded(), pytest.raises(UserError):
            resume(run_dir)


def test_the_words_of_another_run_are_refused(original: Path) -> None:
    """As many of them, so that all fits: every word would be another."""
    run_dir = copy_of(original, Damage("put_beside", "config.json", ""), signed=False)
    text = (run_dir / "tokenizer.json").read_text()
    for one, other in (("w1", "w"), ("w2", "w1"), ("w", "w2")):
        text = text.replace(f'"{one}"', f'"{other}"')
    (run_dir / "tokenizer.json").write_text(text)
    for door in (Run.open, resume):
        with pytest.raises(UserError, match="is not the one that the run learned with"):
            door(run_dir)


def test_a_run_that_lost_a_name_is_not_told_to_begin_anew(original: Path) -> None:
    run_dir = copy_of(original, Damage("lose", "last.json", None), signed=False)
    with pytest.raises(UserError, match=r"last\.json is missing: restore it"):
        resume(run_dir)


def test_no_tokenizer_is_made_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TokenizerConfig("wikitext", 0)
    size = len(learn(config, lambda: ["a b"]).to_str(pretty=True))
    monkeypatch.setattr(tokenizer, "MOST_BYTES", size)
    assert Tokenizer.train(config, lambda: ["a b"]).vocab_size == 4
    with pytest.raises(UserError, match=r"5 entries, more than .* set tokenizer\.vocab_size"):
        Tokenizer.train(config, lambda: ["a b c"])


def test_a_file_with_holes_is_not_read_to_its_end(original: Path) -> None:
    run_dir = copy_of(original, Damage("cut", "report.json", 0), signed=False)
    for name in TENSORS:
        with (run_dir / name).open("r+b") as file:
            file.truncate(1 << 42)  # takes no room, and its hash an hour
    with bounded(), pytest.raises(UserError, match="too large for this machine"):
        resume(run_dir)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "float16", "bfloat16"])
def test_weights_may_be_of_any_float_and_nothing_else(original: Path, dtype: str) -> None:
    run_dir = copy_of(original, Damage("edit_tensor", TENSORS[0], (0, dtype)), signed=True)
    if "float" in dtype:
        require_as_it_was(Run.open(run_dir), Run.open(original), {TENSORS[0]}, signed=True)
    else:
        with pytest.raises(UserError, match=r"does not fit its config.json .* in (I|U|B)"):
            Run.open(run_dir)


STATES = {
    "half of a state": ("exp_avg_sq", "gone"),
    "whole numbers": ("exp_avg", "int32"),
    "another shape": ("momentum_buffer", "flat"),
    "no generator": ("generator.cpu", "gone"),
    "generator of floats": ("generator.cpu", "float32"),
    "one too many": ("", "more"),
}


@pytest.mark.parametrize("what", STATES)
def test_states_that_are_not_the_optimizers_are_refused(original: Path, what: str) -> None:
    ending, edit = STATES[what]
    names = sorted(load_file(original / TENSORS[1]))
    at = next(i for i, name in enumerate(names) if name.endswith(ending))
    damage = Damage("edit_tensor", TENSORS[1], (at, edit))
    run_dir = copy_of(original, damage, signed=True)
    with pytest.raises(UserError, match=r"cannot be resumed \(trainer\.safetensors has"):
        resume(run_dir)


def test_rates_come_from_the_config_and_not_from_the_checkpoint(original: Path) -> None:
    """A group of the file could hold anything, and would be computed with."""
    weights = []
    for changes in ({}, {"lr": 1e9, "initial_lr": 1e9, "betas": "x", "momentum": None}):
        run_dir = copy_of(original, Damage("put_beside", "config.json", ""), signed=False)
        manifest = run_dir / STEP / "trainer.json"
        tree = json.loads(manifest.read_bytes())
        for state in tree["optimizers"]:
            state["param_groups"] = [group | changes for group in state["param_groups"]]
        manifest.write_text(json.dumps(tree))
        resume(run_dir, config=replace(read_config(run_dir), steps=5))
        last = Run.open(run_dir, which="last")
        assert last.step == 5
        weights.append(last.model.embedding.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("place", ["checkpoints", STEP, "metrics.jsonl", "samples.md", "lock"])
def test_a_run_that_goes_on_writes_and_removes_nothing_elsewhere(
    original: Path, place: str
) -> None:
    run_dir = copy_of(original, Damage("cut", "report.json", 1), signed=False)
    elsewhere = run_dir.with_name("elsewhere")
    shutil.rmtree(elsewhere, ignore_errors=True)
    elsewhere.mkdir()
    (run_dir / place).rename(elsewhere / "own")
    (elsewhere / "1").mkdir()
    (run_dir / place).symlink_to(elsewhere if place == "checkpoints" else elsewhere / "own")
    if place == "checkpoints":
        (elsewhere / "own" / "3").rename(elsewhere / "3")
    before = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}
    with pytest.raises(UserError, match=r"is a link|cannot be written"):
        resume(run_dir)
    assert before == {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}


def test_a_link_to_a_file_is_a_file_to_who_only_reads(original: Path) -> None:
    run_dir = copy_of(original, Damage("put_in_place", "config.json", "copy elsewhere"), False)
    require_as_it_was(Run.open(run_dir), Run.open(original), set(), signed=False)


def test_a_value_of_a_strangers_does_not_reach_the_terminal_as_it_is(original: Path) -> None:
    run_dir = copy_of(original, Damage("say", "config.json", (0, "a\n\x1b[2J\u202e\ud800")), False)
    tree = json.loads((run_dir / "config.json").read_bytes())
    (run_dir / "config.json").write_text(json.dumps(tree | {"a\n\x1b[2J\u202e\ud800": "x" * 10**6}))
    with pytest.raises(UserError, match=r"key a \\x1b\[2J\\u202e\\ud800 is not known") as error:
        Run.open(run_dir)
    require_one_line(str(error.value))
