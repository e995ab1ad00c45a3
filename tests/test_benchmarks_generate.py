"""The benchmark of decoding: the same model in all hands, and figures that add up."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minigpt.errors import UserError
from minigpt.model import MiniGPT
from minigpt.sampling import Sampling
from test_benchmarks import toml_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import generate as benchmark
from as_transformers import as_transformers
from generate_contestants import Task, ours, theirs
from minigpt.config import load_preset
from tiny import MODELS, V, make_model

SMALL = replace(MODELS["modern"].resolved(), vocab_size=V, context_length=64)


@pytest.mark.parametrize("name", ["demo", "wikitext2-30min", "mini", "paper", "gpt2", "modern"])
def test_every_preset_has_a_model_of_its_size_in_transformers(name):
    config = benchmark.exportable(load_preset(name).model)
    small = replace(config, vocab_size=V, d_model=32, n_heads=2, n_layers=2)
    theirs = as_transformers(MiniGPT(small))
    assert type(theirs).__name__ == "Qwen3ForCausalLM"


def test_a_model_that_transformers_does_not_have_is_refused():
    with pytest.raises(UserError, match="no model of these parts"):
        as_transformers(make_model(MODELS["paper"]))


def test_both_write_the_same_greedy_text():
    sampling = Sampling(temperature=0, top_k=None, max_new_tokens=20)
    task = Task(SMALL, 11, sampling)
    mine = ours(task, "cached")(sampling)
    assert len(mine) == 20
    assert theirs(task)(sampling) == mine
    assert ours(task, "uncached")(sampling) == mine
    assert theirs(task)(replace(sampling, max_new_tokens=1)) == mine[:1]


def test_weights_that_a_token_needs_are_counted_once():
    config = benchmark.exportable(SMALL)
    model = MiniGPT(config)
    assert benchmark.n_weights(config) == sum(weight.numel() for weight in model.parameters())
    assert benchmark.n_weights(replace(config, **benchmark.LARGE)) * 4 >= 200e6


def test_the_whole_benchmark_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    for name, size in {"vocab_size": 501, "d_model": 32, "n_heads": 2, "n_layers": 2}.items():
        monkeypatch.setitem(benchmark.LARGE, name, size)
    preset, out = toml_of(tmp_path), tmp_path / "found.json"
    sizes = "--prompt-tokens 5 --new-tokens 9 --context 32 --repeat 2 --threads 1 --large"
    flags = f"--ours cached,uncached --greedy {sizes} --out"
    benchmark.main([str(preset), *flags.split(), str(out)])
    found = json.loads(out.read_text())
    assert set(found["writers"]) == {"cached", "uncached", "transformers"}
    assert found["writers"]["cached"]["times_as_long_as_cached"] == 1
    for name, row in found["writers"].items():
        assert row["same_text"], name
        assert 0 < row["first_token_seconds"] < row["seconds"]
        assert row["peak_megabytes"] > 100
        assert row["a_token_in_readings"] > 0
    assert found["read_gigabytes_per_second"] > 0
    printed = capsys.readouterr().out
    assert f"{found['writers']['cached']['tokens_per_second']:.1f} tokens/s" in printed
