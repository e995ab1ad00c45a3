"""Every choice of a run, named, typed, checked and frozen.

In: the name of a preset (a TOML file in `presets/`), a TOML or JSON file, a dictionary, flags laid
over it.
Out: one `Config`, which is saved as config.json beside the weights it led to.

A choice lives on one field and its help text stands below it, once: the command line shows the same
words. Nothing here imports torch, so that `minigpt --help` answers at once.
"""

import dataclasses
import difflib
import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from minigpt.errors import UserError, closest, require
from minigpt.reading import UnreadableError, read_text
from minigpt.sampling import Sampling

Position = Literal["sinusoidal", "learned", "rotary"]
Norm = Literal["layer", "rms"]
NormPlacement = Literal["post", "pre"]
FeedForward = Literal["relu", "gelu", "swiglu", "relu2"]
Output = Literal["full", "sampled", "adaptive"]
FirstWeights = Literal["random", "counted"]
TokenizerKind = Literal["basic_english", "wikitext", "bpe", "char"]
Precision = Literal["auto", "float32", "bfloat16"]

BUDGETS = ("minutes", "epochs", "steps")

ConfigT = TypeVar("ConfigT")

# What other code bases call some settings; whoever types such a name is told ours.
_ELSEWHERE = {
    "learning_rate": "optim.rate",
    "lr": "optim.rate",
    "n_embd": "model.d_model",
    "emb_dim": "model.d_model",
    "embed_dim": "model.d_model",
    "hidden_size": "model.d_model",
    "block_size": "model.context_length",
    "seq_len": "model.context_length",
    "bptt": "model.context_length",
    "max_iters": "steps",
}


# The most that a size or a budget may be: beyond it PyTorch's own counters overflow.
LARGEST = 2**31 - 1
MOST_CONFIG_BYTES = 1 << 20


