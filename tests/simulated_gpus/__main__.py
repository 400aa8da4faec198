"""``python -m tests.simulated_gpus program.py ...``: run a program on simulated GPUs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests import simulated_gpus


def main() -> int:
    """Runs the program and prints the reports; returns 1 if there are any."""
    if len(sys.argv) < 2:
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    gpus = simulated_gpus.start()
    gpus.detect(stacks=True)
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    reports = gpus.reports()
    for report in reports:
        print(report, file=sys.stderr)
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
