"""The Python interface: light to import, typed, and the same as the command line."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import minigpt
from minigpt.config import load_preset
from minigpt.events import Event, Finished

T, D, H, F = 7, 12, 3, 20
TINY = {"context_length": T, "d_model": D, "n_heads": H, "d_ff": F, "n_layers": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[minigpt.Run]:
    folder = tmp_path_factory.mktemp("api")
    lines = [" ".join("abcde"[(i * j + i) % 5] for j in range(4 + i % 6)) for i in range(90)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIGPT_CACHE", str(folder / "cache"))
        yield minigpt.train(
            "mini",
            folder / "run",
            data=str(folder / "text.txt"),
            steps=3,
            batch_size=2,
            validations=1,
            threads=1,
            compile="off",
            precision="float32",
            model=TINY,
        )
    torch.set_num_threads(threads)


def test_importing_is_light() -> None:
    code = (
        "import sys, minigpt; minigpt.Config; minigpt.__version__; dir(minigpt);"
        "print(*{'torch', 'numpy', 'tokenizers', 'tyro', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == ""


def test_every_name_is_there() -> None:
    for name in minigpt.__all__:
        assert getattr(minigpt, name).__doc__, name
        assert name in dir(minigpt)
    assert set(minigpt.__all__) == set(minigpt._HOMES)
    assert minigpt.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        minigpt.tarin  # noqa: B018


def test_functions_keep_their_names_beside_modules_of_the_same_name() -> None:
    import minigpt.evaluate
    import minigpt.generate
    import minigpt.train
    from minigpt import train
    from minigpt.train import train as train_config

    assert callable(minigpt.train)
    assert minigpt.train is train
    assert train is not train_config
    assert callable(minigpt.evaluate)
    assert callable(minigpt.generate)


def test_a_preset_with_overrides(run: minigpt.Run) -> None:
    assert run.config.model.d_model == D
    assert run.config.model.position == load_preset("mini").model.position
    assert (run.config.steps, run.config.minutes) == (3, None)
    assert not run.model.training


def test_load_gives_the_same_model(run: minigpt.Run) -> None:
    for path in (run.path, str(run.path)):
        loaded = minigpt.load(path)
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(loaded.model(ids), run.model(ids))
        assert loaded.config == run.config


def test_evaluate_and_generate(run: minigpt.Run) -> None:
    score = minigpt.evaluate(run, "test", context=5, stride=2)
    assert math.isfinite(score.word_perplexity)
    assert score != minigpt.evaluate(run, "test")
    text = minigpt.generate(run, "a b", max_new_tokens=5, seed=3)
    assert text == minigpt.generate(run, "a b", max_new_tokens=5, seed=3)
    with pytest.raises(minigpt.UserError, match="context is 0"):
        minigpt.evaluate(run, context=0)


def test_measure(run: minigpt.Run, tmp_path: Path) -> None:
    measured = minigpt.measure(run, "test", context=5, stride=2, tiers=("cache",))
    assert isinstance(measured, minigpt.Measurement)
    assert measured.static.score == minigpt.evaluate(run, "test", context=5, stride=2)
    assert list(measured.tiers) == ["cache"]
    found = measured.to_json()
    assert found["tiers"]["cache"]["nats"] == measured.tiers["cache"].score.nats
    assert measured.intervals(measured.static)["token_interval"] == found["token_interval"]
    assert len(repr(measured)) < 2_000  # a notebook shows it: no weights, no ids
    (tmp_path / "text.txt").write_text("a b c\n", encoding="utf-8")
    for path in (tmp_path / "text.txt", str(tmp_path / "text.txt")):
        assert minigpt.measure(run, text=path).source == str(path)
    with pytest.raises(minigpt.UserError, match="run is 'runs/x'"):
        minigpt.measure("runs/x")  # type: ignore[arg-type]


def test_compare(run: minigpt.Run, tmp_path: Path) -> None:
    compared = minigpt.compare([run, run], "test", context=5, stride=2)
    assert isinstance(compared, minigpt.Comparison)
    score = minigpt.evaluate(run, "test", context=5, stride=2)
    assert [row.token_perplexity for row in compared.runs] == [score.token_perplexity] * 2
    (tmp_path / "text.txt").write_text("a b c\n", encoding="utf-8")
    on_text = minigpt.compare([run, run], text=str(tmp_path / "text.txt"))
    assert on_text.split is None
    expected = minigpt.measure(run, text=tmp_path / "text.txt").static.score.token_perplexity
    assert on_text.runs[1].token_perplexity == expected
    with pytest.raises(minigpt.UserError, match="run is 'runs/x'"):
        minigpt.compare([run, "runs/x"])


def test_attention(run: minigpt.Run) -> None:
    maps = minigpt.attention(run, "a b a c")
    assert isinstance(maps, minigpt.AttentionMaps)
    assert maps.tokens == ["a", "b", "a", "c"]
    assert maps.weights.shape == (1, H, 4, 4)
    again = minigpt.attention(run, "a b d")  # what comes later changes no row
    torch.testing.assert_close(again.weights[..., :2, :2], maps.weights[..., :2, :2])
    for text, n_tokens in (("", 0), ("a " * 8, 8)):
        with pytest.raises(minigpt.UserError, match=f"has {n_tokens} tokens: give from 1 to {T}"):
            minigpt.attention(run, text)


def test_events_and_resume(run: minigpt.Run, tmp_path: Path) -> None:
    events: list[Event] = []
    settings = {"steps": 2, "seed": 5}
    second = minigpt.train(run.config, tmp_path / "run", on_event=events.append, **settings)
    assert isinstance(events[-1], Finished)
    assert second.config.seed == 5
    third = minigpt.resume(second.path, on_event=events.append)
    assert third.step == 2


def test_mistakes_are_told_before_anything_is_made(run: minigpt.Run, tmp_path: Path) -> None:
    for settings in ({"learing_rate": 3}, {"model": {"d_modle": 3}}, {"steps": 0}):
        with pytest.raises(minigpt.UserError):
            minigpt.train(run.config, tmp_path / "run", **settings)
    with pytest.raises(minigpt.UserError, match="mnii"):
        minigpt.train("mnii", tmp_path / "run")
    with pytest.raises(minigpt.UserError, match="does not exist"):
        minigpt.load(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(minigpt.UserError, match="exists"):
        minigpt.train(run.config, run.path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": "7"}, "context is '7': it must be a whole number"),
        ({"context": 2.5}, "context is 2.5: it must be a whole number"),
        ({"stride": True}, "stride is True: it must be a whole number"),
        ({"split": 3}, "split 3 is not known"),
        ({"split": ["valid"]}, r"split \['valid'\] is not known"),
        ({"text": 3}, "text is 3: give the path of a text file"),
        ({"text": ""}, "text is '': give the path of a text file"),
        ({"text": "a.txt", "split": "test"}, "split is test, but the text a.txt is scored whole"),
        ({"tiers": 3}, "tiers are 3: they must be among"),
        ({"tiers": [["cache"]]}, r"tiers are \[\['cache'\]\]: they must be among"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_users_error(
    run: minigpt.Run, wrong: dict[str, Any], message: str
) -> None:
    calls = [lambda: minigpt.measure(run, **wrong)]
    if "tiers" not in wrong:
        calls.append(lambda: minigpt.compare([run, run], **wrong))
    if not wrong.keys() & {"tiers", "text"}:
        calls.append(lambda: minigpt.evaluate(run, **wrong))
    for call in calls:
        with pytest.raises(minigpt.UserError, match=message):
            call()


def test_the_path_of_a_run_is_not_the_run() -> None:
    with pytest.raises(minigpt.UserError, match="runs is 3: give a list of two runs or more"):
        minigpt.compare(3)  # type: ignore[arg-type]
    for call in (minigpt.evaluate, minigpt.generate, minigpt.heads):
        with pytest.raises(minigpt.UserError, match=r"run is 'runs/x': give what minigpt.load or"):
            call("runs/x")
    with pytest.raises(minigpt.UserError, match="run is 'runs/x'"):
        minigpt.attention("runs/x", "the")
