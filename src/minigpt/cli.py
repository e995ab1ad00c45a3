"""The command `minigpt`: argv in, one call, an exit status out.

0 done · 1 a check failed, a run diverged, or a fault of ours · 2 a mistake to mend · 130 Ctrl-C

Results go to stdout, progress and notes to stderr. Each command imports what it needs inside, so
that help and mistakes come at once, without torch. Nothing below the commands prints but `report`,
on stderr.
"""

import dataclasses
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.cli_generate import generate
from minigpt.command_line import (
    explained,
    free_run_folder,
    open_run,
    open_tokenizer,
    parse,
    parse_train,
    speak_utf8,
    split_of,
    utf8,
)
from minigpt.command_options import (
    AttentionOptions,
    CheckOptions,
    CompareOptions,
    EvaluateOptions,
    HeadsOptions,
    InfoOptions,
    QuickstartOptions,
    TokenizeOptions,
)
from minigpt.config import load_preset
from minigpt.console import in_color, note, note_unknown, print_json, print_rows, print_table, say
from minigpt.errors import UserError, closest

if TYPE_CHECKING:
    from minigpt.checkpoint import Run
    from minigpt.corpus import Split
    from minigpt.data import TokenStream


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
        note("interrupted")
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
    # None where whoever started it closed it, as in `minigpt … >&-`.
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
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


def _quickstart(args: list[str]) -> int:
    options = parse(QuickstartOptions, args, "minigpt quickstart")
    from minigpt.quickstart import quickstart

    out = options.out or free_run_folder("quickstart")
    done = quickstart(out, minutes=options.minutes, seed=options.seed, say=say)
    return 0 if done else 130


def _train(args: list[str]) -> int:
    preset, options = parse_train(args, "minigpt train")
    from minigpt.report import Report
    from minigpt.train import resume, train

    run_dir = options.resume or options.out or free_run_folder(preset)
    with Report(run_dir, options.settings) as report:
        if options.resume is None:
            run = train(options.settings, run_dir, report, overwrite=options.overwrite)
        else:
            run = resume(run_dir, report, options.settings)
    end = report.finished
    assert end is not None
    if end.valid is not None:  # else it was stopped before its first validation
        from minigpt.figures import figure_rows, figures

        context = run.config.model.context_length
        stream = _stream(run, "valid")
        print_rows(
            figure_rows(figures(run, "valid", stream, end.valid, context=context, stride=context))
        )
    if end.reason == "interrupted":
        note(f"stopped and saved; go on with: minigpt train --resume {run_dir}")
        return 130
    note(f'next: minigpt generate {run_dir} --prompt "The"')
    return 1 if end.reason == "non-finite" or end.valid is None or not end.is_saved else 0


def _evaluate(args: list[str]) -> int:
    options = parse(EvaluateOptions, args, "minigpt evaluate")
    run = open_run(options.run, options.device, options.threads)
    from minigpt.evaluation_table import evaluation_table
    from minigpt.measurement import TIERS, measure

    measured = measure(
        run,
        split_of(options, args),
        text=options.text,
        context=options.context,
        stride=options.stride,
        batch_size=options.batch_size,
        tiers=[tier for tier in TIERS if getattr(options, tier)],
        say=note if sys.stderr.isatty() else lambda _: None,
    )
    found = measured.to_json()
    if options.json:
        print_json(found)
    else:
        print_table(evaluation_table(found))
    return 0


def _compare(args: list[str]) -> int:
    options = parse(CompareOptions, args, "minigpt compare")
    if len(options.runs) < 2:
        given = f"is {options.runs[0]} alone" if options.runs else "is missing"
        raise UserError(f"RUN... {given}: give the folders of two runs or more")
    from minigpt.comparison import compare

    comparison = compare(
        [open_run(path, options.device, options.threads) for path in options.runs],
        split_of(options, args),
        text=options.text,
        context=options.context,
        stride=options.stride,
        batch_size=options.batch_size,
        by_word=options.by_word,
        say=note if sys.stderr.isatty() else lambda _: None,
    )
    if options.json:
        print_json(comparison.to_json())
    else:
        print_table(comparison.table())
    return 0


def _stream(run: "Run", split: "Split") -> "TokenStream":
    """Return a split of the text that a run learned from, as its model reads it."""
    from minigpt.corpus import open_corpus
    from minigpt.data import prepare

    return prepare(open_corpus(run.config.data), split, run.tokenizer)


def _attention(args: list[str]) -> int:
    options = parse(AttentionOptions, args, "minigpt attention")
    from minigpt.attention_maps import attention_maps, kind_of

    kind = None if options.out is None else kind_of(options.out, "--out")
    run = open_run(options.run, options.device, options.threads, options.out)
    ids = run.tokenizer.encode_prompt(options.text)
    maps = attention_maps(run.model, ids, run.tokenizer.pieces(ids))
    color = in_color(sys.stdout)
    width = shutil.get_terminal_size().columns
    drawn = maps.heat_map(options.layer, options.head, width=width, color=color)
    if options.out is not None:  # first, for if it fails there should be nothing but the error
        maps.save(options.out, options.layer, options.head)
    print(drawn)
    note_unknown(ids, run.tokenizer)
    n_layers, n_heads = maps.weights.shape[:2]
    note(f"choose with --layer 0 to {n_layers - 1} and --head 0 to {n_heads - 1}")
    if options.out is None:
        note("all heads at once: --out attention.html, or .png; their numbers: .json")
    if kind == ".png" and maps.undrawable:
        note(
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
    tell = note if sys.stderr.isatty() else lambda _: None
    heads = measure_heads(run.model, run.tokenizer, ids, n_tokens=options.tokens, say=tell)
    if options.json:
        print_json({"run": str(options.run), "split": options.split, **heads.to_json()})
    else:
        print_rows(heads.table())
        print()
        print_rows(heads.legend())
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
        print_json({"ids": ids, "pieces": pieces})
    else:
        print_rows([("id", "piece"), *((str(i), p) for i, p in zip(ids, pieces, strict=True))])
    note_unknown(ids, tokenizer)
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
        print_json({**dataclasses.asdict(found), "report": report})
    else:
        print_rows(size_rows(found, config) + report_rows(report))
    return 0


def _check(args: list[str]) -> int:
    options = parse(CheckOptions, args, "minigpt check")
    run = None if options.run is None else open_run(options.run)
    from minigpt.check import check_installation, check_run

    checks = list(check_installation() if run is None else check_run(run))
    print_rows([("ok" if c.passed else "FAILED", c.name, c.detail) for c in checks])
    n_failed = sum(not c.passed for c in checks)
    print(f"{len(checks)} checks, {n_failed} failed")
    return 1 if n_failed else 0


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "quickstart": ("data, three minutes of training, perplexity, text, a picture", _quickstart),
    "train": ("train a model: minigpt train [PRESET] [--data D] [--minutes M] …", _train),
    "evaluate": ("the perplexity of a run on valid or test", _evaluate),
    "compare": ("runs side by side on one text, as ratios with intervals", _compare),
    "generate": ("text that a run's model writes after a prompt", generate),
    "attention": ("which word looks at which: in the terminal, a picture, a page", _attention),
    "heads": ("what each head does, measured, and the loss without it", _heads),
    "tokenize": ("the ids and pieces of a text", _tokenize),
    "info": ("sizes, FLOPs, memory and figures of a run or a preset", _info),
    "check": ("test this installation, or a run", _check),
}
