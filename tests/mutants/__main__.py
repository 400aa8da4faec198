"""``python -m tests.mutants``: removes one wait after the other, and reports which test notices."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS
from tests.mutants.trial import STAGES, Tree, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants and print the table; 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone; see --list")
    parser.add_argument("--list", action="store_true", help="print their names, and try none")
    parser.add_argument(
        "--stages", type=int, default=len(STAGES), choices=range(1, len(STAGES) + 1),
        help="how far to go with one that survives: 1 runs the tests made for mutants, 2 others "
        "that look at streams, 3 all tests (default)",
    )  # fmt: skip
    parser.add_argument("--tests", nargs="+", help="run these instead")
    parser.add_argument(
        "--once", action="store_true", help="believe a test that fails, without a second look"
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
    stages = STAGES[: options.stages] if options.tests is None else [options.tests]
    found = _verdicts(chosen, options.jobs, stages, options.once)
    for mutant, verdict in zip(chosen, found, strict=True):
        tqdm.write(row(mutant, verdict))
        sys.stdout.flush()
        verdicts.append(verdict)
    print(f"\n{summary(verdicts)}")
    return 0 if all(verdicts) else 1


def _verdicts(
    mutants: Sequence[Mutant], jobs: int, stages: Sequence[Sequence[str]], once: bool
) -> Iterator[Verdict]:
    """In the order of ``mutants``."""
    trees: SimpleQueue[Tree] = SimpleQueue()

    def try_out(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            return tree.try_out(mutant, stages, once)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="pipert-mutants-") as folder:
        for k in range(jobs):
            trees.put(Tree(Path(folder) / str(k)))
        with ThreadPoolExecutor(jobs) as pool:
            yield from tqdm(pool.map(try_out, mutants), total=len(mutants), unit="mutant")


HEADER = """\
| mutant | taken out | in | noticed by | by | in words |
|---|---|---|---|---|---|"""


def row(mutant: Mutant, verdict: Verdict) -> str:
    """Markdown: what was taken out, and who has noticed, by what."""
    test = verdict.failed or "**nobody**"
    by = f"`{_short(test)}`" if "::" in test else test
    kind = verdict.by if verdict else ""
    return (
        f"| {mutant.name} | {mutant.what} | {mutant.file.removeprefix('pipert/')} | {by} "
        f"| {kind} | {_escaped(verdict.how)} |"
    )


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many were noticed."""
    reports = sum(verdict.by == "report" for verdict in verdicts)
    survivors = sum(not verdict for verdict in verdicts)
    return (
        f"{len(verdicts)} mutants, {len(verdicts) - survivors} noticed, {reports} of them by a "
        f"report of the simulation; {survivors} survive. "
        f"{sum(verdict.seconds for verdict in verdicts) / 60:.0f} minutes."
    )


def _short(test: str) -> str:
    return test.removeprefix("tests/").partition("[")[0]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")


if __name__ == "__main__":
    sys.exit(main())
