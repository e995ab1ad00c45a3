"""Self-test: does this installation, or this run, do what a language model must?

In: nothing, or a `Run`. Out: one `Check` after the other, each with what was measured.

Without a run, small models with random weights are tested, one for each way attention is computed,
and each kind of tokenizer; with one, its own model and tokenizer.

B batch · T sequence · D d_model · V vocabulary
"""

import dataclasses
import itertools
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor, nn

from minigpt.attention_maps import recorded
from minigpt.checkpoint import Run
from minigpt.config import ModelConfig, TokenizerConfig, load_preset
from minigpt.decoding import generate
from minigpt.evaluate import evaluating
from minigpt.layers.pointer import Copied, Pointer, chances, direction
from minigpt.model import MiniGPT
from minigpt.sampling import Sampling
from minigpt.tokenizer import Tokenizer

TOLERANCE = 1e-4  # float32, a few dozen products deep, logits of size 1
LONGEST_FILLED = 2_048  # ids; read anew for each of 16 tokens, the square of it in time
BFLOAT16_TOLERANCE = 0.1  # three digits, and what is lost adds up

_TEXT = (
    " = A title = ",
    "",
    "The tower , built in 1889 , is 330 metres tall ( and still the tallest ) .",
    "It was n't finished until the spring ; half of the city went to see it .",
    'Naïve café, « Ελλάδα », 语言 😊 … "quotes" and  two blanks.',
)

Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Check:
    """One property: what it is called, whether it holds, and what was measured."""

    name: str
    passed: bool
    detail: str


def check_installation() -> Iterator[Check]:
    """Test small random models of every make, every kind of tokenizer, and name the versions."""
    yield _check_versions()
    for name, model in _small_models():
        yield from _check_model(model, f"{name}: ")
    for kind in ("basic_english", "wikitext", "bpe", "char"):
        config = TokenizerConfig(kind, 300 if kind == "bpe" else 0)
        yield _check_round_trip(Tokenizer.train(config, lambda: _TEXT), _TEXT)


def check_run(run: Run) -> Iterator[Check]:
    """Test a run: its model and its tokenizer."""
    yield _check_versions()
    yield from _check_model(run.model)
    yield _check_round_trip(run.tokenizer, _TEXT)
    n_entries, n_rows = run.tokenizer.vocab_size, run.model.config.vocab_size
    yield Check(
        "tokenizer fits the model",
        n_entries == n_rows,
        f"{n_entries:,} entries, {n_rows:,} rows in the model",
    )


def _small_models() -> Iterator[tuple[str, MiniGPT]]:
    """Yield models of some 60,000 weights, made of the parts of the presets and some more."""
    small = {"vocab_size": 53, "context_length": 23, "d_model": 48, "n_heads": 4, "n_layers": 2}
    variants: dict[str, tuple[ModelConfig, dict[str, object]]] = {
        name: (load_preset(name).model, {}) for name in ("paper", "gpt2", "modern")
    }
    variants["grouped-query"] = (load_preset("modern").model, {"n_kv_heads": 2})
    variants["sampled"] = (
        load_preset("modern").model,
        {
            "output": "sampled",
            "output_bias": True,
            "n_frequent": 11,
            "n_sampled": 7,
            "pointer": True,
        },
    )
    variants["adaptive"] = (
        load_preset("modern").model,
        {"output": "adaptive", "cutoffs": (11, 31)},
    )
    for name, (parts, changes) in variants.items():
        config = dataclasses.replace(parts, **small, d_ff=0, **changes)  # type: ignore[arg-type]
        # The generator is put back: a check must not change what its caller draws next.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = MiniGPT(config)
            for parameter in model.parameters():
                # Weights as small as a new model's would hide a leak: it hardly looks around yet.
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=1 / math.sqrt(parameter.size(-1)))
        yield name, model.eval()


def _check_model(model: MiniGPT, prefix: str = "") -> Iterator[Check]:
    """Test one model: causal on each path, paths equal, cache exact, probabilities whole."""
    ids = _random_ids(model)
    with torch.no_grad(), evaluating(model):
        for path, read in _paths(model).items():
            yield _check_causality(f"{prefix}causal, {path} attention", read, ids)
        yield _check_equal(f"{prefix}taught = fast attention", _taught(model), model, ids)
        yield _check_equal(
            f"{prefix}bfloat16 = fast attention, nearly",
            _in_bfloat16(model),
            model,
            ids,
            BFLOAT16_TOLERANCE,
        )
        yield _check_equal(f"{prefix}cached = uncached logits", _cached(model), model, ids)
        yield _check_sum(f"{prefix}probabilities sum to 1", model, ids)
    yield _check_generation(f"{prefix}cached = uncached text", model)


def _check_sum(name: str, model: MiniGPT, ids: Tensor) -> Check:
    """Add up exp(−nats) of every word after one text: the nats that all figures rest on."""
    hidden = model.hidden(ids)  # (1, T, D)
    words = torch.arange(model.config.vocab_size, device=ids.device)
    copied = None
    if isinstance(model.pointer, Pointer):
        log_gate, weights = model.pointer(hidden[:, -1:], direction(hidden))
        copied = Copied(log_gate[0].expand(len(words)), chances(weights, ids, len(words))[0, 0])
    _, nats = model.output.nats(hidden[0, -1].expand(len(words), -1), words, copied)  # (V,)
    # First to the CPU: the graphics chip of a Mac has no float64.
    off = abs(nats.cpu().double().neg().exp().sum().item() - 1)
    if model.config.output == "adaptive" or copied is not None:
        logits = model.logits(hidden, ids, last=1)  # which claim to be log-probabilities
        off = max(off, abs(logits.cpu().double().exp().sum().item() - 1))
    return Check(name, off < TOLERANCE, f"off by {off:.1e}")


