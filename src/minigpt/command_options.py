"""What each command can be told: a frozen dataclass per command, a field per flag or argument.

The text under a class and under its fields is what `minigpt COMMAND --help` shows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from minigpt.config import Config
from minigpt.sampling import USUAL, Sampling

Switch = Annotated[bool, FlagCreatePairsOff]
RunPath = Annotated[Positional[Path], arg(metavar="RUN")]


@dataclass(frozen=True)
class QuickstartOptions:
    """Data, some minutes of training, perplexity, text, a picture of attention: the whole way."""

    minutes: float = 3.0
    """Minutes of training."""
    out: Path | None = None
    """The run folder; default: runs/quickstart-N, the next N that is free."""
    seed: int = 1
    """Seed of every random number."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a model. The preset stands right behind `train`; flags are laid over it."""

    settings: Annotated[Config, arg(name="")]
    config: Path | None = None
    """A TOML file with the same names as the flags, or the config.json of a run, laid over the
    preset before the flags."""
    out: Path | None = None
    """The run folder; default: runs/PRESET-N, the next N that is free."""
    resume: Path | None = None
    """A run folder whose training goes on where it stopped, with the settings it has. A larger
    budget may be given, another place of the data, --device, --threads and what only shows."""
    overwrite: Switch = False
    """Replace the run in the folder, where there is one and nothing else. Without this flag no run
    is ever written over."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run's model on the whole of a split: perplexity per token, and what can be compared.

    That is perplexity per word and bits per byte where the tokenizer keeps the text as it is, and
    perplexity with each <unk> named where it cut the vocabulary. Intervals come from drawing the
    articles of the text again. --temperature, --cache and --dynamic add columns of their own.
    """

    run: RunPath
    """A run folder that `minigpt train` wrote; demo comes with the package."""
    split: Literal["valid", "test", "train"] = "valid"
    """Tune on valid; look at test once."""
    text: Path | None = None
    """Score the whole of this text file instead."""
    context: int | None = None
    """Ids that the model sees at once; default: the context_length that it was trained with."""
    stride: int | None = None
    """Ids scored per window: the smaller, the more context each has and the longer it takes;
    default: the context, each window on its own."""
    temperature: Switch = False
    """A column more: the softmax at the temperature that suits valid best."""
    cache: Switch = False
    """A column more: words that came before, in places like this one, become likelier (a neural
    cache), as much as suits valid best."""
    dynamic: Switch = False
    """A column more: the model goes on learning from what it has been scored on (dynamic
    evaluation), as fast as suits the beginning of valid best; its stride is half the context."""
    batch_size: int = 16
    """Windows computed together. It does not change the figures."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 0
    """CPU threads; 0: as many as there are cores to use."""
    json: Switch = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class CompareOptions:
    """Put runs side by side, each as a ratio to the first one, with a paired interval.

    All must read the same text, and cut it into the same tokens; --by-word lifts the second.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...")]
    """Run folders that `minigpt train` wrote."""
    split: Literal["valid", "test", "train"] = "valid"
    """Tune on valid; look at test once."""
    text: Path | None = None
    """Score the whole of this text file instead."""
    context: int | None = None
    """Ids that each model sees at once; default: the context_length that it was trained with."""
    stride: int | None = None
    """Ids scored per window; default: the context, each window on its own."""
    by_word: Switch = False
    """Compare per word and per byte alone, so that tokens may differ."""
    batch_size: int = 16
    """Windows computed together. It does not change the figures."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 0
    """CPU threads; 0: as many as there are cores to use."""
    json: Switch = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with text drawn from a run's model.

    Without --prompt, at a terminal, prompts are asked for one by one; from a pipe, each line is
    one. How a token is drawn is as the run has it in config.json (`sampling`), where no flag says
    otherwise: the defaults below are those of runs that say nothing.
    """

    run: RunPath
    """A run folder that `minigpt train` wrote; demo comes with the package."""
    settings: Annotated[Sampling, arg(name="")] = USUAL
    prompt: str | None = None
    """The text to continue. An empty one begins as the model begins a line."""
    num_samples: int = 1
    """Texts for each prompt, all written at once; those after the first as with the next seeds."""
    num_beams: int = 1
    """Search for the likeliest text among that many beginnings at a time, instead of drawing."""
    length_penalty: float = 0.6
    """How much longer texts are preferred among beams; 0: not at all."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """End before this text; may be given several times."""
    ban: UseAppendAction[tuple[str, ...]] = ()
    """Never write this token; may be given several times."""
    bias: UseAppendAction[tuple[str, ...]] = ()
    """TOKEN=NUMBER: add this to the token's logit; may be given several times."""
    raw: Switch = False
    """Show tokens as the model has them, special ones too, and allow those to be drawn."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the step that reads a token: ten seconds and more each time, then several times as
    fast; auto: for a text of 4,000 tokens and more. For one text at a time."""
    int8: Switch = False
    """Write with weights of 8 bits, a quarter of the memory: nearly the same probabilities, which
    may draw another text, and faster once it is compiled."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 0
    """CPU threads; 0: as many as there are cores to use."""
    json: Switch = False
    """Print one JSON object for each text: its tokens, their log-probabilities, why it ended."""


@dataclass(frozen=True)
class AttentionOptions:
    """Show which word looks at which: one head in the terminal, all of them in a file."""

    run: RunPath
    """A run folder that `minigpt train` wrote; demo comes with the package."""
    text: Annotated[Positional[str], arg(metavar="TEXT")]
    """The text that the model reads."""
    out: Path | None = None
    """Write a file besides, of a kind that its name tells: a picture (.png), a page to look around
    in (.html) or the numbers (.json)."""
    layer: int | None = None
    """Show this layer only, counted from 0; default: all of them in the file, and in the terminal
    the most focused head (least entropy)."""
    head: int | None = None
    """Show this head only, counted from 0."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 0
    """CPU threads; 0: as many as there are cores to use."""


