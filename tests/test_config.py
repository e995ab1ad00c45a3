"""Config: presets, files and dictionaries become one checked tree; a mistake names its mending."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minigpt.config import (
    MOST_CONFIG_BYTES,
    Config,
    ModelConfig,
    OptimConfig,
    TokenizerConfig,
    closest_key,
    from_dict,
    key_names,
    load_file,
    load_preset,
    preset_names,
    to_dict,
)
from minigpt.errors import UserError, closest
from tiny import run_config, write_corpus


def test_the_presets_of_the_design_are_there_and_valid() -> None:
    assert {"mini", "paper", "gpt2", "modern", "quickstart"} < set(preset_names())
    assert {"wikitext2-10min", "wikitext2-30min"} < set(preset_names())
    for name in preset_names():
        config = load_preset(name)
        assert config.model.resolved(33_278).vocab_size == 33_278
        assert any((config.minutes, config.epochs, config.steps)), f"{name} has no budget"


def test_mini_is_what_the_mission_asks_for() -> None:
    config = load_preset("mini")
    assert config.model.n_heads == 8
    assert config.tokenizer == TokenizerConfig("basic_english", 10_000)
    parts = (config.model.position, config.model.norm_placement, config.model.feed_forward)
    assert parts == ("sinusoidal", "post", "relu")


def test_an_unknown_preset_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"preset wikitxt2-10min .*did you mean wikitext2-10min\?"):
        load_preset("wikitxt2-10min")


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 2  # type: ignore[misc]


def test_a_config_survives_json() -> None:
    for name in preset_names():
        config = load_preset(name)
        assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config


def test_a_file_is_laid_over_the_base(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("\ufeffseed = 7\n[model]\nd_model = 24\n", encoding="utf-8")
    config = load_file(file, load_preset("mini"))
    assert (config.seed, config.model.d_model, config.minutes) == (7, 24, 10)
    assert config.model.n_layers == load_preset("mini").model.n_layers


def test_a_budget_replaces_the_budget_below_it() -> None:
    config = from_dict(Config, {"epochs": 3}, load_preset("mini"))
    assert (config.minutes, config.epochs, config.steps) == (None, 3.0, None)


def test_whole_numbers_serve_as_float_and_lists_as_tuple() -> None:
    config = from_dict(Config, {"minutes": 5, "model": {"cutoffs": [5, 7]}})
    assert isinstance(config.minutes, float)
    assert config.model.cutoffs == (5, 7)


def test_none_can_be_said_where_a_file_knows_no_null(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[sampling]\ntop_k = "none"\ntop_p = 0.9\n', encoding="utf-8")
    sampling = load_file(file).sampling
    assert (sampling.top_k, sampling.top_p) == (None, 0.9)
    with pytest.raises(UserError, match="seed is 'none': it must be a whole number"):
        from_dict(Config, {"sampling": {"seed": "none"}})
    with pytest.raises(UserError, match="top_p is 2"):
        from_dict(Config, {"sampling": {"top_p": 2}})


# unsloth#10452: a misspelt key was ignored.
@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"learing_rate": 1},
            "key learing_rate is not known (did you mean optim.rate?): correct it",
        ),
        ({"model": {"d_modle": 1}}, "key model.d_modle is not known (did you mean model.d_model?)"),
        ({"d_model": 1}, "did you mean model.d_model?"),
        ({"model": {"lr": 1}}, "key model.lr is not known"),
        ({"modle": {"d_model": 3}}, "key modle is not known (did you mean model?): correct it"),
        ({"optimizer": {}}, "key optimizer is not known (did you mean optim?)"),
        ({"model": {"n_embd": 3}}, "key model.n_embd is not known (did you mean model.d_model?)"),
        ({"model": {"seed": 3}}, "key model.seed is not known (did you mean seed?)"),
        ({"seq_len": 3}, "key seq_len is not known (did you mean model.context_length?)"),
        ({"model": 3}, "key model is 3: it is a table"),
        ({"seed": "x"}, "seed is 'x': it must be a whole number"),
        ({"seed": True}, "seed is True: it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"model": {"bias": 1}}, "model.bias is 1: it must be true or false"),
        ({"tokenizer": {"kind": "bqe"}}, "tokenizer.kind is 'bqe' (did you mean bpe?)"),
        ({"model": {"cutoffs": 3}}, "model.cutoffs is 3: it must be a list"),
        ({"minutes": 1, "steps": 1}, "minutes and steps are both given"),
    ],
)
def test_a_wrong_key_or_value_is_named(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(Config, tree)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def as_toml(tree: Any) -> str:
    """Return a tree as TOML, in which none stands for null."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{as_toml(k)} = {as_toml(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ", ".join(map(as_toml, tree)) + "]"
    if isinstance(tree, bool):
        return str(tree).lower()
    if isinstance(tree, int | float):
        return repr(tree)
    return json.dumps("none" if tree is None else tree, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )


