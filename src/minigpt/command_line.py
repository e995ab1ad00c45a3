"""The words of a command line → the options of one command, or one line that says what is wrong.

In: the command's options class and the words behind its name. Out: that class, filled in, and the
runs and tokenizers that the words name.

tyro makes the flags, from the fields and the text under them. Its errors are boxes of many lines;
here each becomes a `UserError`, with the name that was probably meant.
"""

import dataclasses
import errno
import itertools
import math
import os
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import tyro

# Private names, hence one exact version in pyproject.toml: no public one tells what was refused
# except as boxed text.
from tyro import _arguments, _errors
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from minigpt.command_options import (
    CompareOptions,
    EvaluateOptions,
    GenerateOptions,
    TrainOptions,
)
from minigpt.config import (
    BUDGETS,
    Config,
    TokenizerConfig,
    TokenizerKind,
    closest_key,
    from_dict,
    key_names,
    load_file,
    load_preset,
    preset_names,
)
from minigpt.errors import UserError, closest
from minigpt.sampling import LARGEST

if TYPE_CHECKING:
    from minigpt.checkpoint import Run
    from minigpt.corpus import Split
    from minigpt.tokenizer import Tokenizer

OptionsT = TypeVar("OptionsT")


def parse(
    kind: type[OptionsT],
    args: Sequence[str],
    prog: str,
    *,
    default: OptionsT | None = None,
    description: str | None = None,
) -> OptionsT:
    """Return the options that `args` give, laid over `default`.

    Prints the help text and raises SystemExit(0) for -h; raises UserError for anything refused.
    """
    keys = [key.removeprefix("settings.").replace("_", "-") for key in key_names(kind)]
    flags = [f"--{key}" for key in keys]

    def refuse(event: _errors.ParseErrorEvent) -> None:
        raise UserError(_one_line(event, flags))

    with _errors.on_parse_error(refuse):
        return tyro.cli(
            kind,
            args=args,
            prog=prog,
            default=tyro.MISSING_NONPROP if default is None else default,
            description=description,
            registry=_values,
        )


def parse_train(args: Sequence[str], prog: str) -> tuple[str, TrainOptions]:
    """Return the preset's name and the options of `train`.

    The settings below the flags, lowest first: the preset, or those of the run that is resumed;
    --config.
    """
    given = bool(args) and not args[0].startswith("-")
    preset, flags = (args[0], args[1:]) if given else ("mini", args)
    resume, file = _value_of("--resume", flags), _value_of("--config", flags)
    base = _settings_of(Path(resume)) if resume else load_preset(preset)
    if file:
        base = load_file(Path(file), base)
    given_budgets = [f"--{budget}" for budget in BUDGETS if _mentions(f"--{budget}", flags)]
    if any((_value_of(flag, flags) or "").lower() != "none" for flag in given_budgets):
        # A budget given as a flag replaces the one below it; two flags are still one too many.
        base = dataclasses.replace(base, minutes=None, epochs=None, steps=None)
    options = parse(
        TrainOptions,
        flags,
        f"{prog} [PRESET]",
        default=TrainOptions(base),
        description=f"{TrainOptions.__doc__} PRESET: {', '.join(preset_names())} (default: mini).",
    )
    if options.resume is not None and (given or options.out or options.overwrite):
        what = f"preset {preset}" if given else "--out" if options.out else "--overwrite"
        raise UserError(
            f"{what} is given with --resume {resume}: a resumed run keeps its folder and its "
            "settings, so leave it out"
        )
    return preset, options


def parse_generate(args: Sequence[str], prog: str) -> GenerateOptions:
    """Return the options of `generate`, laid over the settings that the run's preset gave it."""
    options = parse(GenerateOptions, args, prog)
    settings = _settings_of(options.run).sampling
    return parse(GenerateOptions, args, prog, default=GenerateOptions(options.run, settings))


def split_of(options: EvaluateOptions | CompareOptions, args: Sequence[str]) -> "Split | None":
    """Return the split that a user named, or that there is where no text was named instead."""
    return options.split if options.text is None or _mentions("--split", args) else None


