"""Try the properties of tests/test_fuzz.py for minutes on end: `make fuzz MINUTES=30`.

In: minutes of processor time, of which other work on the machine takes nothing away. Out: a line
for each round, what failed with the smallest case that fails, and how many cases each property was
tried with; exit status 1 where one failed.

A round tries each property with twice the cases of the test suite, always new ones. What failed
once is not tried again; its case stays in .hypothesis/, where pytest finds it first.
"""

import argparse
import functools
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
TIMES = 2


def properties() -> dict[str, Any]:
    """Return the tests of tests/test_fuzz.py that hypothesis makes cases for, by name."""
    os.environ["MINIGPT_FUZZ_TIMES"] = str(TIMES)  # read as the tests are defined
    sys.path.insert(0, str(TESTS))
    import test_fuzz

    return {name: test for name, test in vars(test_fuzz).items() if hasattr(test, "hypothesis")}


def counted(test: Any, name: str, tried: Counter[str]) -> Callable[[], None]:
    """Return the test, as something to call that counts its cases in `tried`."""
    inner = test.hypothesis.inner_test

    @functools.wraps(inner)
    def count(*args: Any, **kwargs: Any) -> None:
        tried[name] += 1
        inner(*args, **kwargs)

    test.hypothesis.inner_test = count
    return test  # type: ignore[no-any-return]


def fuzz(minutes: float) -> int:
    """Try all properties until the time is over; return how many failed."""
    tried: Counter[str] = Counter()
    going = {name: counted(test, name, tried) for name, test in properties().items()}
    failed: list[str] = []
    while process_time() < 60 * minutes:
        for name in [name for name in going if name not in failed]:
            try:
                going[name]()
            except Exception:
                traceback.print_exc()
                failed.append(name)
            if process_time() > 60 * minutes:
                break
        spent = process_time() / 60
        print(f"{spent:.1f} minutes: {tried.total():,} cases, {len(failed)} failed", flush=True)
    for name, n in tried.most_common():
        print(f"{n:>9,}  {name}  {'FAILED' if name in failed else ''}")
    return len(failed)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    sys.exit(1 if fuzz(parser.parse_args().minutes) else 0)


if __name__ == "__main__":
    main()