def closest_key(name: str, keys: Iterable[str]) -> str:
    """Return ` (did you mean KEY?)` for the dotted key or flag most like `name`, or nothing.

    The last part of a key is enough to find it, and so are the names it has elsewhere.
    """
    whole = {_plain(key): key for key in keys}
    # Of two keys that end alike the first is meant: those of the model stand above the optimizer's.
    last = {key.rpartition(".")[2]: whole[key] for key in reversed(whole)}
    foreign = {theirs: whole[ours] for theirs, ours in _ELSEWHERE.items() if ours in whole}
    spoken = {**foreign, **last, **whole}
    plain = _plain(name)
    # A right name in a wrong table is nearer than any other name in that one.
    _, _, end = plain.rpartition(".")
    near = [end] if end in spoken else difflib.get_close_matches(plain, spoken, n=1, cutoff=0.6)
    return f" (did you mean {spoken[near[0]]}?)" if near else ""


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def key_names(kind: type, path: str = "") -> list[str]:
    """Return the dotted names of all settings in the dataclass `kind` and in those inside it."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        inner = dataclasses.is_dataclass(hint)
        names += key_names(hint, f"{path}{name}.") if inner else [f"{path}{name}"]
    return names


def _require_positive(config: object, *names: str, most: float = LARGEST) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} is {value}: it must be greater than 0")
        require(value <= most, f"{name} is {value}: it must be at most {most:,}")


def _require_share(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 <= value < 1, f"{name} is {value}: it must be at least 0 and less than 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes ids."""

    kind: TokenizerKind = "basic_english"
    """basic_english (the classic one), wikitext (the closed vocabulary of all published figures),
    bpe (bytes, GPT-2's split) or char."""
    vocab_size: int = 10_000
    """Entries kept, specials included, the most frequent first; 0 keeps all (not for bpe)."""

    def __post_init__(self) -> None:
        """Refuse a vocabulary that could not even hold the specials."""
        require(
            self.vocab_size == 0 or 5 <= self.vocab_size <= LARGEST,
            f"tokenizer.vocab_size is {self.vocab_size}: give 0 (every word) or at least 5, "
            f"at most {LARGEST:,}",
        )
        require(
            self.kind != "bpe" or self.vocab_size >= 257,
            f"tokenizer.vocab_size is {self.vocab_size}: bpe needs at least 257 "
            "(256 bytes and <eos>)",
        )


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and parts of a Mini-GPT. Letters in brackets stand in the shapes of the code."""

    vocab_size: int = 0
    """Entries of the vocabulary [V]; 0: as many as the tokenizer has."""
    context_length: int = 256
    """The longest stretch of text that the model sees at once [T]."""
    d_model: int = 256
    """Width of the residual stream [D]."""
    n_heads: int = 8
    """Attention heads [H], each of which may look at another relation."""
    n_kv_heads: int = 0
    """Heads that keys and values have (grouped-query attention); 0: as many as n_heads."""
    d_head: int = 0
    """Width of a head [K]; 0: d_model / n_heads."""
    d_ff: int = 0
    """Inner width of the feed-forward [F]; 0: 4 d_model, for swiglu 8/3 d_model in whole 32s."""
    n_layers: int = 6
    """Blocks, one upon the other [L]."""
    position: Position = "rotary"
    """sinusoidal and learned add a vector to each embedding; rotary turns queries and keys."""
    norm: Norm = "rms"
    """layer (centre and scale) or rms (scale alone)."""
    norm_placement: NormPlacement = "pre"
    """post: after each residual sum, as in the paper; pre: before each part, as in GPT-2."""
    feed_forward: FeedForward = "swiglu"
    """The network between two attentions, named by its activation."""
    embedding_norm: bool = False
    """Normalise each embedding, so that what a word is weighs as much as what blocks add to it."""
    token_shift: bool = False
    """Add to each embedding, channel by channel, a learned share of the one before it."""
    qk_norm: bool = False
    """Normalise each query and key over d_head before it is turned."""
    bias: bool = False
    """Give linear maps and layer norms a bias."""
    tie_embeddings: bool = True
    """Use one table for the words that come in and the words that go out."""
    dropout: float = 0.0
    """Share of activations dropped in training, after the embedding and after each part."""
    edge_dropout: float = 0.0
    """Share of activations dropped before the first block and behind the last one, and nowhere
    else: two masks a step, where dropout needs two a block and more."""
    attention_dropout: float = 0.0
    """Share of attention weights dropped in training. On a CPU anything above 0 is slow."""
    output: Output = "full"
    """full softmax; sampled: full, but trained on the frequent words and a sample of the others;
    adaptive: frequent words first, rare ones in clusters that cost less."""
    output_bias: bool = False
    """Add a learned number to each word's score (not for adaptive)."""
    pointer: bool = False
    """Let a pointer say again what the context has said, where it was in a place like this one
    (not for adaptive)."""
    n_frequent: int = 2_000
    """Ids below this are scored for every batch by the sampled softmax."""
    n_sampled: int = 2_048
    """Draws from the other ids, for each batch."""
    cutoffs: tuple[int, ...] = (2_000, 10_000)
    """Ids at which the clusters of the adaptive softmax begin. Those past the vocabulary go."""
    tail_divisor: int = 4
    """Each cluster of rare words is narrower than the one before it by this factor."""
    norm_eps: float = 1e-5
    """Added to the variance before its root is taken."""
    rope_base: float = 10_000.0
    """Base of the rotary angles: the larger, the slower the slowest pair turns."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together, naming the numbers."""
        _require_positive(self, "context_length", "d_model", "n_heads")
        _require_positive(self, "n_frequent", "tail_divisor", "norm_eps", "rope_base")
        _require_positive(self, "n_sampled", most=1_000_000)  # drawn anew for each batch
        _require_positive(self, "n_layers", most=10_000)
        _require_share(self, "dropout", "edge_dropout", "attention_dropout")
        for name in ("vocab_size", "n_kv_heads", "d_head", "d_ff"):
            value = getattr(self, name)
            require(value >= 0, f"{name} is {value}: it must be greater than 0, or 0 to derive it")
            require(value <= LARGEST, f"{name} is {value}: it must be at most {LARGEST:,}")
        require(
            self.d_head > 0 or self.d_model % self.n_heads == 0,
            f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}: "
            "change one of them, or set d_head",
        )
        kv_heads = self.n_kv_heads or self.n_heads
        require(
            self.n_heads % kv_heads == 0,
            f"n_heads {self.n_heads} is not a multiple of n_kv_heads {kv_heads}: "
            "each key head serves the same number of query heads",
        )
        d_head = self.d_head or self.d_model // self.n_heads
        require(
            self.position != "rotary" or d_head % 2 == 0,
            f"d_head {d_head} is odd: rotary positions turn pairs, so make it even",
        )
        require(
            self.position != "sinusoidal" or self.d_model % 2 == 0,
            f"d_model {self.d_model} is odd: sinusoidal positions come in pairs, so make it even",
        )
        require(
            not (self.output_bias and self.output == "adaptive"),
            "output_bias is true, but output adaptive has no bias: take output full or sampled",
        )
        require(
            not (self.pointer and self.output == "adaptive"),
            "pointer is true, but output adaptive cannot be mixed with one: take output full or "
            "sampled",
        )
        rising = all(a < b for a, b in zip(self.cutoffs, self.cutoffs[1:], strict=False))
        require(
            rising and all(cutoff > 0 for cutoff in self.cutoffs),
            f"cutoffs are {self.cutoffs}: they must be greater than 0 and rise",
        )

    def resolved(self, vocab_size: int = 0) -> "ModelConfig":
        """Return a copy in which every size that was left at 0 has the value it stands for.

        vocab_size is the tokenizer's; a config that already names another one is an error.
        """
        require(
            not (vocab_size and self.vocab_size) or vocab_size == self.vocab_size,
            f"model.vocab_size is {self.vocab_size} but the tokenizer has {vocab_size} entries: "
            "leave it out, or set tokenizer.vocab_size",
        )
        size = vocab_size or self.vocab_size
        require(size > 0, "vocab_size is 0: give the number of entries of the vocabulary")
        # Swiglu has three matrices: at 8/3 D they cost what the two of the others do at 4 D.
        swiglu_width = 32 * math.ceil(8 * self.d_model / 3 / 32)
        wide = swiglu_width if self.feed_forward == "swiglu" else 4 * self.d_model
        return dataclasses.replace(
            self,
            vocab_size=size,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_head=self.d_head or self.d_model // self.n_heads,
            d_ff=self.d_ff or wide,
            cutoffs=tuple(cutoff for cutoff in self.cutoffs if cutoff < size),
        )