def _settings_of(run: Path) -> Config:
    """Return the settings of a run folder."""
    from minigpt.run_folder import read_config

    return read_config(run)


def free_run_folder(name: str) -> Path:
    """Return runs/NAME-N with the smallest N that no run has."""
    numbers = itertools.count(1)
    return next(p for n in numbers if not (p := Path("runs") / f"{name}-{n}").exists())


def open_run(path: Path, device: str = "cpu", threads: int = 0, out: Path | None = None) -> "Run":
    """Open a run folder on the device that the user chose; refuse an `out` among its own files."""
    wishes = Config(device=device, threads=threads)  # refuses what train would refuse
    from minigpt.checkpoint import Run
    from minigpt.machine import choose_device, set_threads
    from minigpt.run_folder import spare_run

    if out is not None:
        spare_run(path, out)
    set_threads(wishes.threads)
    return Run.open(path, str(choose_device(wishes.device)))


def open_tokenizer(name: str, data: str | None, vocab_size: int | None) -> "Tokenizer":
    """Return the tokenizer of the run folder `name`, or one of that kind, trained on `data`.

    data None is wikitext-2, vocab_size None the usual size for the kind; a run has its own.
    """
    from minigpt.tokenizer import Tokenizer

    kinds = typing.get_args(TokenizerKind)
    if name not in kinds:
        from minigpt.run_folder import run_folder

        folder = run_folder(name)
        if not folder.is_dir():
            raise UserError(
                f"RUN|KIND is {name}{closest(name, kinds)}: "
                f"give a run folder or one of {', '.join(kinds)}"
            )
        if data is not None or vocab_size is not None:
            raise UserError(
                f"--data or --vocab-size is given with the run folder {name}, whose tokenizer has "
                "learned already: leave them out"
            )
        return Tokenizer.load(folder / "tokenizer.json")
    from minigpt.corpus import open_corpus
    from minigpt.data import fit_tokenizer

    usual = {"basic_english": 10_000, "bpe": 8_192}.get(name, 0)
    size = usual if vocab_size is None else vocab_size
    config = from_dict(TokenizerConfig, {"kind": name, "vocab_size": size})
    return fit_tokenizer(open_corpus(data or "wikitext-2"), config)


def biases(words: Sequence[str], tokenizer: "Tokenizer") -> Iterator[tuple[int, float]]:
    """Yield the id and the number of each TOKEN=NUMBER."""
    for word in words:
        token, equals, number = word.rpartition("=")
        try:
            added = float(number) if equals and token else math.nan
        except ValueError:
            added = math.nan
        if not abs(added) <= LARGEST:  # nor is NaN
            raise UserError(
                f"--bias is {word}: it must be TOKEN=NUMBER, as in the=-1.5, with a number of at "
                f"most {LARGEST:,.0f}"
            )
        yield tokenizer.id_of(token), added


