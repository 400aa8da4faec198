"""Measures how much faster a step of a pipe is than one of the plain module on one device.

The plain module takes the whole mini-batch on the first device, so it has the larger kernels. All
ways take turns, and the median of each counts. The ideal is that of ``n`` equal devices and free
copies: ``m * n / (m + n - 1)`` (section 2.1 of the paper).

Nothing here can be right or wrong: devices may differ, links be slow, the machine busy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from pipert.check.finding import REPORTED, Finding
from pipert.check.models import Case
from pipert.check.ways import CALL, NEVER, Devices, Way, step

__all__: list[str] = []

PLAIN = "plain module"


def check(devices: Devices, case: Case, rounds: int) -> Iterator[Finding]:
    """Measures each way once a round, after one to warm up."""
    first = devices.partitions[0]
    plain, target = copy.deepcopy(case.layers).to(first), case.target.to(first)
    with devices.trial(case) as trial:
        steps: dict[str, Callable[[], object]] = {
            PLAIN: lambda: step(plain, trial.x, target),
            **{str(way): partial(trial.step, way) for way in (*NEVER, Way(CALL, "except_last"))},
        }
        taken = {name: [devices.timed(one)] for name, one in steps.items()}
        for _ in range(rounds):
            for name, one in steps.items():
                taken[name].append(devices.timed(one))
    times = {name: median(seconds[1:]) for name, seconds in taken.items()}
    m, n = case.chunks, devices.n
    yield Finding("time of a step", REPORTED, f"{1e3 * times[PLAIN]:.1f} ms, {PLAIN} on {first}")
    for name, seconds in times.items():
        if name != PLAIN:
            seen = f"{times[PLAIN] / seconds:.2f} ({1e3 * seconds:.1f} ms)"
            yield Finding(f"speed-up of {name}", REPORTED, seen)
    ideal = f"{m * n / (m + n - 1):.2f} on {n} equal devices, without recomputation"
    yield Finding("ideal speed-up", REPORTED, ideal)
