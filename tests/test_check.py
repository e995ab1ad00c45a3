"""Check: a sound installation passes, and each fault that it exists for is found."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from minigpt import check
from minigpt.check import Check, check_installation
from minigpt.config import TokenizerConfig
from minigpt.layers.attention import KeyValueCache
from minigpt.model import MiniGPT
from minigpt.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def failures(checks: Iterator[Check]) -> list[str]:
    return [found.name for found in checks if not found.passed]


def small_models() -> dict[str, MiniGPT]:
    return dict(check._small_models())


def test_a_sound_installation_passes() -> None:
    before = torch.get_rng_state()
    checks = list(check_installation())
    assert torch.equal(before, torch.get_rng_state())
    assert [found for found in checks if not found.passed] == []
    names = " ".join(found.name for found in checks)
    for what in ("fast", "taught", "cached", "bfloat16", "grouped-query", "adaptive", "paper"):
        assert what in names
    for kind in ("basic_english", "wikitext", "bpe", "char"):
        assert f"tokenizer {kind}" in names
    assert "versions" in names


def leaking(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention without a mask: the fault of many a tutorial."""
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))


@pytest.mark.parametrize("name", ["paper", "gpt2", "modern", "grouped-query", "adaptive"])
def test_a_model_that_sees_the_future_is_found(name: str) -> None:
    model = small_models()[name]
    for block in model.blocks:
        block.attention.attend = leaking  # type: ignore[union-attr]
    found = failures(check._check_model(model))
    assert "causal, fast attention" in found
    assert "causal, cached attention" in found
    assert "taught = fast attention" in found


def unmasked(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    scores = (q.bfloat16() @ k.bfloat16().transpose(-2, -1)) / q.size(-1) ** 0.5
    return scores.softmax(-1) @ v.bfloat16()


def without_root(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    unseen = q.new_full((q.size(2), k.size(2)), -torch.inf).triu(1)
    return (q @ k.transpose(-2, -1) + unseen).softmax(-1) @ v.bfloat16()


@pytest.mark.parametrize(
    ("wrong", "check_name"),
    [
        (unmasked, "causal, bfloat16 attention"),
        (without_root, "bfloat16 = fast attention, nearly"),
    ],
)
@pytest.mark.parametrize("name", ["paper", "sampled", "adaptive"])
def test_a_wrong_attention_in_one_piece_is_found(
    name: str, wrong: Any, check_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on no path in float32, and trains whatever is trained in bfloat16 on a CPU."""
    module = import_module("minigpt.layers.attention")
    monkeypatch.setattr(module, "one_piece_causal_attention", wrong)
    found = failures(check._check_model(small_models()[name]))
    assert check_name in found
    assert all("bfloat16" in each for each in found)


def test_a_taught_path_that_sees_the_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_visible(n_queries: int, n_keys: int, device: Any = None) -> Tensor:
        return torch.ones(n_queries, n_keys, dtype=torch.bool)

    # The package minigpt.layers has a function of the module's name, which hides the module.
    monkeypatch.setattr(import_module("minigpt.layers.attention"), "causal_mask", all_visible)
    found = failures(check._check_model(small_models()["gpt2"]))
    assert "causal, taught attention" in found


def test_a_cache_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KeyValueCache.append

    def forgetful(self: KeyValueCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = whole(self, layer, k, v)
        return keys[:, :, -3:], values[:, :, -3:]

    monkeypatch.setattr(KeyValueCache, "append", forgetful)
    found = failures(check._check_model(small_models()["modern"]))
    assert "cached = uncached logits" in found
    assert "cached = uncached text" in found


def test_a_distribution_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models()["adaptive"]
    whole: Callable[[Tensor], Tensor] = model.output.forward
    monkeypatch.setattr(model.output, "forward", lambda hidden: whole(hidden) + 0.01)
    assert "probabilities sum to 1" in failures(check._check_model(model))


def test_a_tokenizer_that_loses_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.train(TokenizerConfig("char", 0), lambda: ["abc", "cab"])
    assert check._check_round_trip(tokenizer, ["abc"]).passed
    whole = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: whole(self, text.strip("c")))
    assert not check._check_round_trip(tokenizer, ["abc"]).passed


def test_the_model_keeps_its_mode_and_its_paths() -> None:
    model = small_models()["modern"].train()
    before = [block.attention.attend for block in model.blocks]  # type: ignore[union-attr]
    assert failures(check._check_model(model)) == []
    assert model.training
    assert [block.attention.attend for block in model.blocks] == before  # type: ignore[union-attr]