def toml_file(tree: dict[str, Any]) -> str:
    return "".join(f"{as_toml(key)} = {as_toml(value)}\n" for key, value in tree.items())


@pytest.mark.parametrize("name", preset_names())
def test_a_resolved_preset_comes_back_from_toml_and_json(name: str, tmp_path: Path) -> None:
    preset = load_preset(name)
    model = preset.model.resolved(preset.tokenizer.vocab_size or 33_278)
    config = dataclasses.replace(preset, model=model)
    saved = {"mine.toml": toml_file(to_dict(config)), "mine.json": json.dumps(to_dict(config))}
    for file, text in saved.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert load_file(tmp_path / file) == load_file(tmp_path / file, load_preset("mini"))
        assert load_file(tmp_path / file) == config
        assert config.model.resolved() == model


def weights(run_dir: Path) -> list[bytes]:
    from minigpt.checkpoint import checkpoint_folder

    last = checkpoint_folder(run_dir, "last")
    return [(last / f"{name}.safetensors").read_bytes() for name in ("model", "trainer")]


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_what_a_run_resolved_gives_the_same_run_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigpt import training_state
    from minigpt.command_line import parse_train
    from minigpt.train import train

    rates = {"float32": 1.0, "bfloat16": 1.0}  # measuring them takes longer than this run
    monkeypatch.setattr(training_state, "matrix_rates", lambda device: rates)
    data = write_corpus(tmp_path / "text.txt")
    config = run_config(data, validations=1, accumulation=3)
    train(config, tmp_path / "first")
    file = tmp_path / "first" / "config.json"
    resolved = json.loads(file.read_text(encoding="utf-8"))
    assert resolved["model"]["vocab_size"] > config.model.vocab_size == 0
    if kind == "toml":
        file = tmp_path / "resolved.toml"
        file.write_text(toml_file(resolved), encoding="utf-8")
    for preset in ([], ["paper"]):
        _, options = parse_train([*preset, "--config", str(file)], "minigpt train")
        assert to_dict(options.settings) == to_dict(from_dict(Config, resolved))
    train(options.settings, tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "first")
    saved = [(tmp_path / run / "config.json").read_bytes() for run in ("first", "again")]
    assert saved[0] == saved[1]


# LLMs-from-scratch#1020: seeded runs that differed.
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_two_processes_of_one_seed_train_the_same_weights(compiled: Any, tmp_path: Path) -> None:
    """Same seed, steps, threads and compile setting; only the order of Python's sets differs."""
    config = run_config(
        write_corpus(tmp_path / "text.txt"), steps=4, threads=2, accumulation=2, compile=compiled
    )
    assert config.model.dropout
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    program = (
        "from pathlib import Path; from minigpt import training_state; "
        "from minigpt.config import load_file; from minigpt.train import train; "
        # Measuring the machine takes longer than the run.
        "training_state.matrix_rates = lambda device: {'float32': 1.0, 'bfloat16': 1.0}; "
        "train(load_file(Path('config.json')), Path(OUT))"
    )
    for out, hash_seed in (("a", "1"), ("b", "2")):
        # Tokenizer and ids anew each time.
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "MINIGPT_CACHE": f"cache-{out}"}
        command = [sys.executable, "-c", program.replace("OUT", repr(out))]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)

    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    names = ("config.json", "tokenizer.json")
    assert all(
        (tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names
    )


@pytest.mark.parametrize("content", [b"seed = ", b"seed = 1\nseed = 2", b"\xff\xfe", None])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.toml") as caught:
        load_file(file)
    assert "\n" not in str(caught.value)


SIZES = ["context_length", "d_model", "n_heads", "n_layers", "tail_divisor", "norm_eps"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_sizes_are_greater_than_zero(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        ModelConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["minutes", "epochs", "steps"])
@pytest.mark.parametrize("value", [0, -3, math.nan])
def test_budgets_are_greater_than_zero(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        Config(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0},
        {"batch_size": 6, "accumulation": 4},
        {"validations": 0},
        {"seed": -1},
        {"seed": 2**32},
        {"threads": -1},
        {"patience": -1},
        {"device": "gpu"},
        {"data": " "},
    ],
)
def test_a_run_that_cannot_start_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(reversed(settings))):
        Config(**settings)  # type: ignore[arg-type]


