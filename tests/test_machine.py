"""The machine: what is there is taken, what is not there is a user's error."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minigpt import machine
from minigpt.errors import UserError
from minigpt.machine import choose_device, choose_precision, matrix_rates, set_threads


@pytest.fixture
def accelerators(monkeypatch):
    """Return a function that lets this machine seem to have a GPU of each kind, or none."""

    def have(*kinds: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * ("cuda" in kinds))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)

    return have


@pytest.mark.parametrize(
    ("there", "taken"),
    [((), "cpu"), (("cuda",), "cuda"), (("mps",), "mps"), (("cuda", "mps"), "cuda")],
)
def test_auto_takes_the_fastest_that_is_there(accelerators, there, taken):
    accelerators(*there)
    assert choose_device("auto").type == taken
    assert choose_device("cpu").type == "cpu"
    for name in there:
        assert choose_device(name).type == name


def test_a_card_can_be_named_by_its_number(accelerators):
    accelerators("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match="device cuda:2 is not available here"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "tpu", "", "cpu:x", "cpu:", "auto:1"])
def test_a_device_that_is_not_there_is_a_users_error(accelerators, name):
    accelerators()
    with pytest.raises(UserError, match=f"device {name} is not available here: take auto or cpu"):
        choose_device(name)


def test_a_run_on_the_cpu_never_starts_cuda(tmp_path):
    """Not to train, evaluate or write, though there seems to be a card (nanoGPT#304, #293)."""
    code = f"""
import functools, minigpt, torch
from minigpt import machine, training_state
from tiny import run_config, write_corpus
from pathlib import Path

def started(*_, **__):
    raise AssertionError("CUDA was started")

torch.cuda.init = torch.cuda._lazy_init = torch.cuda.synchronize = started
torch.cuda.is_available = lambda: True
training_state.matrix_rates = functools.partial(machine.matrix_rates, size=8)
folder = Path({str(tmp_path)!r})
config = run_config(write_corpus(folder / "text.txt"), steps=2, precision="auto")
run = minigpt.train(config, folder / "run")
minigpt.evaluate(run)
minigpt.generate(minigpt.load(folder / "run"), "w1", max_new_tokens=3)
assert not torch.cuda.is_initialized()
"""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_are_as_many_as_asked_for_or_as_there_are_cores(monkeypatch):
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == torch.get_num_threads() == 1
        if hasattr(os, "sched_getaffinity"):
            assert set_threads(0) == len(os.sched_getaffinity(0))
            monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        assert set_threads(0) == 3
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert set_threads(0) == 1
    finally:
        torch.set_num_threads(before)


def test_matrix_rates_are_measured_for_both_precisions():
    rates = matrix_rates(torch.device("cpu"), size=211)  # large enough for a busy machine
    assert set(rates) == {"float32", "bfloat16"}
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize(("a_product", "n_products"), [(0.01, 6), (0.06, 5), (0.2, 2), (5.0, 1)])
def test_a_processor_without_bfloat16_does_not_pay_for_six_products(
    monkeypatch, a_product, n_products
):
    readings = itertools.count()
    # The clock is read before and after each, and tells a product's time further on.
    monkeypatch.setattr(
        machine, "time", SimpleNamespace(perf_counter=lambda: next(readings) * a_product)
    )
    rates = matrix_rates(torch.device("cpu"), size=50)
    assert next(readings) == 2 * 2 * n_products
    assert set(rates.values()) == {round(2 * 50**3 / a_product / 1e9, 1)}


@pytest.mark.parametrize(
    ("bfloat16", "chosen"), [(99.0, "float32"), (129.0, "float32"), (130.0, "bfloat16")]
)
def test_bfloat16_is_taken_where_it_is_clearly_faster(bfloat16, chosen):
    rates = {"float32": 100.0, "bfloat16": bfloat16}
    assert choose_precision("auto", rates) == chosen
    assert choose_precision("float32", rates) == "float32"
    assert choose_precision("bfloat16", rates) == "bfloat16"
