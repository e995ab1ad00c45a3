"""The step benchmark: every matrix product counted, timed alone, and turns taken one at a time."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

from minigpt.data import Batch
from minigpt.errors import UserError
from minigpt.events import Stepped
from minigpt.info import sizes
from minigpt.model import Objective
from minigpt.train import train
from test_benchmarks import NANOGPT, toml_of
from tiny import MODELS, B, D, H, K, L, T, make_model, random_ids, run_config, taught, write_corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import step
from products import Bench, Product, ProductCounter, flops
from step_contestants import budget_of, parts_timed
from turns import Turn, Turns


def product(left: tuple[int, ...], right: tuple[int, ...], share: float = 1.0) -> Product:
    layouts = (
        (shape, tuple(torch.empty(shape, device="meta").stride())) for shape in (left, right)
    )
    return Product(*layouts, torch.float32, share)


def counted(objective: Objective) -> ProductCounter:
    """Return the products of a forward and a backward pass."""
    batch = Batch(random_ids(B, T), random_ids(B, T, seed=3))
    with ProductCounter() as counter:
        nats, _ = objective(*batch)
        nats.backward()
    return counter


def test_flops_are_two_for_each_multiplication():
    assert product((7, 5), (5, 11)).flops == 2 * 7 * 5 * 11
    assert product((3, 7, 5), (3, 5, 11), share=0.25).flops == 2 * 3 * 7 * 5 * 11 / 4
    assert product((3, 7, 5), (3, 5, 11)).name == "3 · 7 × 5 × 11"


@pytest.mark.parametrize("name", ["modern", "gpt2", "adaptive", "untied", "grouped-query"])
def test_products_are_those_that_pytorch_itself_counts(name):
    # Attention spelt out, for PyTorch counts nothing of the fast one on a CPU.
    model = make_model(MODELS[name]).train()
    objective, batch = Objective(model), Batch(random_ids(B, T), random_ids(B, T, seed=3))
    with taught(model):
        ours = flops(counted(objective).counts)
        with FlopCounterMode(display=False) as theirs:
            nats, _ = objective(*batch)
            nats.backward()
    assert ours == theirs.get_total_flops()


def test_the_products_of_attention_are_the_visible_half_of_two_and_five():
    q, k, v = (torch.randn(B, H, T, K, requires_grad=True) for _ in range(3))
    for causal, share in ((True, (T + 1) / (2 * T)), (False, 1.0)):
        with ProductCounter() as counter:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert flops(counter.counts) == pytest.approx(share * 2 * 2 * B * H * T * T * K)
        counter.counts.clear()
        with counter:
            mixed.sum().backward()
        assert flops(counter.counts) == pytest.approx(share * 5 * 2 * B * H * T * T * K)


def test_attention_in_one_piece_is_counted_by_its_visible_half_too():
    """As stacks of products it has two forward and four backward; nothing is computed anew."""
    model = make_model(MODELS["modern"]).train()
    blocks = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    with ProductCounter(T) as counter, torch.autocast("cpu", torch.bfloat16):
        model.hidden(random_ids(B, T)).float().sum().backward()
    square = (T + 1) / (2 * T) * 2 * B * H * T * T * K
    assert flops(counter.counts) == pytest.approx(3 * 2 * B * T * blocks + L * 6 * square)
    with ProductCounter() as counter, torch.autocast("cpu", torch.bfloat16):
        model.hidden(random_ids(B, T)).float().sum().backward()
    whole = 2 * B * H * T * T * K
    assert flops(counter.counts) == pytest.approx(3 * 2 * B * T * blocks + L * 6 * whole)


def test_a_step_of_training_has_the_products_that_its_sizes_say(tmp_path):
    config = run_config(write_corpus(tmp_path / "text.txt"), steps=2)
    config = replace(config, optim=replace(config.optim, matrix_rate=0.0), validations=1)
    found: list[float] = []
    with ProductCounter() as counter:

        def watch(event):
            if isinstance(event, Stepped):
                found.append(flops(counter.counts))
            counter.counts.clear()

        run = train(config, tmp_path / "run", watch)
    n_tokens = config.batch_size * T
    attention = 2.0 * L * H * K * (T + 1)  # forward, a token
    rest = sizes(config, run.tokenizer.vocab_size).forward_flops - attention
    assert found == pytest.approx(2 * [n_tokens * (3 * rest + 3.5 * attention)])


def test_the_products_of_muon_count(tmp_path):
    config = run_config(write_corpus(tmp_path / "text.txt"), steps=1, validations=1)
    assert config.optim.matrix_rate > 0
    assert config.precision == "float32"
    with ProductCounter() as counter:
        train(config, tmp_path / "run", lambda event: None)
    shapes = {p.left[0] for p in counter.counts if p.of_optimizer}
    assert (D, D) in shapes  # it makes each hidden matrix orthogonal
    assert {p.dtype for p in counter.counts if p.of_optimizer} == {torch.float32}


def test_a_bench_times_each_product_as_often_as_asked(monkeypatch):
    once, often = product((7, 5), (5, 11)), product((3, 7, 5), (3, 5, 11), share=0.5)
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    seconds = Bench([once, often]).seconds()
    assert seconds == {once: 1.0, often: 0.5}  # each call takes one tick


def test_a_bench_multiplies_in_the_layout_of_training():
    transposed = Product(((7, 5), (1, 7)), ((5, 11), (11, 1)), torch.bfloat16)
    ((left, right, out),) = Bench([transposed])._operands.values()
    assert left.stride() == (1, 7)
    assert left.dtype == right.dtype == torch.bfloat16
    assert out.shape == (7, 11)
    assert left.float().std() > 0.5  # zeros would be faster


def test_parts_are_timed_from_outside_and_left_as_they_were():
    model = nn.Linear(7, 5)
    optimizer = AdamW(model.parameters())
    before = torch.Tensor.backward, nn.utils.clip_grad_norm_

    def work() -> None:
        model(torch.randn(3, 7)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with parts_timed() as parts:
        work()
    assert set(parts) == {"backward", "clip", "AdamW"}
    assert all(seconds > 0 for seconds in parts.values())
    taken = dict(parts)
    work()
    assert (torch.Tensor.backward, nn.utils.clip_grad_norm_) == before
    assert dict(parts) == taken


def test_a_budget_of_steps_takes_the_place_of_any_other(tmp_path):
    config = replace(run_config(tmp_path), steps=None, minutes=3.0, patience=2)
    budget = budget_of(config, 17)
    assert (budget.steps, budget.minutes, budget.epochs) == (17, None, None)
    assert (budget.validations, budget.patience) == (1, 0)
    assert budget.model == config.model


# Turns


def leave_without_a_turn(turn: Turn) -> None:
    turn.done({})
    time.sleep(0.5)  # meanwhile the turn is given


def append_in_turns(turn: Turn, path: Path, name: str) -> None:
    turn.done({})
    for number in range(2):
        turn.wait()
        with path.open("a") as file:
            file.write(f"{name} begins\n")
            time.sleep(0.02)
            file.write(f"{name} ends\n")
        turn.done({"number": number, "process": os.getpid()})


def make_a_mistake(turn: Turn) -> None:
    raise UserError("the text is empty: give another")


def test_a_contestant_that_leaves_with_its_turn_unread_has_ended_early():
    with (
        Turns({"a": (leave_without_a_turn, ())}, threads=1) as turns,
        pytest.raises(UserError, match="a ended early"),
    ):
        turns.take("a")


def test_turns_are_taken_one_at_a_time_in_processes_of_their_own(tmp_path):
    path = tmp_path / "log"
    who = {name: (append_in_turns, (path, name)) for name in ("a", "b")}
    with Turns(who, threads=1) as turns:
        taken = [turns.take(name) for name in ("a", "b", "b", "a")]
        with pytest.raises(UserError, match="a ended early"):
            turns.take("a")
    lines = path.read_text().splitlines()
    assert lines == [f"{n} {what}" for n in "abba" for what in ("begins", "ends")]
    assert [found["number"] for found in taken] == [0, 0, 1, 1]
    assert len({found["process"] for found in taken} | {os.getpid()}) == 3
    with pytest.raises(UserError, match="the text is empty"), Turns({"c": (make_a_mistake, ())}):
        pass


def test_the_benchmark_from_the_preset_to_the_file(tmp_path, capsys):
    config, out = toml_of(tmp_path), tmp_path / "step.json"
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "model.py").write_text(NANOGPT, "utf-8")
    argv = [str(config), "--repeat", "2", "--threads", "1", "--validation", "--out", str(out)]
    step.main([*argv, "--nanogpt", str(tmp_path / "gpt"), "--compile", "off"])
    result = json.loads(out.read_text("utf-8"))
    assert result["tokens_per_step"] == 5 * 11
    assert set(result["contestants"]) == {"ours", "nanogpt float32"}
    assert result["contestants"]["ours"]["ours_is_faster_by"] == 1
    assert result["validation_seconds"] > 0
    parts = result["parts_seconds"]
    assert {"backward", "clip", "AdamW", "Muon"} < set(parts)
    assert sum(parts.values()) == pytest.approx(result["step_seconds"])
    share = result["share_at_full_rate"]
    assert 0 < share < 1  # the products are part of the step
    assert result["share_at_80_percent_of_rate"] == pytest.approx(share / 0.8)
    alone = sum(row["seconds_a_step"] for row in result["products"])
    assert alone == pytest.approx(result["product_seconds"], rel=0.5)
    apart = [result[name]["product_flops"] for name in ("without_optimizer", "of_optimizer")]
    assert sum(apart) == pytest.approx(result["product_flops"])
    assert min(apart) > 0
    assert "GFLOP/s" in capsys.readouterr().out


def test_a_preset_that_is_not_there_is_one_line():
    with pytest.raises(SystemExit, match="error: preset wikitext3 is not known"):
        step.main(["wikitext3"])
