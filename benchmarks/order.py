"""Measures how close a forward comes to the critical path of its own tasks.

Every partition is one layer that sleeps and returns its input, so the tasks need no core and only
their order counts. ``F[i,j]`` can start when ``F[i,j-1]`` has produced its input and its worker is
done with ``F[i-1,j]``. The longest path through that grid is the *critical path*: no runtime with
one worker per partition is faster.

**Equal** stages all sleep ``T`` seconds, so the nominal path is ``(m + n - 1) * T``. **Varying**
stages draw ``F[i,j]`` uniformly from ``T * (1 - 0.9)`` to ``T * (1 + 0.9)``, with a fixed seed.

A sleep overruns by the slack of the operating system's timers, for which the runtime is not to
blame. So every sleep records its real duration, and pipert's wall time is compared with the
critical path of *those* durations, call by call; the table shows the median ratio. A thread's wait
for Python's global lock after its sleep counts as part of its duration, so the *nominal* path, of
the requested durations, is shown as well.

*by diagonal* is the time of a runtime that completes each diagonal ``i + j == k`` before it starts
the next one, with one worker per partition and no overhead: the sum, over the diagonals, of the
recorded duration of their longest task. torchgpipe works like that, and also serves all CPU
partitions with one thread. Its column shows the effect of both.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from _measure import Row, both, medians, report, rows, start, take_turns, verdict
from torch import Tensor, nn

from pipert.schedules.plan import plan_call
from pipert.schedules.simulate import simulate

__all__ = ["main"]

BAR = 1.08  # the highest permitted ratio to the critical path
N, M = 8, 32
T = 0.005
VARIATION = 0.9


class Sleep(nn.Module):
    """A layer that sleeps ``plan[i]`` seconds in its call ``i`` and records the real duration."""

    def __init__(self, plan: Sequence[float]) -> None:
        super().__init__()
        self.plan = plan
        self.noted: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        time.sleep(self.plan[len(self.noted)])
        self.noted.append(time.perf_counter() - begin)
        return x


def plan(variation: float) -> list[list[float]]:
    """Draws the seconds of each ``F[i,j]``: a list of ``M`` for each of ``N`` partitions."""
    numbers = random.Random(0)
    return [[T * (1 + numbers.uniform(-variation, variation)) for _ in range(M)] for _ in range(N)]


def critical_path(durations: Sequence[Sequence[float]]) -> float:
    """Returns the longest path; each task follows its predecessors in micro-batch and partition."""
    n, m = len(durations), len(durations[0])
    times = simulate(plan_call(m, n, range(n)), lambda action: durations[action.j][action.i])
    return max(end for _, end in times.values())


def by_diagonal(durations: Sequence[Sequence[float]]) -> float:
    """Sums the longest task of each diagonal."""
    n, m = len(durations), len(durations[0])
    return sum(
        max(durations[j][k - j] for j in range(max(0, k - m + 1), min(n, k + 1)))
        for k in range(n + m - 1)
    )


def order(case: str, variation: float, repeats: int) -> list[Row]:
    """Measures a forward's wall time beside its critical path, in milliseconds."""
    batch = torch.zeros(M, 1)
    durations = plan(variation)

    def build() -> nn.Sequential:
        return nn.Sequential(*(Sleep(partition) for partition in durations))

    def measure(name: str) -> tuple[float, float, float, float]:
        sleeps = [layer for layer in runners[name].modules() if isinstance(layer, Sleep)]
        for sleep in sleeps:
            sleep.noted.clear()
        begin = time.perf_counter()
        runners[name](batch)
        wall = time.perf_counter() - begin
        noted = [sleep.noted for sleep in sleeps]
        assert [len(partition) for partition in noted] == [M] * N
        path = critical_path(noted)
        return wall, path, by_diagonal(noted), wall / path

    with both(build, N, chunks=M, checkpoint="never") as runners:
        samples = take_turns(measure, tuple(runners), repeats=repeats, warm_up=1)
    wall, path, diagonal, ratio = medians(samples["pipert"])
    peer = median(sample[0] for sample in samples["torchgpipe"])
    missed = (f"{case}: {ratio:.3f} of the critical path, the bar is {BAR}",) if ratio > BAR else ()
    milliseconds = (critical_path(durations), path, wall, diagonal, peer)
    nominal, *others = (f"{1e3 * seconds:.1f}" for seconds in milliseconds)
    cells = (case, nominal, *others[:2], f"{ratio:.3f}", f"{BAR:.2f}", *others[2:])
    return [Row(cells, missed)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    table: list[Row] = []
    for case, variation in (("equal", 0.0), (f"varying by {VARIATION:.0%}", VARIATION)):
        measure = partial(order, case, variation, 3 if arguments.short else 11)
        table += rows(measure, check=arguments.check)
    columns = (
        *("stages", "nominal path", "critical path", "pipert", "pipert/critical", "bar"),
        *("by diagonal", "torchgpipe"),
    )
    title = f"Forward of sleeping layers, n={N} m={M}, T={1e3 * T:.0f} ms, milliseconds"
    return verdict(report(title, columns, table), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
