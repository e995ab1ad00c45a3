"""Turns: contestants in processes of their own, of which one works at a time.

In: for each contestant a function and its arguments. Out: what each measured, turn by turn. What
else the machine does in a while troubles all alike, so that ratios within a round can be trusted
where seconds cannot.

    with Turns({"ours": (train_in_turns, (config,)), "theirs": (peer_in_turns, (…,))}) as turns:
        for _ in range(rounds):
            ours, theirs = turns.take("ours"), turns.take("theirs")

A contestant makes itself ready, then for each `turn.wait()` does its work and hands in what it
measured, `turn.done(…)`.
"""

import contextlib
import multiprocessing
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from minigpt.errors import UserError
from minigpt.machine import set_threads

Figures = dict[str, Any]
Contestant = tuple[Callable[..., None], tuple[Any, ...]]


class Turn:
    """A contestant's end of the line."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def wait(self) -> None:
        """Wait for one's turn. Raises EOFError when there are no more."""
        self._line.recv()

    def done(self, figures: Figures) -> None:
        """Hand in what was measured, and the turn."""
        self._line.send(figures)


class Turns:
    """All contestants, made ready one after the other."""

    def __init__(self, contestants: Mapping[str, Contestant], threads: int = 0) -> None:
        self._contestants, self._threads = contestants, threads
        self._lines: dict[str, Connection] = {}
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        """Start the contestants. Raises UserError where one cannot begin."""
        # A fresh process: one that was forked would inherit threads that are not there.
        context = multiprocessing.get_context("spawn")
        try:
            for name, (function, given) in self._contestants.items():
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_contend, args=(theirs, function, given, self._threads), daemon=True
                )
                process.start()
                theirs.close()  # or its end would not be seen here
                self._lines[name] = ours
                self._processes.append(process)
                self._hear(name)
        except BaseException:
            self._end()
            raise
        return self

    def take(self, name: str) -> Figures:
        """Let a contestant take its turn, and return what it measured."""
        with contextlib.suppress(OSError):  # one that has ended may have said why
            self._lines[name].send(None)
        return self._hear(name)

    def take_all(self, rounds: int, warm_up: int = 0) -> dict[str, list[Figures]]:
        """Let all take turns; return what each measured, round by round, after those to warm up."""
        found: dict[str, list[Figures]] = {name: [] for name in self._contestants}
        for turn in range(warm_up + rounds):
            for name, figures in found.items():
                measured = self.take(name)
                if turn >= warm_up:
                    figures.append(measured)
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return found

    def _hear(self, name: str) -> Figures:
        try:
            figures: Figures = self._lines[name].recv()
        except (EOFError, ConnectionError):  # the latter where it ended with our word unread
            raise UserError(f"{name} ended early: see above for what it said") from None
        if "mistake" in figures:
            raise UserError(figures["mistake"])
        return figures

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the contestants."""
        self._end()

    def _end(self) -> None:
        for line in self._lines.values():
            line.close()
        for process in self._processes:
            process.join(timeout=10)
            process.kill()  # one that is still at work has nothing to say any more


def median(rounds: list[Figures], *keys: str) -> float:
    """Return the median over the rounds of a figure, 0 where a round has none."""

    def figure(found: Any) -> float:
        for key in keys:
            found = found.get(key, 0.0)
        return float(found)

    return statistics.median(figure(found) for found in rounds)


def ratio(above: list[Figures], below: list[Figures], key: str = "seconds") -> float:
    """Return the median of the rounds' ratios of a figure of some to the seconds of others."""
    pairs = zip(above, below, strict=True)
    return statistics.median(float(a[key] / b["seconds"]) for a, b in pairs)


def _contend(
    line: Connection, function: Callable[..., None], given: tuple[Any, ...], threads: int
) -> None:
    """Work as a contestant, in its own process."""
    turn = Turn(line)
    try:
        set_threads(threads)
        # What a contestant prints of itself does not belong among the results.
        with contextlib.redirect_stdout(sys.stderr):
            function(turn, *given)
    except UserError as error:
        line.send({"mistake": str(error)})
    except (EOFError, ConnectionError):
        pass  # there are no more turns
    except Exception:
        traceback.print_exc()
    finally:
        line.close()
