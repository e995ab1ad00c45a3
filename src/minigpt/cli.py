"""The command `minigpt`: argv in, one call, an exit status out.

0 done · 1 a check failed, a run diverged, or a fault of ours · 2 a mistake to mend · 130 Ctrl-C

Results go to stdout, progress and notes to stderr. Each command imports what it needs inside, so
that help and mistakes come at once, without torch. Nothing else prints but `report`, on stderr.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from minigpt.command_line import (
    biases,
    explained,
    free_run_folder,
    open_run,
    open_tokenizer,
    parse,
    parse_generate,
    parse_train,
    prompts_of,
    speak_utf8,
    utf8,
)
from minigpt.command_options import (
    AttentionOptions,
    CheckOptions,
    CompareOptions,
    EvaluateOptions,
    GenerateOptions,
    HeadsOptions,
    InfoOptions,
    QuickstartOptions,
    TokenizeOptions,
)
from minigpt.config import load_preset
from minigpt.errors import UserError, closest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from minigpt.checkpoint import Run
    from minigpt.corpus import Split
    from minigpt.data import TokenStream
    from minigpt.generate import Wording
    from minigpt.one_row import Step
    from minigpt.sampling import Sampling
    from minigpt.tokenizer import Tokenizer

BETWEEN_TEXTS = "---"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is what stands behind `minigpt`. Returns the exit status."""
    if argv is None:
        _prepare_process()
    args = list(sys.argv[1:] if argv is None else argv)
    ours = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in ours
    if debug:
        args.remove("--debug")
    for stream in (sys.stdout, sys.stderr):
        speak_utf8(stream)
    try:
        status = _dispatch(utf8(args), asks_version="--version" in ours)
        sys.stdout.flush()  # a closed pipe shows here, where it can still be caught
    except SystemExit as stop:  # tyro's, after it printed help
        status = stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        _note("interrupted")
        status = 130
    except BrokenPipeError:
        # Whoever read our output has enough of it. Python would complain again as it exits.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:  # one line for everything, and the traceback for who asks for it
        if debug:
            traceback.print_exc()
        line, status = explained(error)
        print(f"error: {' '.join(line.split())}", file=sys.stderr)
    return status