def test_a_sampled_softmax_needs_ids_by_falling_frequency() -> None:
    model = ModelConfig(output="sampled")
    assert Config(model=model, tokenizer=TokenizerConfig(kind="wikitext")).model is model
    with pytest.raises(UserError, match=r"falling frequency.* of tokenizer bpe"):
        Config(model=model, tokenizer=TokenizerConfig(kind="bpe"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 30, "n_heads": 4}, "d_model 30 is not a multiple of n_heads 4"),
        ({"n_heads": 6, "n_kv_heads": 4, "d_model": 12}, "n_kv_heads 4"),
        ({"d_model": 15, "n_heads": 3}, "d_head 5 is odd"),
        ({"d_model": 15, "n_heads": 3, "position": "sinusoidal"}, "d_model 15 is odd"),
        ({"cutoffs": (7, 5)}, r"cutoffs are \(7, 5\)"),
        ({"cutoffs": (0, 5)}, "cutoffs"),
        ({"dropout": 1.0}, "dropout is 1"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"vocab_size": -2}, "vocab_size is -2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": 0.0},
        {"rate": math.nan},
        {"momentum": 1.0},
        {"clip": -1.0},
        {"hold": 1.5},
        {"warm_up": 0.5, "hold": 0.4},
    ],
)
def test_rates_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(reversed(settings))):
        OptimConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"vocab_size": 4}, {"vocab_size": -1}, {"kind": "bpe", "vocab_size": 256}]
)
def test_a_vocabulary_too_small_for_its_specials_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match="vocab_size"):
        TokenizerConfig(**settings)  # type: ignore[arg-type]


def test_what_was_left_at_zero_is_derived() -> None:
    config = ModelConfig(d_model=48, n_heads=3, cutoffs=(5, 7, 20)).resolved(11)
    sizes = (config.vocab_size, config.n_kv_heads, config.d_head, config.d_ff)
    assert sizes == (11, 3, 16, 128)  # swiglu: 8/3 of 48
    assert config.cutoffs == (5, 7)  # 20 lies past the vocabulary
    assert ModelConfig(d_model=48, n_heads=3, feed_forward="relu").resolved(11).d_ff == 192
    assert config.resolved() == config


def test_a_vocabulary_that_the_tokenizer_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 13 but the tokenizer has 11"):
        ModelConfig(vocab_size=13).resolved(11)
    with pytest.raises(UserError, match="vocab_size is 0"):
        ModelConfig().resolved()


def test_suggestions_come_only_where_something_is_near() -> None:
    assert closest("wikitxt", ["wikitext", "bpe"]) == " (did you mean wikitext?)"
    assert closest("xyz", ["wikitext", "bpe"]) == ""
    keys = key_names(Config)
    assert {"seed", "model.d_model", "optim.rate", "tokenizer.kind"} <= set(keys)
    flags = [f"--{key}".replace("_", "-") for key in keys]
    assert closest_key("--learing_rate", flags) == " (did you mean --optim.rate?)"
    assert closest_key("--model.d-modle", flags) == " (did you mean --model.d-model?)"
    assert closest_key("vocab_size", keys) == " (did you mean tokenizer.vocab_size?)"
    assert closest_key("zzz", keys) == ""


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_a_config_file_that_is_none_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"#" * (MOST_CONFIG_BYTES + 1))
    with pytest.raises(UserError, match=rf"config file {path} cannot be read .*: check the path"):
        load_file(path)


def test_draws_for_a_batch_have_a_bound() -> None:
    with pytest.raises(UserError, match="n_sampled is 1000000000"):
        ModelConfig(n_sampled=10**9)
