"""What users of other projects ran into: a test a thread, and a page that says which.

First the page: docs/reports.md names a test for every thread, and that test names the thread. Then
those threads that no other file of tests is about.
"""

import ast
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import minigpt
import writers
from minigpt import training_state
from minigpt.config import Config, TokenizerConfig, from_dict, load_preset, preset_names
from minigpt.data import TokenStream
from minigpt.decoding import generate
from minigpt.evaluate import evaluate
from minigpt.events import Noted
from minigpt.generate import Wording, continuations
from minigpt.model import MiniGPT
from minigpt.sampling import Sampling
from minigpt.text import basic_english, get_tokenizer
from minigpt.tokenizer import Tokenizer
from tiny import MODELS, Recorder, T, V, make_model, random_ids, run_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from as_transformers import as_transformers

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "reports.md", ROOT / "docs" / "reports.zh-CN.md"]
COLLECTED = ROOT.parent / "shared" / "reports.md"


# The page


def threads(text: str) -> set[str]:
    """Return all threads that a text names: "a#1, #2 and b PR 3" names a#1, a#2 and b#3."""
    found = re.findall(r"([\w./-]+)(?:#| PR )(\d+)((?:(?:, | and )#\d+)*)", text)
    return {
        f"{repository}#{number}"
        for repository, first, more in found
        for number in [first, *re.findall(r"\d+", more)]
    }


def rows(page: Path) -> list[list[str]]:
    """Return the cells of every row of every table but the heads: thread, fault, ours, tests."""
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text("utf-8"), re.M)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [line.strip("| ").split(" | ") for line in lines]


def links(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"\[([^\]]+)\]\(([^)]+)\)", cell)


