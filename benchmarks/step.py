"""Measure a training step: what share of it is matrix products, and how it stands beside others.

    python benchmarks/step.py wikitext2-10min --nanogpt DIR --out docs/results/step/NAME.json

In turns, each in a process of its own (`turns`), so that a noisy machine troubles all alike:

products   every matrix product of a step, alone, at the shapes and in the precision of training:
           what the machine can do for those shapes
ours       steps of `train` as the preset has it, compiled; with --validation at last one of all of
           valid
eager      the same without torch.compile
nanogpt    steps of nanoGPT at the preset's d_model, layers, heads, context and batch, with the
           full softmax: in float32, as its script computes on a CPU, and in the preset's precision,
           which that script does not offer; compiled where that is faster

Figures are medians over the rounds, ratios and shares medians of the rounds' own. The share says
how much of a step the products fill at 80 % of the rate that they have alone; at 100 % as well: all
of them, and without those of the optimizer (Muon's, which make a gradient orthogonal). What a
causal mask hides is no part of it, however attention is computed (`products`).
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minigpt.config import Config
from minigpt.errors import UserError
from minigpt.machine import choose_precision, matrix_rates, set_threads
from minigpt.run_folder import write_json
from products import Product, flops
from setting import command, machine, named_config
from step_contestants import alone, budget_of, count, ours, peer
from turns import Contestant, Figures, Turns, median, ratio

WARM_UP_ROUNDS = 3  # the first compiles, the second fills the optimizers and the allocator
SHARE_OF_RATE = 0.8
SHARE_KEY = f"share_at_{100 * SHARE_OF_RATE:.0f}_percent_of_rate"


def counted(config: Config, threads: int) -> Counter[Product]:
    """Return the products of a step and how often each is made."""
    with Turns({"count": (count, (config,))}, threads) as turns:
        return Counter(turns.take("count")["counts"])


def contestants(
    config: Config, counts: Mapping[Product, int], options: argparse.Namespace
) -> dict[str, Contestant]:
    """Return who takes turns."""
    budget = budget_of(config, WARM_UP_ROUNDS + options.repeat)
    eager = replace(budget, compile="off")
    found: dict[str, Contestant] = {"products": (alone, (counts,)), "ours": (ours, (eager,))}
    if config.compile != "off":
        found["ours"] = (ours, (replace(budget, compile="on"),))
        found["eager"] = (ours, (eager,))
    checkouts = {"nanogpt": options.nanogpt}
    for dtype in dict.fromkeys(("float32", config.precision)) if options.nanogpt else ():
        given = ("nanogpt", config, checkouts, options.compile, getattr(torch, dtype))
        found[f"nanogpt {dtype}"] = (peer, given)
    return found


def measured(
    config: Config, counts: Mapping[Product, int], options: argparse.Namespace
) -> tuple[dict[str, list[Figures]], float | None]:
    """Return what each contestant measured, round by round, and the seconds of a validation.

    The latter only if it is asked for: all of valid takes as long as many steps.
    """
    who = contestants(config, counts, options)
    with Turns(who, options.threads) as turns:
        rounds = turns.take_all(options.repeat, WARM_UP_ROUNDS)
        validated = turns.take("ours") if options.validation else {}
    return rounds, validated.get("validation_seconds")


def product_figures(
    counts: Mapping[Product, int],
    rounds: dict[str, list[Figures]],
    wanted: Callable[[Product], bool] = lambda _: True,
) -> dict[str, Any]:
    """Return what all products of a step that are wanted come to, and their share of it."""
    seconds = [
        {
            "seconds": sum(
                times * took
                for (product, times), took in zip(counts.items(), found["products"], strict=True)
                if wanted(product)
            )
        }
        for found in rounds["products"]
    ]
    total = flops({product: times for product, times in counts.items() if wanted(product)})
    alone, share = median(seconds, "seconds"), ratio(seconds, rounds["ours"])
    return {
        "product_flops": total,
        "product_seconds": alone,
        "product_gflops_per_second": total / alone / 1e9 if alone else 0.0,
        "share_at_full_rate": share,
        SHARE_KEY: share / SHARE_OF_RATE,
    }


def product_rows(counts: Mapping[Product, int], rounds: list[Figures]) -> list[dict[str, Any]]:
    """Return one row for each kind of product, the dearest first."""
    rows = []
    for place, (product, times) in enumerate(counts.items()):
        seconds = statistics.median(found["products"][place] for found in rounds)
        rows.append(
            {
                "product": product.name,
                "dtype": str(product.dtype).removeprefix("torch."),
                "of_optimizer": product.of_optimizer,
                "useful_share": product.share,
                "times": times,
                "gflops_per_second": product.flops / seconds / 1e9,
                "seconds_a_step": times * seconds,
            }
        )
    return sorted(rows, key=lambda row: -row["seconds_a_step"])


def summary(
    config: Config,
    counts: Mapping[Product, int],
    rounds: dict[str, list[Figures]],
    validation_seconds: float | None,
) -> dict[str, Any]:
    """Return everything that there is to say."""
    n_tokens = config.batch_size * config.model.context_length
    step_seconds = median(rounds["ours"], "seconds")
    names = sorted({name for found in rounds["ours"] for name in found["parts"]})
    parts = {name: median(rounds["ours"], "parts", name) for name in names}
    parts["rest (batch, forward, loop)"] = step_seconds - sum(parts.values())
    return {
        "step_seconds": step_seconds,
        "tokens_per_step": n_tokens,
        "tokens_per_second": n_tokens / step_seconds,
        "parts_seconds": parts,
        "validation_seconds": validation_seconds,
        "validation_share_of_budget": (
            config.validations * validation_seconds / (60 * config.minutes)
            if config.minutes and validation_seconds is not None
            else None
        ),
        **product_figures(counts, rounds),
        "without_optimizer": product_figures(counts, rounds, lambda p: not p.of_optimizer),
        "of_optimizer": product_figures(counts, rounds, lambda p: p.of_optimizer),
        "contestants": {
            name: {
                "step_seconds": median(found, "seconds"),
                "tokens_per_second": n_tokens / median(found, "seconds"),
                "ours_is_faster_by": ratio(found, rounds["ours"]),
                "compiled": found[-1].get("compiled", config.compile != "off" and name == "ours"),
            }
            for name, found in rounds.items()
            if name != "products"
        },
        "products": product_rows(counts, rounds["products"]),
    }


def told_products(name: str, figures: dict[str, Any]) -> str:
    """Return what some of the products come to, in words."""
    return (
        f"{name}: {figures['product_flops'] / 1e9:,.1f} GFLOP, alone "
        f"{figures['product_seconds']:.3f} s ({figures['product_gflops_per_second']:,.0f} GFLOP/s),"
        f" {figures['share_at_full_rate']:.1%} of the step, {figures[SHARE_KEY]:.1%} at "
        f"{SHARE_OF_RATE:.0%} of that rate"
    )


def told(result: dict[str, Any]) -> str:
    """Return the result in words."""
    step = result["step_seconds"]
    lines = [
        f"a step of {result['tokens_per_step']:,} tokens: {step:.3f} s, "
        f"{result['tokens_per_second']:,.0f} tokens/s",
        told_products("matrix products", result),
        told_products("  without the optimizer's", result["without_optimizer"]),
        told_products("  the optimizer's alone", result["of_optimizer"]),
    ]
    for row in result["products"][:8]:
        whose = "  optimizer" if row["of_optimizer"] else ""
        lines.append(
            f"  {row['times']:>4} × {row['product']:<26} {row['dtype']:<9}"
            f"{row['seconds_a_step']:8.4f} s {row['gflops_per_second']:7.0f} GFLOP/s{whose}"
        )
    for name, seconds in result["parts_seconds"].items():
        lines.append(f"{name:<28} {seconds:7.4f} s {seconds / step:6.1%}")
    if result["validation_seconds"] is not None:
        spent = result["validation_share_of_budget"]
        of_budget = f", {spent:.1%} of the budget in all" if spent is not None else ""
        lines.append(f"{'a validation':<28} {result['validation_seconds']:7.2f} s{of_budget}")
    for name, found in result["contestants"].items():
        how = "compiled" if found["compiled"] else "eager"
        lines.append(
            f"{name:<18} {how:<9} {found['tokens_per_second']:8,.0f} tokens/s; ours is "
            f"{found['ours_is_faster_by']:.2f} times as fast"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure the preset that is named, print what comes out and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", help="the name of a preset, or a .toml file")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="checkout of nanoGPT")
    parser.add_argument("--repeat", type=int, default=15, help="rounds")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--data", help="another corpus")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="nanoGPT")
    parser.add_argument(
        "--validation", action="store_true", help="time a validation of all of valid as well"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    try:
        threads = set_threads(options.threads)
        config = named_config(options.preset)
        rates = matrix_rates(torch.device("cpu"))
        # Decided once: the contestants must not each come to another view of a busy machine.
        config = replace(
            config,
            data=options.data or config.data,
            threads=threads,
            precision=choose_precision(config.precision, rates),
        )
        counts = counted(config, threads)
        result = summary(config, counts, *measured(config, counts, options))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(told(result))
    if options.out:
        words = sys.argv[1:] if argv is None else argv
        about = {
            "preset": Path(options.preset).stem,
            "command": command("step.py", words),
            "precision": config.precision,
            "rounds": options.repeat,
            **machine(rates),
        }
        write_json(options.out, {**about, **result})


if __name__ == "__main__":
    main()
