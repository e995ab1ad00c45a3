"""The command `heads`: a table of what each head does, as text, JSON and a picture."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import minigpt
from commands import failed, succeeded
from minigpt import cli
from minigpt.run_folder import RUN_FILES
from minigpt.sentences import pronoun_sentences, verb_object_sentences

H, L, T = 2, 3, 13
TINY = "--threads 1 --compile off --precision float32 --model.d-model 16 --validations 1"
TINY += f" --model.n-heads {H} --model.n-layers {L} --model.d-ff 24 --batch-size 3"


def trained(folder: Path, name: str, lines: list[str], context: int) -> Path:
    text = folder / f"{name}.txt"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    argv = f"train mini --data {text} --steps 2 --out {folder / name} {TINY}"
    assert cli.main([*argv.split(), "--model.context-length", str(context)]) == 0
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGPT_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    lines = [str(s) for s in [*verb_object_sentences(), *pronoun_sentences()]] * 3
    return trained(folder, "run", lines, T)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_table_its_legend_and_what_came_out(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = succeeded(["heads", str(run_dir), "--threads", "1"], capsys)
    table, legend, summary = out.split("\n\n")
    names, even, *rows = table.splitlines()
    assert " ".join(names.split()) == (
        "head prev first self far wide same induct punct object pronoun off role"
    )
    assert even.startswith("even ")
    heads = [f"{layer}.{head}" for layer in range(L) for head in range(H)]
    assert [row.split()[0] for row in rows] == heads
    assert f"6 windows of {T} tokens" in legend or f"16 windows of {T} tokens" in legend
    assert summary.startswith(tuple(f"{n} of {L * H} heads have a role" for n in range(L * H + 1)))
    assert "verb → object: " in summary
    assert "pronoun → antecedent: " in summary
    assert max(map(len, table.splitlines())) <= 120
    assert not list(Path().iterdir())


def test_json_and_a_picture(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"heads {run_dir} --split test --tokens 40 --json --out deep/heads.PNG --threads 1"
    told = json.loads(succeeded(argv.split(), capsys))
    assert told["run"] == str(run_dir)
    assert (told["split"], told["n_windows"], told["context"]) == ("test", 3, T)
    assert [len(row) for row in told["loss"]["change"]] == [H] * L
    assert Path("deep/heads.PNG").read_bytes().startswith(b"\x89PNG")
    out = succeeded(f"heads {run_dir} --out heads.png --threads 1".split(), capsys)
    assert out.endswith("\nheads.png\n")
    assert Path("heads.png").stat().st_size > 10_000


def test_python_gives_the_same(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(
        succeeded(["heads", str(run_dir), "--json", "--device", "cpu", "--threads", "1"], capsys)
    )
    heads = minigpt.heads(minigpt.load(run_dir))
    assert isinstance(heads, minigpt.HeadRoles)
    assert heads.roles() == told["roles"]
    assert heads.to_json()["loss"] == told["loss"]
    few = minigpt.heads(minigpt.load(run_dir), "train", n_tokens=40)
    assert (few.n_windows, few.context) == (3, T)
    assert few.loss.loss != heads.loss.loss


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--out heads.html", "--out is heads.html: give a name that ends in .png"),
        ("--out heads", "--out is heads: give a name that ends in .png"),
        ("--tokens 0", f"tokens is 0: give at least {2 * T}, two windows"),
        ("--tokens -3", f"tokens is -3: give at least {2 * T}"),
        ("--tokens few", "few"),
        ("--split held-out", "held-out"),
        ("--layer 1", "--layer"),
        ("--device tpu", "tpu"),
    ],
)
def test_a_mistake_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], more: str, message: str
) -> None:
    assert message in failed(["heads", str(run_dir), *more.split()], capsys)


def test_a_picture_that_cannot_be_written_costs_the_picture_alone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("x")
    assert cli.main(f"heads {run_dir} --out file/heads.png --threads 1".split()) == 2
    out, err = capsys.readouterr()
    assert "pronoun → antecedent: " in out
    assert err.startswith("error: picture file/heads.png cannot be written")
    assert err.count("\n") == 1


def test_no_file_of_the_run_is_written_over(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    assert {path.name for path in files if path.parent == run_dir} == RUN_FILES
    for path in [*files, run_dir / "checkpoints" / "new.png", run_dir / "x" / ".." / "loss.png"]:
        command = "heads {} --out {}" if path.suffix == ".png" else "attention {} the --out {}"
        if path.suffix in (".png", ".json"):
            assert "that is a file of the run" in failed(
                command.format(run_dir, path).split(), capsys
            )
    assert {path: path.read_bytes() for path in files} == before
    succeeded(f"heads {run_dir} --threads 1 --out {run_dir}/heads.png".split(), capsys)
    (run_dir / "heads.png").unlink()


def test_no_run_and_too_short_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-run" in failed(["heads", "no-run"], capsys)
    short = trained(folder, "short", [f"the line {n} is short ." for n in range(60)], 16)
    error = failed(["heads", str(short), "--threads", "1"], capsys)
    assert "two windows of the model's context need at least 33, so choose another split" in error
    succeeded(["heads", str(short), "--split", "train", "--threads", "1"], capsys)