@dataclass(frozen=True)
class HeadsOptions:
    """Measure what each head does on held-out text, and what the loss is without it."""

    run: RunPath
    """A run folder that `minigpt train` wrote; demo comes with the package."""
    split: Literal["valid", "test", "train"] = "valid"
    """The text to measure on."""
    tokens: int | None = None
    """About how many tokens of it to look at; default: 16 windows of the model's context."""
    out: Path | None = None
    """Draw a picture of the table besides (.png)."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 0
    """CPU threads; 0: as many as there are cores to use."""
    json: Switch = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class TokenizeOptions:
    """Show the ids and the pieces that a text becomes."""

    tokenizer: Annotated[Positional[str], arg(metavar="RUN|KIND")]
    """A run folder, or basic_english, wikitext, bpe or char, which then learns its entries."""
    text: Annotated[Positional[str], arg(metavar="TEXT")]
    """The text to cut up."""
    data: str | None = None
    """The data whose train split a KIND learns its entries from; default: wikitext-2."""
    vocab_size: int | None = None
    """Entries of a KIND; default: 10,000 for basic_english, 8,192 for bpe, else every one."""
    json: Switch = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class InfoOptions:
    """Sizes, FLOPs, memory and figures of a run, or of a preset before it is trained."""

    run: Annotated[Positional[Path | None], arg(metavar="RUN")] = None
    """A run folder that `minigpt train` wrote; demo comes with the package."""
    plan: str | None = None
    """The name of a preset: what it would cost, before anything is trained."""
    json: Switch = False
    """Print one JSON object instead of the tables."""


@dataclass(frozen=True)
class CheckOptions:
    """Test this installation, or a run: causality, cache, tokenizer, probabilities, versions."""

    run: Annotated[Positional[Path | None], arg(metavar="RUN")] = None
    """A run folder that `minigpt train` wrote; without one small random models are tested."""
