"""``python -m tests.mutants`` removes one wait after the other, and shows which test notices.

With ``--breakages`` it breaks one thing after the other that has nothing to do with GPUs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tqdm import tqdm

from tests.mutants.mutant import Mutant
from tests.mutants.printed import (
    HEADER,
    HEADER_OF_BREAKAGES,
    row,
    row_of_breakage,
    summary,
)
from tests.mutants.suite import ORDINARY, SIMULATED, Stages, Suite
from tests.mutants.table import BREAKAGES, MUTANTS
from tests.mutants.trial import Tree, Verdict


class Table(NamedTuple):
    """A list of mutants, the tests to try them against, and the format of the output."""

    mutants: Sequence[Mutant]
    suite: Suite
    header: str
    row: Callable[[Mutant, Verdict], str]


OF_WAITS = Table(MUTANTS, SIMULATED, HEADER, row)
OF_BREAKAGES = Table(BREAKAGES, ORDINARY, HEADER_OF_BREAKAGES, row_of_breakage)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the mutants and prints the table; returns 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--breakages", action="store_true",
        help="break things that are not about GPUs, and run the tests without simulated GPUs",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these; see --list")
    parser.add_argument("--list", action="store_true", help="print their names, and try none")
    parser.add_argument(
        "--stages", type=int, default=3, choices=(1, 2, 3),
        help="the last stage to run: 1 the tests made for mutants, 2 others that look at streams, "
        "3 all tests (default); of breakages: 1 the tests that are expected to notice, 2 all",
    )  # fmt: skip
    parser.add_argument("--tests", nargs="+", help="run these tests instead")
    parser.add_argument(
        "--once", action="store_true", help="trust a failing test without running it again"
    )
    options = parser.parse_args(arguments)
    table = OF_BREAKAGES if options.breakages else OF_WAITS
    names = {mutant.name for mutant in table.mutants}
    for name in options.only or ():
        if name not in names:
            parser.error(f"there is no mutant {name!r}; --list prints their names")
    chosen = [mutant for mutant in table.mutants if not options.only or mutant.name in options.only]
    if options.list:
        print("\n".join(f"{mutant.name}: {mutant.what} ({mutant.file})" for mutant in chosen))
        return 0

    def stages(mutant: Mutant) -> Stages:
        return [options.tests] if options.tests else table.suite.stages(mutant)[: options.stages]

    print(table.header, flush=True)
    verdicts: list[Verdict] = []
    found = _verdicts(chosen, options.jobs, table.suite._replace(stages=stages), options.once)
    for mutant, verdict in zip(chosen, found, strict=True):
        tqdm.write(table.row(mutant, verdict))
        sys.stdout.flush()
        verdicts.append(verdict)
    print(f"\n{summary(verdicts)}")
    return 0 if all(verdicts) else 1


def _verdicts(
    mutants: Sequence[Mutant], jobs: int, suite: Suite, once: bool
) -> Iterator[Verdict]:
    """Tries the mutants, ``jobs`` at once; yields the verdicts in the order of ``mutants``."""
    trees: SimpleQueue[Tree] = SimpleQueue()

    def try_out(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            return tree.try_out(mutant, once)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="pipert-mutants-") as folder:
        for k in range(jobs):
            trees.put(Tree(Path(folder) / str(k), suite))
        with ThreadPoolExecutor(jobs) as pool:
            yield from tqdm(pool.map(try_out, mutants), total=len(mutants), unit="mutant")


if __name__ == "__main__":
    sys.exit(main())
