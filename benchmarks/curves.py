"""Curves: perplexity against minutes of training, and what they say when laid side by side.

In: a folder with one JSON file for each contestant, as `quality` writes them. Out: for each peer,
how much sooner ours was as good.

A file of kind `curve` holds points; one of kind `pace` holds the minutes of an epoch, measured over
a number of batches, and the published result that so many epochs lead to: a peer that nobody wants
to wait for. What follows from a pace is marked as extrapolated.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt.errors import UserError
from minigpt.run_folder import read_json

Result = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """Where a contestant stood when the whole of valid was scored."""

    minutes: float
    """Of training, compilation included, validations not."""
    perplexity: float
    steps: int
    tokens: int
    epochs: float


@dataclass(frozen=True)
class Goal:
    """What a peer came to, and after how long."""

    peer: str
    perplexity: float
    minutes: float
    extrapolated: bool
    run: str = ""
    """The name of the result that it comes from."""
    n_runs: int = 1
    """How many runs it is the best of."""


@dataclass(frozen=True)
class Ratio:
    """How much sooner ours reached a goal: `ours` is None where none of ours did."""

    goal: Goal
    ours: str | None = None
    minutes: float = math.nan
    ratio: float = math.nan
    n_seeds: int = 0
    n_presets: int = 0
    """How many of ours it is the soonest of."""


def points(result: Result) -> list[Point]:
    """Return the points of a curve, in order of time."""
    return [Point(**point) for point in result["curve"]]


def load(folder: Path) -> list[Result]:
    """Return the results in folder, ours first, then by name."""
    found = [read_json(path) for path in sorted(folder.glob("*.json"))]
    # A run that ended before its first validation has no curve.
    known = [result for result in found if result.get("curve") or result.get("kind") == "pace"]
    return sorted(known, key=lambda result: not result["ours"])


def require_alike(results: Iterable[Result]) -> list[str]:
    """Return warnings where machines were not equally fast when results were made.

    Raises UserError where they are of different texts, numbers of threads or of cores: no ratio
    could be taken then. A result that does not say is let through.
    """
    flat = [{**result.get("hardware", {}), **result} for result in results]
    for name in ("data", "threads", "cores"):
        values = sorted({str(result[name]) for result in flat if name in result})
        if len(values) > 1:
            raise UserError(f"results differ in {name} ({'; '.join(values)}): keep them apart")
    warnings = []
    for precision in ("float32", "bfloat16"):
        rates = [result.get("matrix_gflops", {}).get(precision) for result in flat]
        rates = [rate for rate in rates if rate]
        if rates and max(rates) > 1.1 * min(rates):
            warnings.append(
                f"matrix products in {precision} ran at {min(rates):.0f} to {max(rates):.0f} "
                "GFLOP/s when these were made: ratios are off by as much"
            )
    return warnings


def minutes_to(curve: list[Point], perplexity: float) -> float | None:
    """Return the first minute at which the curve is down at perplexity; None if it never is.

    Between two points the logarithm of the perplexity is taken to fall with that of the time, as
    the curves do, roughly. The time of the first point is all that is known of what lies before it.
    """
    before: Point | None = None
    for point in curve:
        if point.perplexity <= perplexity:
            if before is None:
                return point.minutes
            fall = math.log(before.perplexity / point.perplexity)
            share = math.log(before.perplexity / perplexity) / fall
            minutes: float = before.minutes * (point.minutes / before.minutes) ** share
            return minutes
        before = point
    return None


def goals(results: Iterable[Result]) -> list[Goal]:
    """Return what there is to reach: each peer's best, and what is published for its pace.

    Runs of a peer may differ in rate, seed, precision and budget; the best in perplexity counts.
    """
    found: list[Goal] = []
    runs: dict[str, list[tuple[float, float, str]]] = {}
    for result in results:
        if result["kind"] == "pace":
            published = result["published"]
            minutes = published["epochs"] * result["epoch_minutes"]
            name = f"{result['contestant']}, {published['epochs']} epochs"
            found.append(Goal(name, published["valid"], minutes, extrapolated=True))
        elif not result["ours"]:
            best = min(points(result), key=lambda point: point.perplexity)
            reached = (best.perplexity, best.minutes, result["name"])
            runs.setdefault(result["contestant"], []).append(reached)
    for peer, all_reached in runs.items():
        perplexity, minutes, run = min(all_reached)
        found.append(Goal(peer, perplexity, minutes, False, run, len(all_reached)))
    return found


def ratios(results: list[Result]) -> list[Ratio]:
    """Return for each goal which of ours reached it soonest: seeds are joined by their median."""
    groups: dict[str, list[list[Point]]] = {}
    for result in results:
        if result["ours"] and result["kind"] == "curve":
            budget = f"{result['contestant']}, {result['budget_minutes']:g} min"
            groups.setdefault(budget, []).append(points(result))
    found = []
    for goal in goals(results):
        best = Ratio(goal)
        for name, curves in groups.items():
            times = [minutes_to(curve, goal.perplexity) for curve in curves]
            reached = [minutes for minutes in times if minutes is not None]
            if len(reached) < len(curves):
                continue  # a median of those that made it would flatter
            minutes = statistics.median(reached)
            if best.ours is None or minutes < best.minutes:
                best = Ratio(goal, name, minutes, goal.minutes / minutes, len(curves), len(groups))
        found.append(best)
    return found
