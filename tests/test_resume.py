"""Nothing lost: kills, full disks, two trainings in one folder, and what may change on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from rich.console import Console

from commands import failed
from minigpt import checkpoint, cli, training_state
from minigpt.checkpoint import Run
from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.events import Finished, Noted, Started, Stepped, Validated
from minigpt.metrics import read_metrics
from minigpt.report import Report
from minigpt.run_folder import read_config, read_json, write_json
from minigpt.train import resume, train
from tiny import Recorder, StopAfter, bytes_of, run_config, write_corpus

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    """Measuring the machine takes longer than these runs."""
    rates = {"float32": 1.0, "bfloat16": 1.0}
    monkeypatch.setattr(training_state, "matrix_rates", lambda device: rates)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt")


def notes(told: Recorder) -> list[str]:
    return [event.text for event in told.of(Noted)]


# ---- killed


@pytest.mark.parametrize(
    ("n_kills", "n_inside"), [(3, 1), pytest.param(50, 10, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_comes_to_the_same_bits(tmp_path, n_kills, n_inside):
    command = [sys.executable, str(TESTS / "killing.py"), str(tmp_path), n_kills, n_inside, 5]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    kills = [kill for run in runs for kill in run["kills"]]
    assert (len(kills), kills.count("inside")) == (n_kills, n_inside)
    for run in runs:
        assert run["readable"], run
        assert len(run["same"]) == 5, run
        assert run["left"] == [], run


def test_a_run_can_go_on_from_its_first_moment(corpus, tmp_path):
    """Killed before its first step, it has a checkpoint of the weights that it began with."""

    def kill(event):
        if isinstance(event, Started):
            raise KeyboardInterrupt

    config = run_config(corpus)
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", kill)
    assert Run.open(tmp_path / "parts").step == 0
    resume(tmp_path / "parts")
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_checkpoints_come_between_validations_too(corpus, tmp_path):
    """A run that validates twice, and saves all the time, is killed after step 3 of 10."""

    def kill(event):
        if isinstance(event, Stepped) and event.step == 4:
            raise RuntimeError("power")

    config = run_config(corpus, save_minutes=1e-9)
    train(config, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power"):
        train(config, tmp_path / "parts", kill)
    told = Recorder()
    resume(tmp_path / "parts", told)
    assert told.of(Started)[0].step == 3
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")
    seldom = run_config(corpus, steps=4)
    with pytest.raises(RuntimeError, match="power"):
        train(replace(seldom, validations=1), tmp_path / "seldom", kill)
    assert Run.open(tmp_path / "seldom").step == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_saves_as_ctrl_c_does_and_under_nohup_changes_nothing(
    corpus, tmp_path, ignored
):
    chosen = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, chosen)
    try:
        told = StopAfter(3, signal.SIGHUP)
        train(run_config(corpus), tmp_path / "run", told)
        assert signal.getsignal(signal.SIGHUP) is chosen
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told.of(Finished)[0].reason == ("budget" if ignored else "interrupted")


def test_what_a_killed_start_left_makes_room_and_nothing_else_does(corpus, tmp_path):
    run = tmp_path / "run"
    train(run_config(corpus), run)
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    # Hours of work whose config.json was lost are not taken for a start.
    (run / "config.json").unlink()
    with pytest.raises(UserError, match="exists already"):
        train(run_config(corpus), run)
    # A start that was killed has a first checkpoint at most.
    shutil.rmtree(run)
    (run / "checkpoints" / "0").mkdir(parents=True)
    (run / "checkpoints" / ".0.17.tmp").mkdir()
    (run / "tokenizer.json").write_text("{")
    (run / ".config.json.abc.tmp").write_text("{")
    train(run_config(corpus), run)
    assert bytes_of(run) == bytes_of(whole)
    assert not list(run.rglob("*.tmp"))


def test_an_overwrite_that_was_killed_can_be_asked_for_again(corpus, tmp_path):
    run = tmp_path / "run"
    train(run_config(corpus), run)
    (run / "config.json").unlink()  # the first that goes
    train(run_config(corpus, seed=2), run, overwrite=True)
    assert read_config(run).seed == 2
    (run / "config.json").unlink()
    (run / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.tex, which no training wrote"):
        train(run_config(corpus, seed=2), run, overwrite=True)
    assert (run / "thesis.tex").exists()


# ---- two trainings in one folder


# LLMs-from-scratch#375: several processes, where today there can be one.
def test_two_trainings_in_one_folder_are_refused(corpus, tmp_path):
    refused = []

    def second(event):
        if isinstance(event, Stepped) and event.step == 2:
            for begin in (
                lambda: train(run_config(corpus), tmp_path / "run", overwrite=True),
                lambda: resume(tmp_path / "run"),
            ):
                with pytest.raises(UserError, match="is in use, another training") as error:
                    begin()
                refused.append(str(error.value))

    train(run_config(corpus), tmp_path / "run", second)
    assert len(refused) == 2
    assert Run.open(tmp_path / "run").step == 10
    train(run_config(corpus), tmp_path / "other")
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "other")


def test_a_lock_counts_while_its_process_lives_and_not_after(corpus, tmp_path):
    train(run_config(corpus), tmp_path / "run", StopAfter(3))
    code = (
        "import sys, time; from filelock import FileLock; "
        "lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run" / "lock")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use"):
            resume(tmp_path / "run")
    finally:
        holder.kill()
        holder.communicate()
    assert (tmp_path / "run" / "lock").exists()  # left behind, and stale
    assert resume(tmp_path / "run").step == 10


def test_reading_a_run_asks_for_no_lock(corpus, tmp_path):
    train(run_config(corpus), tmp_path / "run", StopAfter(3))
    with FileLock(tmp_path / "run" / "lock"):
        assert Run.open(tmp_path / "run").step == 3


# ---- full disks and folders that may not be written to


def limited(tmp_path: Path, options: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with a small file system of its own mounted at tmp_path/disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o {options} tmpfs {disk}"
    may = shutil.which("unshare") and subprocess.run(
        [*unshare, "sh", "-c", mount], capture_output=True, check=False
    )
    if not may or may.returncode:
        pytest.skip("needs the right to mount a small file system (unshare --map-root-user)")
    return subprocess.run(
        [*unshare, "sh", "-c", f"{mount} && {script}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "COLUMNS": "300"},
    )


TINY = (
    "--steps 12 --batch-size 2 --validations 3 --compile off --precision float32 --threads 1 "
    "--device cpu --tokenizer.kind wikitext --tokenizer.vocab-size 0 --model.context-length 17 "
    "--model.d-model 44 --model.n-heads 2 --model.d-ff 62 --model.n-layers 2"
)


def test_a_full_disk_costs_the_write_not_the_run_and_is_said(corpus, tmp_path):
    """Room for the first checkpoint and not for a second one; then there is room again."""
    command = f"{sys.executable} -m minigpt train"
    run = tmp_path / "disk" / "run"
    done = limited(
        tmp_path,
        "size=400k",
        f"{command} mini --data {corpus} --out {run} {TINY}; echo status $?; "
        f"{sys.executable} -m minigpt info {run} > {tmp_path}/info; "
        f"mount -o remount,size=20m {tmp_path}/disk; "
        f"{command} --resume {run}; echo status $?; cp -r {run} {tmp_path}/copy",
    )
    _, second = done.stdout.split("status 1\n")
    assert second.rstrip().endswith("status 0"), done.stderr
    assert "Traceback" not in done.stderr
    assert "no checkpoint at step 4" in done.stderr
    assert "the last checkpoint is that of step 0: free some space" in done.stderr
    assert "parameters" in (tmp_path / "info").read_text(encoding="utf-8")
    assert Run.open(tmp_path / "copy").step > 0
    config = read_config(tmp_path / "copy")
    train(config, tmp_path / "whole")
    assert bytes_of(tmp_path / "copy") == bytes_of(tmp_path / "whole")


def test_a_disk_that_is_full_at_the_start_is_one_line(corpus, tmp_path):
    run = tmp_path / "disk" / "run"
    done = limited(
        tmp_path,
        "size=60k",
        f"{sys.executable} -m minigpt train mini --data {corpus} --out {run} {TINY}; "
        f"echo status $?; ls -A {run}",
    )
    assert done.stdout.startswith("status 2\n"), done.stderr
    assert set(done.stdout.split()[2:]) <= {"lock"}
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"error: {run} cannot be written")


@pytest.mark.slow
def test_a_folder_that_turns_read_only_keeps_what_it_has(corpus, tmp_path):
    """The disk is mounted anew, read only, between a run and its resume."""
    run = tmp_path / "disk" / "run"
    train(run_config(corpus), tmp_path / "made", StopAfter(3))
    done = limited(
        tmp_path,
        "size=20m",
        f"cp -r {tmp_path}/made {run} && mount -o remount,ro {tmp_path}/disk && "
        f"{sys.executable} -m minigpt train --resume {run}; echo status $?; "
        f"{sys.executable} -m minigpt train mini --data {corpus} --out {run}2 {TINY}; "
        f"echo status $?; {sys.executable} -m minigpt info {run}",
    )
    assert done.stdout.startswith("status 2\nstatus 2\n"), done.stderr
    assert "parameters" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.partition(" cannot be written")[0] for line in lines] == [
        f"error: {run}",
        f"error: {run}2",
    ]


def test_at_the_end_it_is_said_what_was_not_saved(corpus, tmp_path, monkeypatch):
    save = training_state.save_checkpoint

    def full(run_dir, step, *rest):
        if step > 5:
            raise OSError(28, "No space left on device")
        save(run_dir, step, *rest)

    monkeypatch.setattr(training_state, "save_checkpoint", full)
    told = Recorder()
    train(run_config(corpus), tmp_path / "run", told)
    assert not told.of(Finished)[0].is_saved
    assert any("the last checkpoint is that of step 5" in note for note in notes(told))
    monkeypatch.undo()
    monkeypatch.setattr(training_state, "matrix_rates", lambda device: {})
    told = Recorder()
    resume(tmp_path / "run", told)
    assert told.of(Started)[0].step == 5
    assert told.of(Finished)[0].is_saved


# ---- what may change when a run goes on


def test_a_finished_run_goes_on_for_more_epochs(corpus, tmp_path):
    told, more = Recorder(), Recorder()
    train(run_config(corpus, steps=None, epochs=0.5), tmp_path / "run", told)
    config = replace(read_config(tmp_path / "run"), epochs=1.0)
    resume(tmp_path / "run", more, config)
    ended = told.of(Finished)[0].step
    assert more.of(Started)[0].step == ended
    assert more.of(Finished)[0].step > ended
    assert "epochs is 1.0 now and was 0.5: the rates follow" in notes(more)[0]
    # The longer budget has two validations; the first of them lies behind.
    assert [event.step for event in more.of(Validated)] == [more.of(Finished)[0].step]
    assert read_config(tmp_path / "run").epochs == 1.0
    assert more.of(Stepped)[0].rate > told.of(Stepped)[-1].rate


def test_a_budget_that_was_raised_by_hand_still_validates_and_saves(corpus, tmp_path):
    train(run_config(corpus, steps=4), tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    write_json(tmp_path / "run" / "config.json", config | {"steps": 8})
    told = Recorder()
    resume(tmp_path / "run", told)
    assert [event.step for event in told.of(Validated)] == [8]
    assert told.of(Finished)[0].is_saved


def test_a_context_that_could_not_be_opened_is_not_trained(corpus, tmp_path):
    config = run_config(corpus)
    config = replace(config, model=replace(config.model, context_length=1 << 22))
    with pytest.raises(UserError, match="context_length 4,194,304 takes"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_same_text_may_lie_elsewhere_and_another_text_may_not(corpus, tmp_path):
    config = run_config(corpus)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", StopAfter(4))
    was = read_config(tmp_path / "parts")
    other = write_corpus(tmp_path / "other.txt", n_words=82)
    with pytest.raises(UserError, match="has another train text than the run began with"):
        resume(tmp_path / "parts", config=replace(was, data=str(other)))
    assert read_config(tmp_path / "parts") == was
    moved = tmp_path / "moved.txt"
    shutil.copy(corpus, moved)
    resume(tmp_path / "parts", config=replace(was, data=str(moved)))
    assert read_config(tmp_path / "parts").data == str(moved)
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_a_text_that_was_edited_meanwhile_is_noticed(corpus, tmp_path):
    text = tmp_path / "text.txt"
    shutil.copy(corpus, text)
    train(run_config(text), tmp_path / "run", StopAfter(4))
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    text.write_text("".join([*lines[:-1], "w1 w2\n"]), encoding="utf-8")  # in test alone
    before = bytes_of(tmp_path / "run")
    lines[3] = lines[4]
    text.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match="has another train text"):
        resume(tmp_path / "run")
    assert bytes_of(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 2}, "seed is 2 but the run was begun with 1"),
        ({"batch_size": 3}, "batch_size is 3 but"),
        ({"accumulation": 3}, "accumulation is 3 but"),
        ({"precision": "bfloat16"}, "precision is bfloat16 but"),
        ({"compile": "on"}, "compile is on but"),
        ({"steps": 9}, "steps is 9, less than the 10 that the run has"),
        ({"steps": None, "epochs": 9.0}, "counts its budget in steps"),
        ({"steps": None}, "counts its budget in steps"),
    ],
)
def test_what_would_make_it_another_run_is_refused(corpus, tmp_path, change, says):
    train(run_config(corpus), tmp_path / "run", StopAfter(4))
    before, was = bytes_of(tmp_path / "run"), read_config(tmp_path / "run")
    with pytest.raises(UserError, match=says):
        resume(tmp_path / "run", config=replace(was, **change))
    with pytest.raises(UserError, match=r"optim\.rate is"):
        resume(tmp_path / "run", config=replace(was, optim=replace(was.optim, rate=1.0)))
    assert (bytes_of(tmp_path / "run"), read_config(tmp_path / "run")) == (before, was)


def test_what_only_shows_may_change(corpus, tmp_path):
    config = run_config(corpus)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", StopAfter(4))
    was, told = read_config(tmp_path / "parts"), Recorder()
    changed = replace(
        was,
        validations=5,
        patience=3,
        save_minutes=1.0,
        keep_checkpoints=2,
        sampling=replace(was.sampling, temperature=0.5),
    )
    resume(tmp_path / "parts", told, changed)
    assert len(notes(told)) == 5
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")
    # The second of five is due at step 4, where the run was broken off.
    assert [event.step for event in told.of(Validated)] == [4, 6, 8, 10]


def test_the_command_takes_harmless_flags_and_no_others(corpus, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert cli.main(["train", "mini", "--data", str(corpus), "--out", run, *TINY.split()]) == 0
    capsys.readouterr()
    assert cli.main(["train", "--resume", run, "--steps", "16"]) == 0
    err = capsys.readouterr().err
    assert "steps is 16 now and was 12" in err
    assert Run.open(run, which="last").step == 16
    assert "seed is 2 but the run was begun with 1" in failed(
        ["train", "--resume", run, "--seed", "2"], capsys
    )
    for words in (["mini", "--resume", run], ["--resume", run, "--out", "b"]):
        assert "is given with --resume" in failed(["train", *words], capsys)


# ---- checkpoints that are kept


def test_older_checkpoints_stay_on_request(corpus, tmp_path):
    def kept(**changes):
        run = tmp_path / "-".join(map(str, changes.values()))
        train(run_config(corpus, validations=5, **changes), run)
        return run, {int(path.name) for path in (run / "checkpoints").iterdir()}

    run, steps = kept(keep_checkpoints=2)
    last = {10, Run.open(run).step}
    assert steps == last | set(sorted({2, 4, 6, 8} - last)[-2:])
    assert kept(keep_checkpoints=9)[1] == {0, 2, 4, 6, 8, 10}
    run, steps = kept(keep_checkpoints=0)
    assert steps == {10, Run.open(run).step}
    for step in (4, 8):
        opened = Run.open(tmp_path / "9", which=step)
        assert opened.step == step
    assert not torch.equal(
        Run.open(tmp_path / "9", which=4).model.embedding.weight,
        Run.open(tmp_path / "9", which=8).model.embedding.weight,
    )
    with pytest.raises(UserError, match="has no checkpoint of step 5: it has those of 0, 2, 4"):
        Run.open(tmp_path / "9", which=5)


# ---- numbers that stay sane


def test_weights_that_are_not_numbers_never_replace_those_that_were(corpus, tmp_path):
    def poison(event):
        told(event)
        if isinstance(event, Validated) and event.step == 5:
            with torch.no_grad():
                event.model.embedding.weight.fill_(float("nan"))

    told = Recorder()
    run = train(run_config(corpus, save_minutes=1e-9), tmp_path / "run", poison)
    ended = told.of(Finished)[0]
    assert ended.reason == "non-finite"
    assert run.step == 5
    assert all(weights.isfinite().all() for weights in run.model.parameters())
    assert read_json(tmp_path / "run" / "last.json")["step"] == 5
    assert ended.report["skipped_steps"] == 5


def test_a_kill_while_a_validation_is_told_neither_loses_nor_doubles_it(corpus, tmp_path):
    """Between the checkpoint and the names that point to it stands the report."""

    def validations(run: Path) -> list[int]:
        records = read_metrics(run / "metrics.jsonl")
        return [record["step"] for record in records if record["kind"] == "validation"]

    run, config = tmp_path / "run", run_config(corpus, save_minutes=1e-9)
    with Report(run, config, Console(quiet=True)) as told:

        def die(event):
            told(event)
            if isinstance(event, Validated) and event.step == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(config, run, die)
    assert validations(run) == [5]
    assert Run.open(run, which="last").step == 5  # saved after the step, before the validation
    with Report(run, config, Console(quiet=True)) as told:
        resume(run, told)
    assert validations(run) == [5, 10]
    train(config, tmp_path / "whole")
    for which in ("last", "best"):
        assert bytes_of(run, which) == bytes_of(tmp_path / "whole", which)


@pytest.mark.slow
def test_memory_stays_flat_over_thousands_of_steps(corpus, tmp_path):
    def resident(event):
        if isinstance(event, Stepped) and event.step % 500 == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    megabytes: list[float] = []
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm to read the memory in use")
    train(
        run_config(corpus, steps=5000, validations=10, save_minutes=1 / 60),
        tmp_path / "run",
        resident,
    )
    assert len(megabytes) == 10
    assert megabytes[-1] - megabytes[1] < 5, megabytes


def test_a_checkpoint_that_could_not_be_named_does_not_stay(corpus, tmp_path, monkeypatch):
    """There was room for the checkpoint, and none for the few bytes that name it."""
    write = checkpoint.write_json

    def full(path, tree):
        if path.name in ("last.json", "best.json") and tree["step"] == 5:
            raise OSError(28, "No space left on device")
        write(path, tree)

    monkeypatch.setattr(checkpoint, "write_json", full)
    told = Recorder()
    train(run_config(corpus, keep_checkpoints=9), tmp_path / "run", told)
    assert "no checkpoint at step 5" in notes(told)[-1]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"0", "10"}


def test_the_same_weights_are_the_same_bytes(corpus, tmp_path):
    """The library notes which names are one table in an order of no account; ours has no note."""
    model = ModelConfig(17, 8, 12, 2, n_layers=1, output="adaptive", cutoffs=(5, 9))
    config = run_config(corpus, model=replace(model, vocab_size=0), save_minutes=1e-9)
    train(replace(config, keep_checkpoints=99), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    first, again = (checkpoints / name / "model.safetensors" for name in ("10", "10-2"))
    assert first.read_bytes() == again.read_bytes()


def test_overwrite_spares_what_no_training_wrote(corpus, tmp_path):
    run = tmp_path / "run"
    train(run_config(corpus), run)
    before = bytes_of(run)
    for path in (run / "thesis.txt", run / "checkpoints" / "mine"):
        path.write_text("years of work")
        with pytest.raises(UserError, match=rf"holds {path.name}, which no training wrote"):
            train(run_config(corpus, seed=2), run, overwrite=True)
        path.unlink()
    assert bytes_of(run) == before
    (run / "config.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="is not a run folder"):
        train(run_config(corpus, seed=2), run, overwrite=True)
    assert bytes_of(run) == before


def test_a_place_that_cannot_be_written_is_told_before_any_work(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(training_state, "fit_tokenizer", None)  # work
    with pytest.raises(UserError, match="cannot be written"):
        train(run_config(corpus), tmp_path / "file" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
