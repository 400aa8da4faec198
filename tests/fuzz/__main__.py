"""``python -m tests.fuzz`` runs random cases on simulated GPUs for a given time.

Processes follow one another, each with a hundred cases. The exit status is 1 if any case fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
from collections import Counter

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
    start = time.monotonic()
    counts: Counter[str] = Counter()
    number, failures = first, 0
    while time.monotonic() < start + 60 * minutes:
        command = ["--seed", str(seed), "--first", str(number), "--cases", str(BLOCK)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", *command], stdout=subprocess.PIPE, text=True
        )
        lines = done.stdout.splitlines()
        if done.returncode not in (0, 1) or not lines:
            failures += 1
            print(f"the process ended with status {done.returncode}: {' '.join(command)}")
        else:
            block = json.loads(lines.pop())
            failures += block["failures"]
            counts.update(block["counts"])
        print(*lines, sep="\n", end="\n" if lines else "")
        number += BLOCK
        passed = (time.monotonic() - start) / 60
        print(f"{passed:6.1f} min  {number - first:6} cases  {failures} failures", flush=True)
    print(f"seed {seed}, cases {first} to {number - 1}, {failures} failures")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:<28}{count:8}")
    return 1 if failures else 0


def run_block(seed: int, first: int, count: int) -> int:
    """Runs some cases in this process; the last line of output counts kinds and failures."""
    start_simulation(stacks=False)
    from tests.fuzz.check import Failure, check, shrink

    counts: Counter[str] = Counter()
    failures = 0
    for number in range(first, first + count):
        case = draw(seed, number)
        counts.update(kinds_of(case))
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
    print(json.dumps({"failures": failures, "counts": counts}))
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


def kinds_of(case: Case) -> list[str]:
    """Returns the kinds that a case counts for."""
    kinds = [f"layers: {unit}" for unit in set(case.units)]
    kinds += [f"step: {step.how}" for step in case.steps]
    kinds += [f"model: {name}" for name in ("tied", "autocast", "several") if getattr(case, name)]
    kinds += [f"model: {name}" for name in ("skips", "frozen", "hooked") if getattr(case, name)]
    kinds += [f"partitions: {min(len(case.devices), 1 + len(set(case.cuts)))}"]
    kinds += ["devices: with the CPU"] * ("cpu" in case.devices)
    kinds += ["devices: one twice"] * (len(set(case.devices)) < len(case.devices))
    for step in case.steps:
        kinds += ["step: fault"] * (step.fault is not None and "fragile" in case.units)
        flags = ("streams", "recorded", "late", "loss_there", "anomaly", "scale_on")
        kinds += [f"step: {name}" for name in (*flags, "counts", "counted") if getattr(step, name)]
        kinds += [f"then: {what}" for what in step.then]
    return kinds


if __name__ == "__main__":
    sys.exit(main())
