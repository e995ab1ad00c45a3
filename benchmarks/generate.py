"""Measure decoding: tokens a second beside transformers, a decoder without cache, and the memory.

    python benchmarks/generate.py demo --out docs/results/generate/demo.json
    python benchmarks/generate.py demo --large --out docs/results/generate/large.json

In turns, each in a process of its own (`turns`), all with the same fresh weights, at batch 1: a
model of the preset's sizes, of parts that transformers has as well (`as_transformers`), with the
full softmax.

cached        our decoder as `generate` uses it for short texts
compiled      the same, with its step compiled; int8: with the weights of matrices so; or both
transformers  `generate` with its cache, on the same weights
uncached      ours without a cache, which computes the logits of the last position alone

--large takes a model of at least 200 MB instead, and beside it reads a buffer of that size: no
decoder without tricks can be faster than its weights are read.

Figures are medians over the rounds, ratios medians of the rounds' own. Memory is the most that a
process has held, PyTorch and all. Where the texts are greedy, they are the same: it is told.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from generate_contestants import Task, ours, reads, theirs, writes
from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.info import planned_vocab_size
from minigpt.machine import matrix_rates, set_threads
from minigpt.model import MiniGPT
from minigpt.run_folder import write_json
from minigpt.sampling import USUAL, Sampling
from setting import command, machine, named_config
from turns import Contestant, Figures, Turns, median, ratio

MEGABYTE = 1e6
# 62 M weights of 4 bytes.
LARGE = {"vocab_size": 20_000, "d_model": 640, "n_heads": 10, "n_layers": 10}


def exportable(config: ModelConfig) -> ModelConfig:
    """Return a config of the same width and depth, of parts that transformers has."""
    return replace(
        config,
        n_kv_heads=0,
        d_head=0,
        d_ff=0,
        position="rotary",
        norm="rms",
        norm_placement="pre",
        feed_forward="swiglu",
        qk_norm=True,
        output="full",
        bias=False,
        output_bias=False,
        embedding_norm=False,
        token_shift=False,
        pointer=False,
        tie_embeddings=True,
    )


def contestants(task: Task, options: argparse.Namespace) -> dict[str, Contestant]:
    """Return who takes turns."""
    who: dict[str, Contestant] = {
        how: (writes, (ours, task, *how.split("-"))) for how in options.ours.split(",")
    }
    if not options.no_transformers:
        who["transformers"] = (writes, (theirs, task))
    if options.large:
        who["read"] = (reads, (4 * n_weights(task.config),))
    return who


def n_weights(config: ModelConfig) -> int:
    """Return how many weights there are; a token needs them all, for the table is tied."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in MiniGPT(config).parameters())


def measured(task: Task, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return what each contestant measured, round by round."""
    with Turns(contestants(task, options), options.threads) as turns:
        return turns.take_all(options.repeat)


def summary(task: Task, rounds: dict[str, list[Figures]]) -> dict[str, Any]:
    """Return everything that there is to say."""
    reading = rounds.pop("read", None)
    first_of = next(iter(rounds))
    writers = {}
    for name, found in rounds.items():
        writers[name] = {
            "tokens_per_second": 1 / median(found, "seconds_a_token"),
            "first_token_seconds": median(found, "first_seconds"),
            "seconds": median(found, "seconds"),
            "peak_megabytes": found[-1]["peak_bytes"] / MEGABYTE,
            "warm_up_seconds": found[-1]["warm_up_seconds"],
            "times_as_long_as_" + first_of: ratio(found, rounds[first_of]),
            "same_text": found[-1]["ids"] == rounds[first_of][-1]["ids"],
        }
        if reading:
            writers[name]["a_token_in_readings"] = ratio(found, reading, "seconds_a_token")
    n_bytes = 4 * n_weights(task.config)
    return {
        "parameters": n_bytes // 4,
        "weight_megabytes": n_bytes / MEGABYTE,
        "prompt_tokens": task.n_prompt,
        "new_tokens": task.sampling.max_new_tokens,
        "greedy": task.sampling.greedy,
        "read_gigabytes_per_second": (
            n_bytes / median(reading, "seconds") / 1e9 if reading else None
        ),
        "writers": writers,
    }


def told(result: dict[str, Any]) -> str:
    """Return the result in words."""
    lines = [
        f"{result['parameters']:,} weights, {result['weight_megabytes']:.0f} MB; "
        f"{result['new_tokens']} tokens after {result['prompt_tokens']}"
        + (", greedy" if result["greedy"] else "")
    ]
    if result["read_gigabytes_per_second"]:
        lines.append(f"memory is read at {result['read_gigabytes_per_second']:.1f} GB/s")
    for name, found in result["writers"].items():
        ratios = {key: value for key, value in found.items() if key.startswith("times_")}
        readings = found.get("a_token_in_readings")
        lines.append(
            f"{name:<13}{found['tokens_per_second']:8.1f} tokens/s  first "
            f"{1000 * found['first_token_seconds']:7.1f} ms  {found['peak_megabytes']:6.0f} MB  "
            f"warm-up {found['warm_up_seconds']:5.1f} s  "
            + "".join(f"{value:.2f} x as long" for value in ratios.values())
            + (f"  {readings:.2f} readings a token" if readings else "")
            + ("" if found["same_text"] or not result["greedy"] else "  another text")
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure a model of the sizes of a preset, print what comes out and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", help="the name of a preset, or a .toml file")
    parser.add_argument("--large", action="store_true", help="a model of at least 200 MB instead")
    parser.add_argument("--ours", default="compiled,cached", help="which of ours")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--greedy", action="store_true", help="not temperature 0.8 and top-k 50")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--context", type=int, help="another context length")
    parser.add_argument("--repeat", type=int, default=9, help="rounds")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    try:
        threads = set_threads(options.threads)
        preset = named_config(options.preset)
        config = exportable(preset.model)
        config = replace(config, context_length=options.context or config.context_length)
        sizes = LARGE if options.large else {"vocab_size": planned_vocab_size(preset.tokenizer)}
        config = replace(config, **sizes)
        sampling = Sampling(temperature=0, top_k=None) if options.greedy else USUAL
        sampling = replace(sampling, max_new_tokens=options.new_tokens)
        task = Task(config, options.prompt_tokens, sampling)
        result = summary(task, measured(task, options))
        rates = matrix_rates(torch.device("cpu"))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(told(result))
    if options.out:
        words = sys.argv[1:] if argv is None else argv
        about = {
            "preset": Path(options.preset).stem,
            "command": command("generate.py", words),
            "rounds": options.repeat,
            "threads": threads,
            **machine(rates),
        }
        write_json(options.out, {**about, **result})


if __name__ == "__main__":
    main()
