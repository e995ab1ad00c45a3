"""The command `generate`: prompts from a flag, a terminal or a pipe, and the texts behind them.

In: argv. Out: text as it comes, or JSON; an exit status.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from minigpt.command_line import biases, open_run, parse_generate, prompts_of
from minigpt.command_options import GenerateOptions
from minigpt.console import note, note_unknown, print_json, say
from minigpt.errors import UserError, require
from minigpt.prompt_loop import obey

if TYPE_CHECKING:
    from minigpt.checkpoint import Run
    from minigpt.generate import Wording
    from minigpt.one_row import Step
    from minigpt.sampling import Sampling

BETWEEN_TEXTS = "---"


def generate(args: list[str]) -> int:
    """Do what `minigpt generate` is told by args; return the exit status."""
    options = parse_generate(args, "minigpt generate")
    alone = options.num_samples == 1 and options.num_beams == 1
    _require_fit(options, alone=alone)
    run = open_run(options.run, options.device, options.threads)
    from minigpt.generate import Wording
    from minigpt.one_row import choose_step, int8_weights

    wording = Wording(
        stop=options.stop,
        raw=options.raw,
        banned=[run.tokenizer.id_of(word) for word in options.ban],
        bias=dict(biases(options.bias, run.tokenizer)),
    )
    if options.int8:
        run = dataclasses.replace(run, model=int8_weights(run.model))
    n_tokens = options.settings.max_new_tokens if alone else 0
    step = choose_step(options.compile, run.model, n_tokens, note)
    if options.prompt is not None:
        prompts: Iterable[str] = [options.prompt]
    elif sys.stdin is not None and sys.stdin.isatty():
        return _prompt_loop(run, options, wording, step)
    else:
        prompts = prompts_of(sys.stdin) if sys.stdin is not None else [""]
    for number, prompt in enumerate(prompts):
        if number and not options.json:
            print(BETWEEN_TEXTS)
        note_unknown(run.tokenizer.encode_prompt(prompt), run.tokenizer)
        _write_on(run, prompt, options, options.settings, wording, step)
    return 0


def _require_fit(options: GenerateOptions, *, alone: bool) -> None:
    """Raise UserError where options do not go together, before anything is loaded."""
    require(
        options.num_samples >= 1,
        f"num_samples is {options.num_samples}: it must be at least 1",
    )
    require(options.num_beams >= 1, f"num_beams is {options.num_beams}: it must be at least 1")
    require(
        options.num_beams == 1 or options.num_samples <= options.num_beams,
        f"num_samples is {options.num_samples}: a search among {options.num_beams} beams finds as "
        "many texts at most",
    )
    require(
        math.isfinite(options.length_penalty),
        f"length_penalty is {options.length_penalty}: it must be a number",
    )
    require(
        options.compile != "on" or alone,
        "--compile on is for one text at a time: leave out --num-samples and --num-beams",
    )


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
        say(prompt, end="")
        for piece in generate_text(model, tokenizer, prompt, sampling, wording, step=step):
            say(piece, end="")
        say("")
        return
    if options.num_beams == 1:
        found = continuations(
            model, tokenizer, [prompt], sampling, wording, n_samples=most, step=step
        )
    else:
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
            print_json({**dataclasses.asdict(one), "tokens": tokenizer.pieces(one.ids)})
        else:
            say(f"{BETWEEN_TEXTS}\n" * bool(number) + one.prompt + one.text)


def _prompt_loop(
    run: "Run", options: GenerateOptions, wording: "Wording", step: "Step | None"
) -> int:
    """Ask for prompts and write on after each, until the user leaves."""
    with suppress(ImportError):  # a Python without it has no history, but all else
        import readline  # noqa: F401 - `input` uses it from then on

    sampling = options.settings
    note("Type the beginning of a text; /help shows what can be set, Ctrl-D leaves.")
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
                note(said)
                continue
            note_unknown(run.tokenizer.encode_prompt(line), run.tokenizer)
            _write_on(run, line, options, sampling, wording, step)
        except UserError as error:
            note(f"error: {error}")
        except KeyboardInterrupt:
            print()
