"""Mini-GPT: read the Transformer, train one on WikiText-2 in minutes, take it anywhere.

    import minigpt

    run = minigpt.train("mini", "runs/first", minutes=5)
    print(minigpt.generate(run, "The city"))
    print(minigpt.evaluate(run, "valid").word_perplexity)

    run = minigpt.load("runs/first")
    logits = run.model(ids)

Names are looked up when they are first used, so that `import minigpt` itself imports no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt.api import (
        attention,
        compare,
        evaluate,
        generate,
        heads,
        load,
        measure,
        resume,
        train,
    )
    from minigpt.attention_maps import AttentionMaps
    from minigpt.checkpoint import Run
    from minigpt.comparison import Comparison
    from minigpt.config import Config, ModelConfig, OptimConfig, TokenizerConfig
    from minigpt.errors import UserError
    from minigpt.evaluate import Score
    from minigpt.head_roles import HeadRoles
    from minigpt.measurement import Measurement
    from minigpt.model import MiniGPT
    from minigpt.sampling import Sampling
    from minigpt.tokenizer import Tokenizer

    __version__: str

_HOMES = {
    "load": "api",
    "train": "api",
    "resume": "api",
    "evaluate": "api",
    "measure": "api",
    "compare": "api",
    "generate": "api",
    "attention": "api",
    "heads": "api",
    "AttentionMaps": "attention_maps",
    "Comparison": "comparison",
    "HeadRoles": "head_roles",
    "Measurement": "measurement",
    "Config": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "TokenizerConfig": "config",
    "UserError": "errors",
    "Run": "checkpoint",
    "Score": "evaluate",
    "Sampling": "sampling",
    "MiniGPT": "model",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "AttentionMaps",
    "Comparison",
    "Config",
    "HeadRoles",
    "Measurement",
    "MiniGPT",
    "ModelConfig",
    "OptimConfig",
    "Run",
    "Sampling",
    "Score",
    "Tokenizer",
    "TokenizerConfig",
    "UserError",
    "attention",
    "compare",
    "evaluate",
    "generate",
    "heads",
    "load",
    "measure",
    "resume",
    "train",
]


class _Package(ModuleType):
    """A package whose functions `train`, `evaluate` and `generate` are named as modules are.

    Importing the module minigpt.train would set the name `minigpt.train` to it, and a call that
    worked once would fail the second time. Here the function keeps the name; the module is still
    what `from minigpt.train import …` reads.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import what is asked for; see PEP 562."""
    if name == "__version__":
        return import_module("importlib.metadata").version("mini-gpt-lab")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"minigpt.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__, "__version__"]