@functools.cache
def sources_of(file: str) -> dict[str, str]:
    """Return each function of a file of tests with the comment and the decorators above it."""
    text = (ROOT / "tests" / file).read_text("utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            begin = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            while lines[begin - 1].startswith("#"):
                begin -= 1
            found[node.name] = "\n".join(lines[begin : node.end_lineno])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_thread_has_a_test_that_names_it(page: Path) -> None:
    found = rows(page)
    assert len(found) > 55
    for cells in found:
        thread_cell, *_, tests_cell = cells
        assert len(cells) == 4, cells
        named = {text for text, _ in links(thread_cell)}
        for text, address in links(thread_cell):
            repository, number = text.rsplit("#", 1)
            pattern = rf"https://github\.com/[\w.-]+/{re.escape(Path(repository).name)}"
            assert re.fullmatch(rf"{pattern}/(issues|pull)/{number}", address), address
        tests = links(tests_cell)
        assert named, cells
        assert tests, cells
        for name, address in tests:
            file, function = name.split("::")
            assert address == f"../tests/{file}"
            assert function.startswith("test_")
            assert named <= threads(sources_of(file)[function]), (name, named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_thread_stands_anywhere_without_a_row(page: Path) -> None:
    """Neither in the prose of the page nor in a test."""
    in_rows = {text for cells in rows(page) for text, _ in links(cells[0])}
    assert threads(page.read_text("utf-8")) == in_rows
    repositories = {thread.rsplit("#", 1)[0] for thread in in_rows}
    for path in (ROOT / "tests").glob("*.py"):
        named = {
            thread
            for thread in threads(path.read_text("utf-8"))
            if thread.rsplit("#", 1)[0] in repositories
        }
        assert named <= in_rows, path.name


@pytest.mark.skipif(not COLLECTED.is_file(), reason="needs the reports as they were collected")
def test_every_report_that_was_collected_is_there() -> None:
    collected = set().union(*(threads(cells[0]) for cells in rows(COLLECTED)))
    assert len(collected) > 60
    for page in PAGES:
        assert collected - threads(page.read_text("utf-8")) == set()


def test_threads_are_read_as_people_write_them() -> None:
    found = threads("a/b#1, #23 and #4 or c-d PR 5, e.f#6 #7")
    assert found == {"a/b#1", "a/b#23", "a/b#4", "c-d#5", "e.f#6"}


# Data and tokenizers


def test_basic_english_needs_no_torchtext(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtext is installed no more (annotated-transformer#133): nothing here asks for it."""
    monkeypatch.setitem(sys.modules, "torchtext", None)  # import it, and there is an ImportError
    line = "It's here , isn't it?"
    tokenizer = Tokenizer.train(TokenizerConfig("basic_english", 0), lambda: [line])
    words = ["it", "'", "s", "here", ",", "isn", "'", "t", "it", "?"]
    assert get_tokenizer("basic_english")(line) == basic_english(line) == words
    assert tokenizer.pieces(tokenizer.encode(line)) == words
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in imported if name.startswith("torchtext")], path
    assert "torchtext" not in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("name", preset_names())
@torch.no_grad()
def test_any_context_serves_any_preset(name: str) -> None:
    """Another context than the usual one ended in "index out of range" (transformers#10732)."""
    usual = load_preset(name).model
    small = {"vocab_size": V, "d_model": 32, "n_heads": 2, "d_head": 0, "d_ff": 24, "n_layers": 1}
    for context in (1, 7, usual.context_length + 13):
        config = replace(usual, context_length=context, cutoffs=(29, 61), **small)
        model = MiniGPT(config).eval()
        ids = random_ids(1, context)
        assert model(ids).isfinite().all()
        stream = stream_of(random_ids(2 * context + 3))
        assert evaluate(model, stream, 3).tokens == 2 * context + 3
        start = ids[0].tolist()
        more = list(generate(model, start, Sampling(max_new_tokens=3)))
        assert len(more) == 3


def stream_of(ids: torch.Tensor, vocab_size: int = V) -> TokenStream:
    return TokenStream(
        ids=ids.numpy().astype(np.uint16),
        n_words=1,
        n_bytes=1,
        n_unknown=0,
        n_eos=0,
        sha256="",
        vocab_size=vocab_size,
    )


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine takes longer than these runs."""
    monkeypatch.setattr(training_state, "matrix_rates", lambda device: {"float32": 1.0})


def test_a_small_vocabulary_writes_no_unknown_words(tmp_path: Path, no_measuring: None) -> None:
    """Of a thousand words, most of a text is `<unk>`: so was what was written (graph4nlp#499)."""
    draw = np.random.default_rng(1)
    words = [f"w{i if i % 3 else i % 900}" for i in draw.integers(0, 100_000, 12_000)]
    lines = [" ".join(words[i : i + 10]) for i in range(0, len(words), 10)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = run_config(
        tmp_path / "text.txt", steps=40, tokenizer=TokenizerConfig("wikitext", 1_000)
    )
    told = Recorder()
    run = minigpt.train(config, tmp_path / "run", on_event=told)
    assert run.tokenizer.vocab_size == 1_000
    for sampling in (Sampling(0, max_new_tokens=50), Sampling(max_new_tokens=200)):
        usual, raw = (
            continuations(run.model, run.tokenizer, ["w1 neverseen"], sampling, wording)[0]
            for wording in (Wording(), Wording(raw=True))
        )
        assert raw.ids.count(run.tokenizer.unk_id) > len(raw.ids) / 2  # what it would like best
        assert run.tokenizer.unk_id not in usual.ids
        assert "<unk>" not in usual.text
    (line,) = [event.text for event in told.of(Noted) if "<unk>" in event.text]
    assert "--tokenizer.kind bpe or char knows every word" in line


def test_the_vocabulary_is_made_of_the_text_itself() -> None:
    """A vocabulary of another corpus made garbage of a small Chinese one (GPT2-Chinese#88)."""
    lines = [f"语言模型读了很多文字，然后一个字一个字地往下写。第{i}行。" for i in range(40)]
    text = "\n".join(lines)
    chars = Tokenizer.train(TokenizerConfig("char", 330), lambda: lines)
    assert chars.pieces(chars.encode(lines[0])) == list(lines[0])  # no character in bytes
    pieces = Tokenizer.train(TokenizerConfig("bpe", 330), lambda: lines)
    assert len(pieces.encode(text)) < len(text)  # though each character is three bytes
    learned = {pieces.decode([i]) for i in range(pieces.vocab_size)} - set(map(chr, range(256)))
    learned = {piece for piece in learned if piece and "\ufffd" not in piece}
    assert learned
    assert all(piece in text for piece in learned)


# Training


RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_figure_comes_with_its_recipe_seed_and_hardware(path: Path) -> None:
    """Figures of a README could not be had again (pytorch/examples#415, #281)."""
    report = json.loads(path.read_text("utf-8"))["report"]
    config = from_dict(Config, report["config"])
    assert path.stem.endswith(f"-seed{config.seed}")
    preset = path.stem.removesuffix(f"-seed{config.seed}")
    readme = (ROOT / "README.md").read_text("utf-8")
    if preset in preset_names():
        assert f"`minigpt train {preset} --seed {config.seed}`" in readme
    assert config.model.vocab_size > 0  # every size is decided, none left to a later default
    assert set(report["versions"]) >= {"minigpt", "torch", "python", "git"}
    assert report["hardware"]["cpu"]
    assert report["hardware"]["threads"] > 0
    assert report["matrix_gflops"]["float32"] > 0
    assert report["steps"] > 0


# Decoding


def test_a_text_that_runs_in_circles_can_be_told_not_to() -> None:
    """Greedy text says the same again and again (transformers#1725)."""

    def pairs_again(**settings: float | int) -> int:
        sampling = Sampling(0, max_new_tokens=60, **settings)  # type: ignore[arg-type]
        ids = list(generate(writers.make_model(), writers.random_ids(3), sampling))
        pairs = list(itertools.pairwise(ids))
        return len(pairs) - len(set(pairs))

    assert pairs_again() > 50
    assert pairs_again(no_repeat_ngram=2) == 0
    assert pairs_again(repetition_penalty=3.0) < 25


# Machines


def peak_megabytes(act: Callable[[], object]) -> float:
    """Return how far the memory of this process rises above what it is now while act runs."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        clear.write_text("5")  # the peak counts from here
        before = int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0])
        act()
        return (int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) - before) / 1024
    except OSError:
        pytest.skip("needs a system that tells a process its peak memory, as Linux does")


def test_evaluation_keeps_no_logits() -> None:
    """All logits of a text were kept until its end (transformers#8476): here 801 MB of them."""
    assert peak_megabytes(lambda: torch.ones(25_000_000)) > 90  # it does see what is held
    n_words = 10_007
    small = {"vocab_size": n_words, "context_length": 64, "d_model": 8, "d_ff": 8}
    config = replace(MODELS["gpt2"], n_heads=2, d_head=0, n_layers=1, **small)
    model = make_model(config)
    streams = [stream_of(random_ids(n, vocab_size=n_words), n_words) for n in (2_000, 20_000)]
    short, long = (peak_megabytes(lambda s=stream: evaluate(model, s, 3)) for stream in streams)  # type: ignore[misc]
    assert long - short < 4 * 18_000 * n_words / 1024**2 / 8


# Not there yet, but for what can be said today


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what transformers imports
def test_a_tied_head_survives_in_transformers(tmp_path: Path) -> None:
    """An export lost the output that shares the embedding's table (transformers#38870, #30202)."""
    from transformers import AutoModelForCausalLM

    model, ids = make_model(MODELS["modern"]), random_ids(3, T)
    as_transformers(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids), atol=1e-5, rtol=1e-5)