@dataclass(frozen=True)
class OptimConfig:
    """How gradients become steps: Muon for the hidden matrices, AdamW for all else."""

    matrix_rate: float = 0.02
    """Learning rate of the hidden matrices (Muon); 0 gives them to AdamW as well."""
    rate: float = 3e-3
    """Learning rate of AdamW."""
    momentum: float = 0.95
    """Momentum of Muon, Nesterov's."""
    beta1: float = 0.9
    """How slowly AdamW forgets the mean of its gradients."""
    beta2: float = 0.95
    """How slowly AdamW forgets their squares."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    matrix_weight_decay: float = 0.1
    """Decay of the hidden matrices under Muon, times its rate."""
    weight_decay: float = 0.01
    """Decay of tables and matrices under AdamW, times its rate. Norms and biases never decay."""
    clip: float = 1.0
    """Largest norm of all gradients, taken together; 0 does not clip."""
    warm_up: float = 0.03
    """Share of the budget over which the rates rise."""
    hold: float = 0.4
    """Share of the budget after which they fall, in a straight line."""
    final_rate: float = 0.0
    """What they fall to, as a share of the highest."""

    def __post_init__(self) -> None:
        """Refuse rates and shares outside their range."""
        _require_positive(self, "rate", "eps", most=1_000)
        _require_share(self, "momentum", "beta1", "beta2", "warm_up", "final_rate")
        for name in ("matrix_rate", "matrix_weight_decay", "weight_decay", "clip"):
            value = getattr(self, name)
            require(0 <= value <= 1_000, f"{name} is {value}: it must lie between 0 and 1,000")
        require(
            self.warm_up <= self.hold <= 1,
            f"hold is {self.hold}: it must lie between warm_up ({self.warm_up}) and 1",
        )


@dataclass(frozen=True)
class Config:
    """One training run: what is read, what is built, how long it learns, and on what machine."""

    data: str = "wikitext-2"
    """wikitext-2, wikitext-2-raw, wikitext-103, tinystories, python-docs, a .txt file, a folder,
    or hf:OWNER/NAME for a data set of the Hugging Face hub."""
    minutes: float | None = None
    """Budget in minutes of training, compilation and validation included."""
    epochs: float | None = None
    """Budget in passes over the training text."""
    steps: int | None = None
    """Budget in optimizer steps."""
    batch_size: int = 16
    """Windows of context_length ids in one step [B]."""
    accumulation: int = 1
    """Micro-batches that a step's batch is computed in, one after the other, to save memory."""
    validations: int = 4
    """How often, in equal parts of the budget, all of valid is scored, text is sampled and a
    checkpoint is written; the last is at the end."""
    save_minutes: float = 5.0
    """Minutes between the checkpoints that are written beside those of the validations."""
    keep_checkpoints: int = 0
    """Older checkpoints that stay, beside the last and the best."""
    patience: int = 0
    """Stop after this many validations without a better one; 0 never does."""
    seed: int = 1
    """Seed of every random number: initial weights, order of the data, dropout, samples."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 0
    """CPU threads; 0: as many as there are cores to use."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto times a few passes with and without it and keeps the faster (in budgets
    under five minutes it is left out)."""
    precision: Precision = "auto"
    """Precision of the matrix products; auto times both and takes bfloat16 where it is clearly
    faster. Weights, sums and losses are float32 always."""
    first_weights: FirstWeights = "random"
    """random, or counted: the table begins with word vectors and the output's bias with the words'
    shares of the text, both counted in train."""
    log: Literal["none", "tensorboard", "wandb"] = "none"
    """Where else the metrics go; metrics.jsonl has them always."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Refuse a run that could not start."""
        require(bool(self.data.strip()), "data is empty: name a corpus, a file or a folder")
        for name in BUDGETS:
            if getattr(self, name) is not None:
                _require_positive(self, name)
        given = [n for n in BUDGETS if getattr(self, n) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are both given: one budget is enough")
        _require_positive(self, "batch_size", "accumulation", "validations", most=1_000_000)
        _require_positive(self, "save_minutes")
        require(
            0 <= self.keep_checkpoints <= 1_000_000,
            f"keep_checkpoints is {self.keep_checkpoints}: it must lie between 0 and 1,000,000",
        )
        require(self.patience >= 0, f"patience is {self.patience}: it must be at least 0")
        require(
            0 <= self.threads <= 1_024,
            f"threads is {self.threads}: it must lie between 0 and 1,024",
        )
        require(0 <= self.seed < 2**32, f"seed is {self.seed}: it must lie between 0 and 2^32 - 1")
        require(
            self.batch_size % self.accumulation == 0,
            f"batch_size {self.batch_size} is not a multiple of accumulation {self.accumulation}: "
            "change one of them",
        )
        require(
            self.first_weights == "random" or self.model.output != "adaptive",
            "first_weights is counted, but the tables of output adaptive differ in width: "
            "take output full or sampled, or first_weights random",
        )
        require(
            self.model.output != "sampled" or self.tokenizer.kind != "bpe",
            "output is sampled, which expects ids by falling frequency, and those of tokenizer bpe "
            "are not: take output full",
        )
        require(
            self.device.split(":")[0] in ("auto", "cpu", "cuda", "mps"),
            f"device {self.device} is not known: take auto, cpu, cuda or mps",
        )


def preset_names() -> list[str]:
    """Return the names that `minigpt train` knows, in the order of the alphabet."""
    folder = resources.files("minigpt") / "presets"
    files = [file.name for file in folder.iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load_preset(name: str) -> Config:
    """Return the preset called `name`. Raises UserError, with the nearest name, where none is."""
    names = preset_names()
    require(
        name in names,
        f"preset {name} is not known{closest(name, names)}: take one of {', '.join(names)}",
    )
    text = (resources.files("minigpt") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return from_dict(Config, tomllib.loads(text))


def load_file(path: Path, base: Config | None = None) -> Config:
    """Return what a TOML file says, or a .json one, laid over `base` (default: the defaults).

    The config.json of a run is such a file: what it says is all that the run was told.
    """
    kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
    try:
        text = read_text(path, MOST_CONFIG_BYTES).removeprefix("\ufeff")
        tree = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist: check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"config file {path} is not UTF-8: convert it") from None
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"config file {path} cannot be read ({why}): check the path") from None
    except UnreadableError as error:
        raise UserError(f"config file {path} cannot be read ({error}): check the path") from None
    except (ValueError, RecursionError) as error:  # neither parser says in its own class alone
        raise UserError(f"config file {path} is not {kind}: {error}") from None
    require(isinstance(tree, Mapping), f"config file {path} is not a table of settings: {kind}")
    return from_dict(Config, tree, base)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as a tree of plain values, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(
    kind: type[ConfigT], tree: Mapping[str, Any], base: ConfigT | None = None, path: str = ""
) -> ConfigT:
    """Build the dataclass `kind` from a tree of plain values, laid over `base`.

    Raises UserError, naming the key, for one that is unknown or whose value has the wrong type.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            near = closest_key(path + key, _names_like(value))
            raise UserError(f"key {path}{key} is not known{near}: correct it or take it out")
        is_table = dataclasses.is_dataclass(hints[key])
        if is_table and isinstance(value, Mapping):
            part = getattr(base, key) if base is not None else None
            values[key] = from_dict(hints[key], value, part, f"{path}{key}.")
            continue
        spoken = f"{path}{key} is a number of thousands of digits: give a smaller one"
        require(_can_be_written(value), spoken)
        require(
            not is_table, f"key {path}{key} is {value!r}: it is a table, so set the keys inside it"
        )
        values[key] = _convert(value, hints[key], f"{path}{key}")
    if kind is Config and any(values.get(name) is not None for name in BUDGETS):
        # A new budget takes the place of the old one; it does not come beside it.
        values = {**dict.fromkeys(BUDGETS), **values}
    return dataclasses.replace(base, **values) if base is not None else kind(**values)  # type: ignore[type-var]


def _names_like(value: Any) -> list[str]:
    """Return what the key of a value may have been meant to be: a table, or else a setting."""
    hints = typing.get_type_hints(Config)
    tables = [name for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
    return tables if isinstance(value, Mapping) else key_names(Config)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Return `value` as the type `hint` says, or raise UserError; whole numbers serve as float."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        require(
            value in options,
            f"{name} is {value!r}{closest(str(value), options)}: take one of {', '.join(options)}",
        )
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None or value == "none":  # as TOML, which has no null, must say it
            return None
        return _convert(value, next(o for o in options if o is not type(None)), name)
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{name} is {value!r}: it must be a list")
        return tuple(_convert(item, options[0], name) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{name} is {value}: it must be at most {sys.float_info.max}") from None
    fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    require(fits, f"{name} is {value!r}: it must be {_SPOKEN.get(hint, hint)}")
    return value


def _can_be_written(value: Any) -> bool:
    """Can Python write the value? A hexadecimal number of a TOML file may be too long for that."""
    try:
        repr(value)
    except ValueError:
        return False
    return True


_SPOKEN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