def _prepare_process() -> None:
    """Make the process able to name any file, to print, and to clean up when told to end."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started it, as in `minigpt … >&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    if not sys.flags.utf8_mode and sys.getfilesystemencoding() != "utf-8":
        # A locale of ASCII (LC_ALL=C with UTF-8 mode off): a path in Chinese could not be opened.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", "-m", "minigpt", *sys.argv[1:]])
    # As Ctrl-C does it; while a run learns, `train` listens to both itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _dispatch(args: list[str], *, asks_version: bool) -> int:
    """Find the command and call it with the words behind it."""
    if asks_version:
        print(f"minigpt {metadata.version('mini-gpt-lab')}")
        return 0
    if args and args[0] in ("-h", "--help") and args[1:2] and args[1] in COMMANDS:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *rest = args
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        raise UserError(
            f"{what} {name} is not known{closest(name, COMMANDS)}: "
            f"write one of {', '.join(COMMANDS)} first"
        )
    _, command = COMMANDS[name]
    return command(rest)


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{what}" for name, (what, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: minigpt COMMAND [-h] …",
            "",
            "Train a small Transformer on WikiText-2, measure it, look into it.",
            "",
            *lines,
            "",
            "  minigpt COMMAND --help   what a command can be told",
            "  --debug                  show the traceback of an error, with any command",
            "  --version                show the version",
            "",
            "New here? minigpt quickstart takes five minutes.",
        ]
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _say(text: str) -> None:
    print(text, flush=True)


def _in_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that takes colours, and its reader wants them."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and stream.isatty()


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print rows as columns, each as wide as it must be; the last may be of any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def _print_table(table: "RenderableType") -> None:
    """Print what rich draws: as wide as the terminal, and elsewhere no line is broken."""
    from rich.console import Console

    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else 1_000,
        force_jupyter=False,
        no_color=not _in_color(sys.stdout),
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _print_json(value: Any) -> None:
    print(json.dumps(_writable(value), indent=2, ensure_ascii=False, allow_nan=False))


def _writable(value: Any) -> Any:
    """Return value with None for the numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, dict):
        return {key: _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _quickstart(args: list[str]) -> int:
    options = parse(QuickstartOptions, args, "minigpt quickstart")
    from minigpt.quickstart import quickstart

    out = options.out or free_run_folder("quickstart")
    done = quickstart(out, minutes=options.minutes, seed=options.seed, say=_say)
    return 0 if done else 130


def _train(args: list[str]) -> int:
    preset, options = parse_train(args, "minigpt train")
    from minigpt.report import Report
    from minigpt.train import train

    run_dir = options.resume or options.out or free_run_folder(preset)
    with Report(run_dir, options.settings) as report:
        run = train(
            options.settings,
            run_dir,
            report,
            resume=options.resume is not None,
            overwrite=options.overwrite,
        )
    end = report.finished
    assert end is not None
    if end.valid is not None:  # else it was stopped before its first validation
        from minigpt.figures import figure_rows, figures

        context = run.config.model.context_length
        stream = _stream(run, "valid")
        _print_rows(
            figure_rows(figures(run, "valid", stream, end.valid, context=context, stride=context))
        )
    if end.reason == "interrupted":
        _note(f"stopped and saved; go on with: minigpt train --resume {run_dir}")
        return 130
    _note(f'next: minigpt generate {run_dir} --prompt "The"')
    return 1 if end.reason == "non-finite" or end.valid is None else 0


def _evaluate(args: list[str]) -> int:
    options = parse(EvaluateOptions, args, "minigpt evaluate")
    run = open_run(options.run, options.device, options.threads)
    from minigpt.evaluation_table import evaluation_table
    from minigpt.measurement import TIERS, measure

    measured = measure(
        run,
        options.split,
        text=options.text,
        context=options.context,
        stride=options.stride,
        batch_size=options.batch_size,
        tiers=[tier for tier in TIERS if getattr(options, tier)],
        say=_note if sys.stderr.isatty() else lambda _: None,
    )
    found = measured.to_json()
    if options.json:
        _print_json(found)
    else:
        _print_table(evaluation_table(found))
    return 0


def _compare(args: list[str]) -> int:
    options = parse(CompareOptions, args, "minigpt compare")
    if len(options.runs) < 2:
        given = f"is {options.runs[0]} alone" if options.runs else "is missing"
        raise UserError(f"RUN... {given}: give the folders of two runs or more")
    from minigpt.comparison import compare

    comparison = compare(
        [open_run(path, options.device, options.threads) for path in options.runs],
        options.split,
        text=options.text,
        context=options.context,
        stride=options.stride,
        batch_size=options.batch_size,
        by_word=options.by_word,
        say=_note if sys.stderr.isatty() else lambda _: None,
    )
    if options.json:
        _print_json(comparison.to_json())
    else:
        _print_table(comparison.table())
    return 0


def _stream(run: "Run", split: "Split") -> "TokenStream":
    """Return a split of the text that a run learned from, as its model reads it."""
    from minigpt.corpus import open_corpus
    from minigpt.data import prepare

    return prepare(open_corpus(run.config.data), split, run.tokenizer)


def _generate(args: list[str]) -> int:
    options = parse_generate(args, "minigpt generate")
    run = open_run(options.run, options.device, options.threads)
    from minigpt.generate import Wording
    from minigpt.one_row import choose_step, int8_weights

    if options.int8:
        run = dataclasses.replace(run, model=int8_weights(run.model))
    alone = options.num_samples == 1 and options.num_beams == 1
    if options.compile == "on" and not alone:
        raise UserError(
            "--compile on is for one text at a time: leave out --num-samples and --num-beams"
        )
    n_tokens = options.settings.max_new_tokens if alone else 0
    step, said = choose_step(options.compile, run.model, n_tokens)
    if said:
        _note(said)
    wording = Wording(
        stop=options.stop,
        raw=options.raw,
        banned=[run.tokenizer.id_of(word) for word in options.ban],
        bias=dict(biases(options.bias, run.tokenizer)),
    )
    if options.prompt is not None:
        prompts: Iterable[str] = [options.prompt]
    elif sys.stdin is not None and sys.stdin.isatty():
        return _prompt_loop(run, options, wording, step)
    else:
        prompts = prompts_of(sys.stdin) if sys.stdin is not None else [""]
    for number, prompt in enumerate(prompts):
        if number and not options.json:
            print(BETWEEN_TEXTS)
        _note_unknown(run.tokenizer.encode_prompt(prompt), run.tokenizer)
        _write_on(run, prompt, options, options.settings, wording, step)
    return 0


def _write_on(
    run: "Run",
    prompt: str,
    options: GenerateOptions,
    sampling: "Sampling",
    wording: "Wording",
    step: "Step | None",
) -> None:
    """Print what a run writes after a prompt, as the options want it."""
    from minigpt.generate import best_continuations, continuations, generate_text

    most, model, tokenizer = options.num_samples, run.model, run.tokenizer
    if most == 1 and options.num_beams == 1 and not options.json:
        print(prompt, end="", flush=True)
        for piece in generate_text(model, tokenizer, prompt, sampling, wording, step=step):
            print(piece, end="", flush=True)
        print()
        return
    if options.num_beams == 1:
        found = continuations(
            model, tokenizer, [prompt], sampling, wording, n_samples=most, step=step
        )
    else:
        if options.num_beams >= 1 and not 1 <= most <= options.num_beams:
            raise UserError(
                f"num_samples is {most}: of {options.num_beams} beams it takes between 1 and all"
            )
        found = best_continuations(
            model,
            tokenizer,
            prompt,
            sampling,
            wording,
            n_beams=options.num_beams,
            length_penalty=options.length_penalty,
        )[:most]
    for number, one in enumerate(found):
        if options.json:
            _print_json({**dataclasses.asdict(one), "tokens": tokenizer.pieces(one.ids)})
        else:
            print(f"{BETWEEN_TEXTS}\n" * bool(number) + one.prompt + one.text)


def _prompt_loop(
    run: "Run", options: GenerateOptions, wording: "Wording", step: "Step | None"
) -> int:
    """Ask for prompts and write on after each, until the user leaves."""
    with suppress(ImportError):  # a Python without it has no history, but all else
        import readline  # noqa: F401 - `input` uses it from then on
    from minigpt.prompt_loop import obey

    sampling = options.settings
    _note("Type the beginning of a text; /help shows what can be set, Ctrl-D leaves.")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:  # away with what was typed so far, as in a shell
            print()
            continue
        if line.strip() in ("/quit", "/exit"):
            return 0
        try:
            if line.startswith("/"):
                sampling, said = obey(line, sampling)
                _note(said)
                continue
            _note_unknown(run.tokenizer.encode_prompt(line), run.tokenizer)
            _write_on(run, line, options, sampling, wording, step)
        except UserError as error:
            _note(f"error: {error}")
        except KeyboardInterrupt:
            print()


def _attention(args: list[str]) -> int:
    options = parse(AttentionOptions, args, "minigpt attention")
    from minigpt.attention_maps import attention_maps, kind_of

    kind = None if options.out is None else kind_of(options.out, "--out")
    run = open_run(options.run, options.device, options.threads, options.out)
    ids = run.tokenizer.encode(options.text)
    maps = attention_maps(run.model, ids, run.tokenizer.pieces(ids))
    color = _in_color(sys.stdout)
    width = shutil.get_terminal_size().columns
    drawn = maps.heat_map(options.layer, options.head, width=width, color=color)
    if options.out is not None:  # first, for if it fails there should be nothing but the error
        maps.save(options.out, options.layer, options.head)
    print(drawn)
    _note_unknown(ids, run.tokenizer)
    n_layers, n_heads = maps.weights.shape[:2]
    _note(f"choose with --layer 0 to {n_layers - 1} and --head 0 to {n_heads - 1}")
    if options.out is None:
        _note("all heads at once: --out attention.html, or .png; their numbers: .json")
    if kind == ".png" and maps.undrawable:
        _note(
            f"note: no font here has {maps.undrawable[:20]}, shown as □: install one that does, "
            "such as Noto Sans CJK"
        )
    if options.out is not None:
        print(options.out)
    return 0


def _heads(args: list[str]) -> int:
    options = parse(HeadsOptions, args, "minigpt heads")
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise UserError(f"--out is {options.out}: give a name that ends in .png")
    run = open_run(options.run, options.device, options.threads, options.out)
    from minigpt.head_roles import measure_heads

    ids = _stream(run, options.split).ids
    say = _note if sys.stderr.isatty() else lambda _: None
    heads = measure_heads(run.model, run.tokenizer, ids, n_tokens=options.tokens, say=say)
    if options.json:
        _print_json({"run": str(options.run), "split": options.split, **heads.to_json()})
    else:
        _print_rows(heads.table())
        print()
        _print_rows(heads.legend())
        print("", *heads.summary(), sep="\n")
    if options.out is not None:  # last: what was measured is not lost where it cannot be written
        heads.save_png(options.out)
        if not options.json:
            print(options.out)
    return 0


def _tokenize(args: list[str]) -> int:
    options = parse(TokenizeOptions, args, "minigpt tokenize")
    tokenizer = open_tokenizer(options.tokenizer, options.data, options.vocab_size)
    ids = tokenizer.encode(options.text)
    pieces = tokenizer.pieces(ids)
    if options.json:
        _print_json({"ids": ids, "pieces": pieces})
    else:
        _print_rows([("id", "piece"), *((str(i), p) for i, p in zip(ids, pieces, strict=True))])
    _note_unknown(ids, tokenizer)
    return 0


def _info(args: list[str]) -> int:
    options = parse(InfoOptions, args, "minigpt info")
    if (options.run is None) == (options.plan is None):
        what = "is given beside --plan" if options.run else "is missing"
        raise UserError(f"RUN {what}: give either a run folder or --plan PRESET")
    config = None if options.plan is None else load_preset(options.plan)
    from minigpt.info import planned_vocab_size, report_rows, size_rows, sizes

    report: dict[str, Any] = {}
    if config is not None:
        vocab_size = planned_vocab_size(config.tokenizer, config.model.vocab_size)
    else:
        assert options.run is not None
        run = open_run(options.run)
        config, vocab_size, report = run.config, run.tokenizer.vocab_size, run.report
    found = sizes(config, vocab_size)
    if options.json:
        _print_json({**dataclasses.asdict(found), "report": report})
    else:
        _print_rows(size_rows(found, config) + report_rows(report))
    return 0


def _check(args: list[str]) -> int:
    options = parse(CheckOptions, args, "minigpt check")
    run = None if options.run is None else open_run(options.run)
    from minigpt.check import check_installation, check_run

    checks = list(check_installation() if run is None else check_run(run))
    _print_rows([("ok" if c.passed else "FAILED", c.name, c.detail) for c in checks])
    n_failed = sum(not c.passed for c in checks)
    print(f"{len(checks)} checks, {n_failed} failed")
    return 1 if n_failed else 0


def _note_unknown(ids: Sequence[int], tokenizer: "Tokenizer") -> None:
    """Tell on stderr how much of a text the model will read as <unk>."""
    n_unknown = ids.count(tokenizer.unk_id) if tokenizer.unk_id is not None else 0
    if n_unknown:
        _note(f"note: {n_unknown} of {len(ids)} tokens are not in the vocabulary: <unk>")


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "quickstart": ("data, three minutes of training, perplexity, text, a picture", _quickstart),
    "train": ("train a model: minigpt train [PRESET] [--data D] [--minutes M] …", _train),
    "evaluate": ("the perplexity of a run on valid or test", _evaluate),
    "compare": ("runs side by side on one text, as ratios with intervals", _compare),
    "generate": ("text that a run's model writes after a prompt", _generate),
    "attention": ("which word looks at which: in the terminal, a picture, a page", _attention),
    "heads": ("what each head does, measured, and the loss without it", _heads),
    "tokenize": ("the ids and pieces of a text", _tokenize),
    "info": ("sizes, FLOPs, memory and figures of a run or a preset", _info),
    "check": ("test this installation, or a run", _check),
}
