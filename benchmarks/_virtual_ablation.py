"""Measures what each part of the runtime is worth in virtual time: the paper's section 4.1.

The parts are switched on one after the other, in torchgpipe and in pipert. torchgpipe always sends
skips straight to the partition that pops them, so it has no fourth row.

Without copy streams, copies lie between the computations in the order in which the host's threads
launch them. So the first two rows depend on thread timing, and are medians of more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from _ablation import PARTS
from _measure import Row
from _paper import ABLATION
from _virtual import PLAIN, Machine, Steps, Way, measure
from _virtual_models import WORKLOADS, Workload

__all__ = ["ABLATIONS", "COLUMNS", "Ablation", "table"]

N = 4
MORE = 3  # times as many steps in the rows that depend on thread timing

COLUMNS = (
    *("parts", "paper", "torchgpipe", "pipert", "torchgpipe/plain", "pipert/plain"),
    *("spread", "spread of pipert"),
)


@dataclass(frozen=True)
class Ablation:
    """A workload to measure with each of the parts."""

    workload: Workload
    m: int
    mode: str
    link_gbps: float | None = None
    """The rate of the links, if it differs from the workload's machine."""

    @property
    def machine(self) -> Machine:
        """The simulated machine."""
        rates = self.workload.rates()
        return rates if self.link_gbps is None else replace(rates, link_gbps=self.link_gbps)

    def __str__(self) -> str:
        return f"{self.workload.name}, n={N} m={self.m}, {self.mode}"


ABLATIONS = (
    Ablation(WORKLOADS["linears"], 8, "always", 12),
    Ablation(WORKLOADS["linears"], 16, "always", 3),
    Ablation(WORKLOADS["unet"], 8, "except_last"),
)


def table(
    ablation: Ablation, repeats: int, step: Callable[[], object]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measures a row for each part; calls ``step`` after each row. Returns rows and figures."""
    plain = measure(ablation.workload.case(N, ablation.m), PLAIN, ablation.machine, 1)
    firsts: dict[str, Steps] = {}
    rows, found = [], []
    for name, took in _steps(ablation, repeats):
        for runtime, steps in took.items():
            firsts.setdefault(runtime, steps)
        speed_up = next(setting.speed_up for setting in ABLATION if setting.name == name)
        rows.append(Row((name, f"{speed_up:.2f}", *_cells(took, firsts, plain))))
        milliseconds = {runtime: steps.each for runtime, steps in took.items()}
        found.append({"case": str(ablation), "parts": name, "steps_ms": milliseconds})
        step()
    return rows, found


def _steps(ablation: Ablation, repeats: int) -> Iterator[tuple[str, dict[str, Steps]]]:
    case = ablation.workload.case(N, ablation.m)
    skips = ablation.workload is WORKLOADS["unet"]
    for name, components in PARTS.items():
        if name == "+ direct skips" and not skips:
            return
        took = {}
        for runtime in ("torchgpipe", "pipert"):
            if runtime == "pipert" or name != "+ direct skips":
                way = Way(runtime, ablation.mode, components=components)
                count = repeats if components.copy_streams else MORE * repeats
                took[runtime] = measure(case, way, ablation.machine, count)
        yield name, took


def _cells(took: dict[str, Steps], firsts: dict[str, Steps], plain: Steps) -> Iterator[str]:
    for base in (firsts, dict.fromkeys(firsts, plain)):
        for runtime in ("torchgpipe", "pipert"):
            steps = took.get(runtime)
            yield f"{base[runtime].median / steps.median:.2f}" if steps else "-"
    for runtime in ("torchgpipe", "pipert"):
        yield f"{took[runtime].spread:.0%}" if runtime in took else "-"