def _random_ids(model: MiniGPT) -> Tensor:
    """Return ids (1, T) as no text would have them, T the context but at most 64."""
    length = min(model.config.context_length, 64)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def _paths(model: MiniGPT) -> dict[str, Read]:
    """Return, by name, each way to get the logits (1, T, V) of ids (1, T)."""
    return {
        "fast": model,
        "taught": _taught(model),
        "cached": _cached(model),
        "bfloat16": _in_bfloat16(model),
    }


def _taught(model: MiniGPT) -> Read:
    def read(ids: Tensor) -> Tensor:
        with recorded(model):
            return model(ids)  # type: ignore[no-any-return]

    return read


def _in_bfloat16(model: MiniGPT) -> Read:
    """Read with products in bfloat16: on a CPU, attention is then done in one piece."""

    def read(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return model(ids).float()  # type: ignore[no-any-return]

    return read


def _cached(model: MiniGPT) -> Read:
    """Read the first third at once, then a stretch behind it, then id by id."""

    def read(ids: Tensor) -> Tensor:
        cache = model.new_cache(1)
        length = ids.size(1)
        bounds = sorted({0, length // 3, *range(2 * length // 3, length + 1)})
        pieces = []
        for start, end in itertools.pairwise(bounds):
            piece = ids[:, start:end]
            pieces.append(model.logits(model.hidden(piece, cache), piece, cache))
        return torch.cat(pieces, dim=1)

    return read


def _check_causality(name: str, read: Read, ids: Tensor) -> Check:
    """Change ids from the middle on: logits before it must stay, those after it must not."""
    # Within the stretch that the cached path reads at once, so that its mask is tested as well.
    middle = ids.size(1) // 2
    changed = ids.clone()
    changed[:, middle:] = ids.flip(1)[:, middle:].add(1) % (int(ids.max()) + 1)
    moved = (read(changed) - read(ids)).abs().amax(dim=(0, 2))  # (T,)
    before, after = moved[:middle].max().item() if middle else 0.0, moved[middle:].max().item()
    passed = before <= TOLERANCE * after and after > 0
    return Check(name, passed, f"earlier logits moved by {before:.1e}, later ones by {after:.1e}")


def _check_equal(
    name: str, read: Read, reference: Read, ids: Tensor, tolerance: float = TOLERANCE
) -> Check:
    expected = reference(ids)
    apart = (read(ids) - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    return Check(name, apart <= tolerance * scale, f"logits differ by {apart:.1e} at most")


def _check_generation(name: str, model: MiniGPT) -> Check:
    """Draw greedily past the end of the window, twice over, with the cache and without."""
    context = model.config.context_length
    n_new = 3 * context if context <= 64 else max(16, 4096 // context)
    # A long context is filled by the prompt, so that the window still moves a few times. A very
    # long one would take hours, and may be all that a stranger's folder wants.
    filled = min(context, LONGEST_FILLED) - 8
    prompt = _random_ids(model)[0].tolist()
    while len(prompt) < filled:
        prompt += prompt[: filled - len(prompt)]
    sampling = Sampling(temperature=0.0, max_new_tokens=n_new)
    cached, uncached = (list(generate(model, prompt, sampling, use_cache=c)) for c in (True, False))
    n_same = next(
        (i for i, (a, b) in enumerate(zip(cached, uncached, strict=True)) if a != b), n_new
    )
    where = "past" if context <= LONGEST_FILLED else "far from"
    return Check(name, n_same == n_new, f"{n_same} of {n_new} tokens, {where} the window's end")


def _check_round_trip(tokenizer: Tokenizer, lines: Sequence[str]) -> Check:
    """Test decode(encode(text)): the text itself for bpe and char; for words, it stays as it is."""
    text = "\n".join(lines)
    ids = tokenizer.encode(text)
    back = tokenizer.decode(ids)
    if tokenizer.kind in ("bpe", "char"):
        passed, what = back == text, "text comes back exactly"
    else:
        # Words lose blanks and case on the way in; what came out once must not change again.
        back = tokenizer.decode(ids, raw=True)
        passed, what = tokenizer.decode(tokenizer.encode(back), raw=True) == back, "words come back"
    detail = f"{len(ids)} ids" if passed else f"differs: {back[:40]!r}"
    return Check(f"tokenizer {tokenizer.kind}: {what}", passed, detail)


def _check_versions() -> Check:
    """Name what is installed, and test that torch has what is needed."""
    names = ("torch", "tokenizers", "safetensors", "tyro")
    found = [f"Python {platform.python_version()}"]
    found += [f"{name} {metadata.version(name)}" for name in names]
    passed = hasattr(torch.optim, "Muon")
    return Check("versions", passed, ", ".join(found) + ("" if passed else ": torch is too old"))
