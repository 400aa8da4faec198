"""Checks the simulator: compares its predictions with whole steps in virtual time.

The experiments predict the time of a pipeline of the paper's size from the times of its layers
(``_simulator.py``). This script predicts small models in the same way, and then runs a step of
pipert on simulated GPUs of the same speed (``_virtual.py``). Times of layers and of steps are both
virtual, so this machine's load affects neither: a ratio other than 1 means that a rule of the
simulator is missing or wrong. The simulator models neither the loss, nor work outside layers such
as summing gradients, nor delays by the host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]

from _virtual import GPUS, Way, measure  # noqa: E402

# isort: split
import torch  # noqa: E402
from _ablation import ALL, Components  # noqa: E402
from _measure import Row, header, report, verdict  # noqa: E402
from _paper import Setting  # noqa: E402
from _predict import Link, predict  # noqa: E402
from _virtual_models import WORKLOADS  # noqa: E402

__all__ = ["main"]

BAR = 0.05  # the largest permitted error, as a fraction of the simulated step


@dataclass(frozen=True)
class Compared:
    """A step that is predicted and run."""

    model: str
    n: int
    m: int
    mode: str
    link: float = 1.0
    """A factor for the rate of the machine's links."""
    rows: int | None = None
    """The samples in the mini-batch, if not the workload's."""
    components: Components = ALL

    def __str__(self) -> str:
        without = "" if self.components.direct_skips else ", without direct skips"
        links = "" if self.link == 1 else f", links {self.link:g} times as fast"
        return f"{self.model}, n={self.n} m={self.m}, {self.mode}{links}{without}"


CASES = (
    *(Compared("sleeping", 8, 16, mode) for mode in ("never", "except_last", "always")),
    *(Compared("linears", 4, 8, mode) for mode in ("never", "except_last", "always")),
    Compared("linears", 8, 32, "never"),
    Compared("linears", 4, 16, "never", link=0.25),
    Compared("linears", 4, 16, "always", link=0.25),
    *(Compared("convolutions", 4, 8, mode) for mode in ("never", "except_last")),
    *(Compared("gpt", 4, 8, mode) for mode in ("never", "except_last")),
    # With fewer samples the gradients of its weights, which are added up, weigh too much.
    *(Compared("unet", 4, 8, mode, rows=64) for mode in ("never", "except_last")),
    Compared("unet", 4, 8, "except_last", rows=64, components=Components(direct_skips=False)),
)
SHORT = tuple(case for case in CASES if case.model in ("sleeping", "linears") and case.m <= 16)


def compare(case: Compared, bar: float) -> Row:
    """Measures and predicts the milliseconds of a step."""
    workload = WORKLOADS[case.model]
    workload = replace(workload, rows=case.rows or workload.rows)
    machine = replace(workload.rates(), link_gbps=case.link * workload.rates().link_gbps)
    run = workload.case(case.n, case.m)
    way = Way("pipert", case.mode, components=case.components)
    ran = measure(run, way, machine, 1).median
    setting = Setting(case.model, case.n, workload.rows, case.m, checkpoint=case.mode)
    found = predict(
        *(setting, run.balance, workload.times(), workload.bytes()),
        Link(1e9 * machine.link_gbps, 0.0),
        direct_skips=case.components.direct_skips,
    )
    predicted = 1e3 * found.simulation.seconds
    ratio = predicted / ran
    missed = (f"{case}: predicted {ratio:.3f} of the step",) * (abs(ratio - 1) > bar)
    return Row((str(case), f"{ran:.3f}", f"{predicted:.3f}", f"{ratio:.3f}"), missed)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a wait was missing, or under ``--check`` a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--short", action="store_true", help="fewer cases, for CI")
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies the bar")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(header(), "Simulated GPUs: nothing here was measured on one.", sep="\n", end="\n\n")
    table = [compare(case, BAR * arguments.slack) for case in (SHORT if arguments.short else CASES)]
    columns = ("case", "simulated step", "predicted", "ratio")
    missed = report(f"Predicted and simulated, milliseconds, bar ±{BAR:.2f}", columns, table)
    return verdict(missed, check=arguments.check, reports=GPUS.reports())


if __name__ == "__main__":
    sys.exit(main())
