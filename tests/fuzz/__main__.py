"""``python -m tests.fuzz`` runs random cases on simulated GPUs for a given time.

Processes follow one another, each with a hundred cases. The exit status is 1 if any case fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
import time

from tests.fuzz.case import Case, Step, draw

BLOCK = 100


def main() -> int:
    """Carries out the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to run")
    parser.add_argument("--seed", type=int, default=0, help="determines the cases")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, help="run this many cases, in this process")
    parser.add_argument("--case", help="run this case, as it was printed, with stacks")
    args = parser.parse_args()
    if args.case is not None:
        return run_one(eval(args.case, {"Case": Case, "Step": Step}))
    if args.cases is not None:
        return run_block(args.seed, args.first, args.cases)
    return run_blocks(args.seed, args.first, args.minutes)


def run_blocks(seed: int, first: int, minutes: float) -> int:
    """Runs blocks of cases for some minutes, each in a new process; returns the exit status."""
    start, number, failures = time.monotonic(), first, 0
    while time.monotonic() < start + 60 * minutes:
        command = ["--seed", str(seed), "--first", str(number), "--cases", str(BLOCK)]
        done = subprocess.run([sys.executable, "-m", "tests.fuzz", *command], check=False)
        failures += done.returncode != 0
        number += BLOCK
        passed = (time.monotonic() - start) / 60
        print(f"{passed:6.1f} min  {number - first:6} cases  {failures} failed blocks", flush=True)
    return 1 if failures else 0


def run_block(seed: int, first: int, count: int) -> int:
    """Runs some cases in this process; returns the exit status."""
    start_simulation(stacks=False)
    from tests.fuzz.check import Failure, check, shrink

    failures = 0
    for number in range(first, first + count):
        case = draw(seed, number)
        faulthandler.dump_traceback_later(180, exit=True)
        try:
            check(case)
        except Failure as failure:
            failures += 1
            print(f"case {number} of seed {seed}: {failure}\n{case!r}")
            faulthandler.dump_traceback_later(400, exit=True)
            print(f"smaller: {shrink(case, failure.kind)!r}", flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
    return 1 if failures else 0


def run_one(case: Case, tries: int = 20) -> int:
    """Runs a case until it fails, ``tries`` times at most."""
    start_simulation(stacks=True)
    from tests.fuzz.check import Failure, check

    for k in range(tries):
        try:
            check(case)
        except Failure as failure:
            print(f"try {k}: {failure}")
            return 1
    print(f"no failure in {tries} tries")
    return 0


def start_simulation(stacks: bool) -> None:
    """Starts the simulation; must be called before torch is imported."""
    from tests import simulated_gpus

    simulated_gpus.start().detect(stacks=stacks)
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
