"""Tensor files: what is expected of one is what a model of its config really has."""

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch

from minigpt import tensor_files
from minigpt.config import Position, load_preset
from minigpt.model import MiniGPT

SMALL = {"vocab_size": 500, "d_model": 48, "n_heads": 4, "d_ff": 64, "context_length": 24}


def config_of(preset, position):
    config = replace(load_preset(preset).model, **SMALL, position=position, n_layers=3)
    few = {"cutoffs": (50, 200)} if config.output == "adaptive" else {}
    few |= {"n_frequent": 50, "n_sampled": 20} if config.output == "sampled" else {}
    return replace(config, **few).resolved(500)


@pytest.mark.parametrize("position", get_args(Position))
@pytest.mark.parametrize("preset", ["mini", "paper", "gpt2", "modern", "wikitext2-10min"])
def test_a_hollow_layer_tells_the_shapes_and_tables_of_a_whole_model(preset, position):
    config = config_of(preset, position)
    model = MiniGPT(config)
    hollow = tensor_files._hollow_layer(config)
    assert all(parameter.is_meta or not parameter.dim() for parameter in hollow.parameters())
    shapes = tensor_files._shapes(hollow, config)
    names = {name for each in shapes for name in each}
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for each, shape in shapes.items():
        assert all(model.get_parameter(name).shape == shape for name in each)
    real = sum(buffer.numel() for buffer in model.buffers())
    counted = tensor_files._n_table_numbers(hollow, config)
    assert real == counted


def test_random_numbers_are_not_drawn_for_it():
    config = config_of("mini", "rotary")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    tensor_files._hollow_layer(config)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_is_opened_without_the_compiler():
    """PyTorch computes on the meta device by way of it, and imports it for seconds."""
    code = """
import sys, minigpt
run = minigpt.load("demo")
minigpt.generate(run, "The river", max_new_tokens=2)
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
