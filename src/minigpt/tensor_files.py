"""Tensor files: what a safetensors file says of itself, held against what it must be.

In: the path of a file, and the config or the optimizers that it must fit. Out: nothing, or a
UserError, before a number of it is loaded and before any model of that size is built.

A file begins with a header: the name, type and shape of each tensor. A config and a header that ask
for more memory than there is cost a few kilobytes to make. So their shapes are compared first, on
PyTorch's meta device, where tensors have no numbers; what is then loaded is as large as the file.

B batch · T context_length · D d_model · V vocabulary · L layers
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from minigpt.config import ModelConfig
from minigpt.errors import require
from minigpt.model import MiniGPT

# Of a model with ten thousand layers the header has some 15 MB, of others a few KB.
MOST_HEADER_BYTES = 1 << 25
# What a context may take beside the weights, in numbers: half a gigabyte.
MOST_CONTEXT_NUMBERS = 1 << 27
# The tables of positions are computed in float64, by way of several others of their size.
_COST_OF_TABLES = 4

# How modules of PyTorch and ours draw them.
_FIRST_WEIGHTS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}

_WEIGHTS = {"F16", "BF16", "F32", "F64"}
_STATE, _GENERATOR = {"F32"}, {"U8"}


class Said(NamedTuple):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Said]:
    """Return what the safetensors file at `path` says of its tensors, by name; none is loaded.

    Raises UserError where the header is too large, and SafetensorError where it is none or does not
    describe a file of this size.
    """
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
    require(n_bytes <= MOST_HEADER_BYTES, f"{path.name} has a header of {n_bytes:,} bytes")
    with safe_open(str(path), framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no dict
        return {
            name: Said(str(part.get_dtype()), tuple(part.get_shape()))
            for name, part in parts.items()
        }


def check_weights(path: Path, config: ModelConfig) -> None:
    """Raise UserError where the file at `path` does not hold the weights of a model of `config`."""
    found = read_header(path)
    # Before anything is built: ten thousand layers take their time even without numbers.
    n_least = config.n_layers + (len(config.cutoffs) if config.output == "adaptive" else 0)
    require(n_least <= len(found), f"{path.name} has {len(found)} tensors, of more layers")
    one_layer = _hollow_layer(config)
    expected = _shapes(one_layer, config)
    known = set[str]().union(*expected)
    for name in found:
        require(name in known, f"{path.name} has a tensor {name} too many")
    for names, shape in expected.items():
        # A table that is used twice stands there once, under one of its names.
        said = [found[name] for name in names if name in found]
        require(len(said) == 1, f"{path.name} has {len(said)} tensors {names[0]}")
        _require_tensor(path, names[0], said[0], shape, _WEIGHTS)
    _require_context(one_layer, config, sum(shape.numel() for shape in expected.values()))


class _Unfilled(TorchFunctionMode):
    """Leaves out what would compute on the meta device: first weights, and a scalar's value.

    PyTorch does that in Python, by way of its compiler, which takes a second or two to import.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function in _FIRST_WEIGHTS:
            return given["tensor"] if "tensor" in given else args[0]
        return function(*args, **(given | {"device": "cpu"} if function is torch.tensor else given))


def _hollow_layer(config: ModelConfig) -> MiniGPT:
    """Return a model of one layer without numbers, with learned positions: they have no table."""
    with torch.device("meta"), _Unfilled():
        return MiniGPT(replace(config, n_layers=1, position="learned"))


def _shapes(one_layer: MiniGPT, config: ModelConfig) -> dict[tuple[str, ...], torch.Size]:
    """Return the shape of each parameter of a model, by the names that it goes by."""
    by_parameter: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in one_layer.named_parameters(remove_duplicate=False):
        by_parameter[parameter].append(name)
    shapes: dict[tuple[str, ...], torch.Size] = {}
    for parameter, names in by_parameter.items():
        inside = names[0].startswith("blocks.0.")
        # All blocks are alike, so that one need be built.
        for i in range(config.n_layers if inside else 1):
            at = tuple(name.replace("blocks.0.", f"blocks.{i}.", 1) for name in names)
            shapes[at if inside else tuple(names)] = parameter.shape
    if config.position != "learned":
        del shapes["positions.weight",]
    return shapes


def check_context(config: ModelConfig) -> None:
    """Raise UserError for a context so long that the run could be trained, but never opened."""
    one_layer = _hollow_layer(config)
    shapes = _shapes(one_layer, config)
    _require_context(one_layer, config, sum(shape.numel() for shape in shapes.values()))


def _require_context(one_layer: MiniGPT, config: ModelConfig, n_weights: int) -> None:
    """Raise UserError where a context would take far more memory than the weights.

    The weights say nothing of its length: positions that are computed have none.
    """
    cache = one_layer.new_cache(1)
    cached = config.n_layers * sum(part.numel() for part in (*cache.keys, *cache.values))
    tables = _COST_OF_TABLES * _n_table_numbers(one_layer, config)
    n_numbers = tables + cached + config.context_length * config.d_model
    require(
        n_numbers <= max(MOST_CONTEXT_NUMBERS, 4 * n_weights),
        f"context_length {config.context_length:,} takes {4 * n_numbers:,} bytes, its weights "
        f"{4 * n_weights:,}",
    )


def _n_table_numbers(one_layer: MiniGPT, config: ModelConfig) -> int:
    """Return how many numbers a model has beside its weights: angles of positions, for the most."""
    width = {"sinusoidal": config.d_model, "rotary": config.d_head}.get(config.position, 0)
    return config.context_length * width + sum(table.numel() for table in one_layer.buffers())


def check_states(path: Path, optimizers: Sequence[Optimizer]) -> None:
    """Raise UserError where the file at `path` does not hold states of `optimizers`.

    Of each parameter all states are there, or none: it had no gradient yet.
    """
    found = read_header(path)
    generators = {name for name in found if name in ("generator.cpu", "generator.cuda")}
    require("generator.cpu" in found, f"{path.name} has no generator.cpu")
    for name in generators:
        require(found[name].dtype in _GENERATOR, f"{path.name} has {name} in {found[name].dtype}")
    _require_tensor(
        path, "generator.cpu", found["generator.cpu"], torch.get_rng_state().shape, _GENERATOR
    )
    left = found.keys() - generators
    for prefix, states in _states(optimizers):
        names = {f"{prefix}.{name}": shape for name, shape in states.items()}
        missing = names.keys() - left
        require(
            not missing or missing == names.keys(),
            f"{path.name} has no {', '.join(sorted(missing))}",
        )
        for name in names.keys() & left:
            _require_tensor(path, name, found[name], names[name], _STATE)
        left -= names.keys()
    require(not left, f"{path.name} has a tensor {min(left, default='')} too many")


def _states(
    optimizers: Sequence[Optimizer],
) -> Iterable[tuple[str, Mapping[str, torch.Size]]]:
    """Yield what each parameter's states are called in a checkpoint, and their shapes."""
    for i, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            like, scalar = parameter.shape, torch.Size()
            if isinstance(optimizer, AdamW):
                states = {"step": scalar, "exp_avg": like, "exp_avg_sq": like}
            else:
                states = {"momentum_buffer": like}
            yield f"optimizer.{i}.{number}", states


def _require_tensor(
    path: Path, name: str, said: Said, shape: Sequence[int], dtypes: set[str]
) -> None:
    require(
        said.shape == tuple(shape),
        f"{path.name} has {name} of shape {list(said.shape)}, not {list(shape)}",
    )
    require(said.dtype in dtypes, f"{path.name} has {name} in {said.dtype}, not in {min(dtypes)}")