def prompts_of(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a pipe as they come, without blank ones; of none, one empty prompt."""
    with suppress(AttributeError, ValueError):  # a stand-in for the stream
        stream.reconfigure(encoding="utf-8")  # type: ignore[attr-defined, unused-ignore]
    found = False
    try:
        for number, line in enumerate(stream):
            # Some editors put a mark before a text, which is none of its characters.
            prompt = (line if number else line.removeprefix("\ufeff")).rstrip("\r\n")
            if prompt.strip():
                found = True
                yield prompt
    except UnicodeDecodeError:
        raise UserError("the input is not UTF-8: convert it") from None
    if not found:
        yield ""


def utf8(args: Sequence[str]) -> list[str]:
    """Return `args` as UTF-8 text, whatever the locale made of their bytes."""
    words = []
    for word in args:
        try:
            words.append(os.fsencode(word).decode("utf-8"))
        except UnicodeError:
            raise UserError(f"argument {word!a} is not UTF-8: convert it") from None
    return words


def explained(error: Exception) -> tuple[str, int]:
    """Return the line that tells of an error, and the exit status."""
    text = str(error)
    if isinstance(error, UserError):
        return text, 2
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        return "memory is too small for this: lower --batch-size or the sizes of the model", 2
    if isinstance(error, OSError) and error.filename is not None:
        what = f"file {error.filename}: {error.strerror}"
        return f"{what}: check the path, its permissions and the space left", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "output cannot be written, no space is left: free some, or write elsewhere", 2
    return f"internal: {type(error).__name__}: {text or 'no message'}, run again with --debug", 1


def speak_utf8(stream: TextIO | None) -> None:
    """Print any text, though the locale may know nothing but ASCII; None is a closed stream."""
    if stream is not None and (stream.encoding or "").lower().replace("-", "") != "utf8":
        with suppress(AttributeError, ValueError):  # a stand-in for the stream, as in a notebook
            stream.reconfigure(encoding="utf-8")  # type: ignore[attr-defined, unused-ignore]


def _mentions(flag: str, args: Sequence[str]) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in args)


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """Return what stands behind the last `flag`, which tyro has yet to see, or None."""
    value = None
    for word, following in zip(args, [*args, ""][1:], strict=True):
        if word == flag and following and not following.startswith("-"):
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


_values = ConstructorRegistry()
_SPOKEN = {int: "a whole number", float: "a number", Path: "a path"}


@_values.primitive_rule
def _number_or_path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read numbers and paths, saying in plain words what does not serve as one.

    `X | None` reads as X, since leaving a flag out is how to say None; where the default is
    another value, the word None switches it off.
    """
    options = [option for option in typing.get_args(info.type) if option is not type(None)]
    kind = options[0] if len(options) == 1 else info.type
    if kind not in _SPOKEN or info.type_origin is tuple:
        return None

    def read(words: list[str]) -> Any:
        if options and words[0].lower() == "none":
            return None
        try:
            if words[0]:  # an empty path would mean the folder that one is in
                return kind(words[0])
        except ValueError:
            pass
        raise ValueError(f"{words[0] or repr(words[0])}: it must be {_SPOKEN[kind]}")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind) or (bool(options) and value is None),
        str_from_instance=lambda value: [str(value)],
    )


def _one_line(event: _errors.ParseErrorEvent, flags: Sequence[str]) -> str:
    """Say in one line what tyro refused, which value, and what to do."""
    see = f"see {event.prog.removesuffix(' [PRESET]')} --help"
    match event:
        case _errors.UnrecognizedArgs(tokens=[first, *_]):
            line = _unknown(first, flags, see)
        case _errors.MissingArgs(missing_arguments=[first, *_]):
            line = f"{_name(first.arg)} is missing: {see}"
        case _errors.InvalidChoice(argument=argument, value=value, choices=choices):
            near = closest(value, choices)
            line = f"{_name(argument)} is {value}{near}: take one of {', '.join(choices)}"
        case _errors.BadValue(argument=argument):
            line = f"{_name(argument)} has no value: write one behind it, or {see}"
        case _errors.InstantiationFailure(argument=None, message=message):
            line = message  # a UserError's: a dataclass refused its values
        case _errors.InstantiationFailure(argument=argument, message=message) if argument:
            # Ours say what must be; the rest is tyro's wording, which has no place for the value.
            ours = ": it must be " in message
            line = f"{_name(argument)} is {message}" if ours else f"{_name(argument)}: {message}"
        case _:
            line = f"command is not understood ({type(event).__name__}): {see}"
    return line


def _name(argument: _arguments.ArgumentDefinition) -> str:
    """Return how a user calls an argument: its flag, or RUN and the like."""
    lowered = argument.lowered
    return str(lowered.metavar if argument.is_positional() else lowered.name_or_flags[0])


def _unknown(word: str, flags: Sequence[str], see: str) -> str:
    """Say that `word` is no flag and no argument, and what may have been meant."""
    if word.startswith("-"):
        name = word.partition("=")[0]
        return f"flag {name} is not known{closest_key(name, flags)}: {see}"
    if word in preset_names():
        return f"preset {word} has no place here: write it right behind train"
    if word in ("True", "False", "true", "false"):
        return f"value {word} has no place here: a switch is --NAME or --no-NAME, or {see}"
    if "--prompt" in flags:
        return f"argument {word} has no place here: a text to continue goes behind --prompt"
    return f"argument {word} has no place here: put text with blanks in quotes, or {see}"
