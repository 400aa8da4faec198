"""``python -m tests.mutants`` removes one wait after the other, and shows which test notices."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.printed import HEADER, row, summary
from tests.mutants.trial import Tree, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the mutants and prints the table; returns 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these; see --list")
    parser.add_argument("--list", action="store_true", help="print their names, and try none")
    parser.add_argument(
        "--stages", type=int, default=3, choices=(1, 2, 3),
        help="the last stage to run: 1 the tests made for mutants, 2 others that look at streams, "
        "3 all tests (default)",
    )  # fmt: skip
    parser.add_argument("--tests", nargs="+", help="run these tests instead")
    parser.add_argument(
        "--once", action="store_true", help="trust a failing test without running it again"
    )
    options = parser.parse_args(arguments)
    names = {mutant.name for mutant in MUTANTS}
    for name in options.only or ():
        if name not in names:
            parser.error(f"there is no mutant {name!r}; --list prints their names")
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.list:
        print("\n".join(f"{mutant.name}: {mutant.what} ({mutant.file})" for mutant in chosen))
        return 0

    print(HEADER, flush=True)
    verdicts: list[Verdict] = []
    found = _verdicts(chosen, options.jobs, options.tests, options.stages, options.once)
    for mutant, verdict in zip(chosen, found, strict=True):
        tqdm.write(row(mutant, verdict))
        sys.stdout.flush()
        verdicts.append(verdict)
    print(f"\n{summary(verdicts)}")
    return 0 if all(verdicts) else 1


def _verdicts(
    mutants: Sequence[Mutant], jobs: int, tests: Sequence[str] | None, most: int, once: bool
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
            trees.put(Tree(Path(folder) / str(k), tests, most))
        with ThreadPoolExecutor(jobs) as pool:
            yield from tqdm(pool.map(try_out, mutants), total=len(mutants), unit="mutant")


if __name__ == "__main__":
    sys.exit(main())
