"""Compares fitted schedules with the named ones, in the virtual time of simulated GPUs.

::

    python benchmarks/simulated_fit.py --check      # exit with 1 when a bar is missed

The model is sixteen ``Linear(256)`` with ``Tanh``, as in ``simulated_schedules.py``, and the
mini-batch has 2048 rows; devices do 0.5 TFLOP/s. *Predicted* is of the measured time. *Best named*
is the fastest of the named schedules that keeps no more micro-batches than ``memory``.

pipert itself runs; only the devices' clocks are simulated, so nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from tests import simulated_gpus  # noqa: E402

GPUS = simulated_gpus.start()

# isort: split
import torch  # noqa: E402
from _measure import Row, header, report, verdict  # noqa: E402
from torch import nn  # noqa: E402

from pipert import Pipe  # noqa: E402

__all__ = ["main"]

OFF = 0.05  # how far a prediction may be off
WIDTH, ROWS, HEAD = 256, 2048, 2048


class Case(NamedTuple):
    """A pipe, and the micro-batches that its devices may keep."""

    pairs: tuple[int, ...]
    """The number of (Linear, Tanh) in each partition."""
    devices: tuple[int, ...]
    m: int
    memory: int
    link: float = 12.0  # GB/s
    head: bool = False
    """Whether the last partition ends with a large Linear."""


CASES = {
    "equal, 4 kept": Case((4, 4, 4, 4), (0, 1, 2, 3), 8, 4),
    "equal, 6 kept": Case((4, 4, 4, 4), (0, 1, 2, 3), 8, 6),
    "uneven, 4 kept": Case((6, 3, 4, 3), (0, 1, 2, 3), 8, 4),
    "uneven, 6 kept": Case((6, 3, 4, 3), (0, 1, 2, 3), 8, 6),
    "slow links, 4 kept": Case((4, 4, 4, 4), (0, 1, 2, 3), 16, 4, link=2.0),
    "slow links, 6 kept": Case((4, 4, 4, 4), (0, 1, 2, 3), 16, 6, link=2.0),
    "heavy head, 4 kept": Case((4, 4, 4, 2), (0, 1, 2, 3), 8, 4, head=True),
    "uneven V, 5 kept": Case((3, 2, 2, 1, 1, 2, 3, 2), (0, 1, 2, 3, 3, 2, 1, 0), 8, 5),
}


def loss(y: torch.Tensor, _: object = None) -> torch.Tensor:
    """Computes the loss."""
    return y.square().mean()


def row(name: str, case: Case) -> Row:
    """Measures a step under the fitted schedule, and under the others."""
    GPUS.rates(launch_us=0, memory_gbps=1e6, link_gbps=case.link, tflops=0.5)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(sum(case.pairs))]
    balance = list(case.pairs)
    if case.head:
        layers.append(nn.Sequential(nn.Linear(WIDTH, HEAD), nn.Tanh()))
        balance[-1] += 1
    devices = [f"cuda:{k}" for k in case.devices]
    x = torch.randn(ROWS, WIDTH, device="cuda:0")
    model = nn.Sequential(*layers)
    with Pipe(model, balance, devices=devices, chunks=case.m, checkpoint="never") as pipe:

        def step(schedule: object) -> float:
            GPUS.reset_time()
            pipe.forward_backward(x, loss_fn=loss, schedule=schedule)  # type: ignore[arg-type]
            return GPUS.makespan()

        step("zb-h1")
        with pipe.record() as timeline:
            step("zb-h1")
        fitted = timeline.fit(memory=case.memory)
        ours, *others = fitted.predictions
        measured = step(fitted)
        found = {other.name: step(other.name) for other in others}
    best = min(found, key=lambda other: found[other])
    errors = [1e6 * ours.seconds / measured]
    errors += [1e6 * other.seconds / found[other.name] for other in others]
    worst = max(errors, key=lambda ratio: abs(ratio - 1))
    missed = [f"{name}: predicted {worst:.3f} of a measured time"] * (abs(worst - 1) > OFF)
    missed += [f"{name}: slower than {best}"] * (measured > found[best] * 1.001)
    kept = ", ".join(f"{count:g}" for count in ours.kept)
    cells = f"{measured:.0f}", kept, best, f"{found[best]:.0f}", f"{found[best] / measured:.3f}"
    return Row((name, *cells, f"{worst:.3f}"), tuple(missed))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a wait was missing, or under ``--check`` a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(), "Simulated GPUs: nothing here was measured on one.", sep="\n", end="\n\n")
    table = [row(name, case) for name, case in CASES.items()]
    columns = ("case", "fitted us", "kept", "best named", "us", "speed-up", "worst prediction")
    missed = report("simulated, steps under fitted schedules", columns, table)
    return verdict(missed, check=arguments.check, reports=GPUS.reports())


if __name__ == "__main__":
    sys.exit(main())
