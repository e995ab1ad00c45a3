"""Measure quality against time: the perplexity of valid after so many minutes of training.

Ours and those that a user would pick instead (`peers`), one after the other on a quiet machine:

    python benchmarks/quality.py run wikitext2-10min wikitext2-30min --seed 1
    python benchmarks/quality.py run nanogpt transformers word-transformer --minutes 30 \\
        --like wikitext2-30min --nanogpt DIR --pytorch-examples DIR
    python benchmarks/quality.py run nanogpt --minutes 30 --rate 3e-3 --nanogpt DIR
    python benchmarks/quality.py pace lstm --batches 300 --pytorch-examples DIR
    python benchmarks/quality.py report --draw

run      train each contestant for its minutes and write its curve. The whole of valid is scored
         each time, every word once, static, in disjoint windows of the contestant's own context;
         meanwhile the clock stands still, for all alike. Compilation counts, and finds nothing
         that was compiled before; only the first contestant of a command looks at the processor,
         for some seconds, so that of several seeds each is best given a command of its own.
pace     a peer too slow to wait for: time some batches, from which follow an epoch and the epochs
         of its published result. Marked as extrapolated.
report   say how much sooner ours was as good as the best run of each peer; --draw makes the
         picture.

All read one closed vocabulary, or the figures could not stand side by side. The matrix rate of the
machine stands in each file, and results of other texts or numbers of threads are not mixed. All are
scored in float32, whatever they learn in. A run of ours spends part of its budget on validations of
its own; here it is given the time of those beyond, so that it learns as long as its preset does.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from curves import Ratio, Result, load, points, ratios, require_alike
from minigpt.config import Config, preset_names
from minigpt.errors import UserError, closest, require
from minigpt.machine import matrix_rates, set_threads
from minigpt.run_folder import write_json
from peer import Peer, Words, closed_vocabulary
from peer_gpt import GPT_RATE
from peers import GPTS, PEERS, compiling_pays, make_peer
from quality_picture import picture
from quality_runs import PUBLISHED, cold_compiler, run_ours, run_pace, run_peer, say, spoken
from setting import command, machine, named_config, without_folder

ROOT = Path(__file__).resolve().parents[1] / "docs"


def make(name: str, words: Words, options: argparse.Namespace, *, compiled: bool) -> Peer:
    """Return the peer called name as the options have it, fresh."""
    checkouts = {"nanogpt": options.nanogpt, "pytorch_examples": options.pytorch_examples}
    if name not in GPTS:
        return make_peer(name, words, Config(), checkouts, seed=options.seed)
    return make_peer(
        name,
        words,
        named_config(options.like),
        checkouts,
        seed=options.seed,
        rate=options.rate,
        compiled=compiled,
        dtype=getattr(torch, options.peer_precision),
    )


def made_peer(name: str, words: Words, options: argparse.Namespace) -> Peer:
    """Return the peer called name: compiled where that is faster, if it is one that can be."""
    compiled = name in GPTS and options.compile == "on"
    if name in GPTS and options.compile == "auto":
        with cold_compiler():
            compiled = compiling_pays(lambda on: make(name, words, options, compiled=on))
    return make(name, words, options, compiled=compiled)


def run(options: argparse.Namespace) -> None:
    """Train every contestant and write its curve as soon as it has one."""
    names = [*PEERS, *preset_names()]
    for name in options.contestants:
        known = name in names or name.endswith(".toml")
        require(known, f"{name} is not known{closest(name, names)}: take one of {', '.join(names)}")
    for name in options.contestants:
        parts, result = trained_peer(name, options) if name in PEERS else trained(name, options)
        result = {"kind": "curve", "contestant": parts[0], "extrapolated": False, **result}
        save(options, "-".join(parts), result)


def trained_peer(name: str, options: argparse.Namespace) -> tuple[list[str], Result]:
    """Train the peer called name; return the parts of its result's name, and the result."""
    require(options.minutes is not None, f"{name} has no budget: give --minutes")
    data = options.data or "wikitext-2"
    words = closed_vocabulary(data)
    peer = made_peer(name, words, options)
    with cold_compiler():
        result = run_peer(peer, words, options.minutes, options.validations)
    result["data"] = text_of(data, words)
    parts = [name, f"{options.minutes:g}min"]
    if name in GPTS:
        parts += ["bfloat16"] if options.peer_precision == "bfloat16" else []
        parts += [f"rate{options.rate:g}"]
    return [*parts, f"seed{options.seed}"], result


def trained(name: str, options: argparse.Namespace) -> tuple[list[str], Result]:
    """Train the preset called name; return the parts of its result's name, and the result."""
    config = replace(named_config(name), seed=options.seed, threads=options.threads)
    config = replace(config, data=options.data or config.data)
    parts = [Path(name).stem]
    if options.minutes is not None:
        config = replace(config, minutes=options.minutes, epochs=None, steps=None)
        parts.append(f"{options.minutes:g}min")
    with cold_compiler():
        result = run_ours(name, config, options.validations)
    result["data"] = text_of(config.data, closed_vocabulary(config.data))
    return [*parts, f"seed{options.seed}"], result


def pace(options: argparse.Namespace) -> None:
    """Time batches of the contestant and write what follows from them."""
    require(options.contestant == "lstm", "only lstm has a published result that a pace leads to")
    data = options.data or "wikitext-2"
    words = closed_vocabulary(data)
    result = run_pace(made_peer(options.contestant, words, options), options.batches)
    about = {"contestant": options.contestant, "data": text_of(data, words)}
    save(options, f"{options.contestant}-pace", {**about, **result})
    say(
        f"{options.contestant}: {result['seconds_per_batch']:.3f} s a batch, "
        f"{result['epoch_minutes']:.1f} minutes an epoch, {result['published_minutes'] / 60:.1f} "
        f"hours to its published {PUBLISHED['valid']}"
    )


def text_of(data: str, words: Words) -> str:
    """Return the text that was learned and scored, so that no other is laid beside it."""
    return f"{without_folder(data)}: {len(words.train):,} words, valid {len(words.valid):,}"


def save(options: argparse.Namespace, name: str, result: Result) -> None:
    """Write a result with the machine that it was measured on."""
    about = {
        "command": command("quality.py", options.words),
        "scored": "all of valid, every token once, static, disjoint windows, in float32; the clock "
        "stood still",
        "compiler_cache": "cold",
        **machine(matrix_rates(torch.device("cpu"))),
    }
    write_json(options.out / f"{name}.json", {"name": name, **result, **about})


def report(options: argparse.Namespace) -> None:
    """Print what the results in the folder say, and draw them if asked to."""
    results = load(options.out)
    require(bool(results), f"{options.out} holds no result: make some with run and pace")
    for warning in require_alike(results):
        say(warning)
    for result in results:
        if result["kind"] == "curve":
            print(f"{result['name']:<34} {spoken(points(result)[-1])}")
    for ratio in ratios(results):
        print(spoken_ratio(ratio))
    if options.draw:
        path = options.picture
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(picture(results), encoding="utf-8")


def spoken_ratio(ratio: Ratio) -> str:
    """Return a ratio in words."""
    goal = ratio.goal
    how = "extrapolated" if goal.extrapolated else "measured"
    how += f", {goal.run}, the best of {goal.n_runs} runs" if goal.n_runs > 1 else ""
    text = f"{goal.peer}: {goal.perplexity:.2f} after {goal.minutes:.1f} min ({how})"
    if ratio.ours is None:
        return f"{text}; none of ours came so far"
    seeds = f", median of {ratio.n_seeds} seeds" if ratio.n_seeds > 1 else ""
    seeds += f", the soonest of {ratio.n_presets} presets" if ratio.n_presets > 1 else ""
    return f"{text}; {ratio.ours}: {ratio.minutes:.1f} min{seeds}: {ratio.ratio:.1f} times sooner"


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    learned = parts.add_parser("run", help="train contestants and write their curves")
    names = ", ".join((*PEERS, *preset_names()))
    learned.add_argument("contestants", nargs="+", metavar="NAME", help=f"{names}, or a .toml file")
    learned.add_argument("--minutes", type=float, help="budget; a preset has its own")
    learned.add_argument("--validations", type=int, default=10, help="points of a curve")
    learned.add_argument("--rate", type=float, default=GPT_RATE, help="of nanogpt, transformers")
    timed = parts.add_parser("pace", help="time batches of a peer too slow to wait for")
    timed.add_argument("contestant", choices=["lstm"])
    timed.add_argument("--batches", type=int, default=300)
    told = parts.add_parser("report", help="say how much sooner ours was as good")
    told.add_argument("--draw", action="store_true", help="make the picture of the curves")
    told.add_argument("--picture", type=Path, default=ROOT / "pictures" / "quality.svg")
    for part in (learned, timed):
        part.add_argument("--seed", type=int, default=1)
        part.add_argument("--nanogpt", type=Path, metavar="DIR", help="checkout of nanoGPT")
        part.add_argument("--pytorch-examples", type=Path, metavar="DIR", help="its checkout")
        part.add_argument("--like", default="wikitext2-30min", help="preset whose sizes GPTs take")
        part.add_argument("--peer-precision", choices=("float32", "bfloat16"), default="float32")
        part.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
        part.add_argument("--data", help="another corpus, for all alike")
        part.add_argument("--threads", type=int, default=0)
    for part, do in ((learned, run), (timed, pace), (told, report)):
        part.add_argument("--out", type=Path, default=ROOT / "results" / "quality", metavar="DIR")
        part.set_defaults(do=do)
    options = parser.parse_args(argv)
    options.words = sys.argv[1:] if argv is None else argv
    return options


def main(argv: list[str] | None = None) -> None:
    """Do one of the parts that the docstring above describes."""
    options = parsed(argv)
    try:
        set_threads(getattr(options, "threads", 0))
        options.do(options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
