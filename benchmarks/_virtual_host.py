"""Measures steps limited by the host, where each launch costs time of the single host.

Python launches everything, one thread at a time. So launches from all threads add up on one clock,
and no operation starts before its launch. The time of the runtimes' own Python code is not
included; ``overhead.py`` measures that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from _measure import Row
from _virtual import GPUS, PLAIN, Way, by_autograd, measure
from _virtual_models import WORKLOADS
from torch import nn

__all__ = ["COLUMNS", "launch_us", "table"]

LAYERS, ATTEMPTS = 50, 20
CASES = ((2, 4), (4, 4), (4, 8))  # n, m
WAYS = (
    PLAIN, Way("torchgpipe"), Way("pipert"), Way("pipert", schedule="1f1b"),
)  # fmt: skip
COLUMNS = (
    *("case", "host, us", "plain", "torchgpipe", "pipert", "1f1b", "launches of plain"),
    *("of pipert", "host alone"),
)


def launch_us() -> float:
    """Measures the host's microseconds per operation, with tiny layers, forward and backward.

    A launch on the CPU, which every machine has, stands for a launch on a GPU. The shortest time
    counts, since the machine may have other work. A simulated device counts the operations.
    """
    module = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(LAYERS)])
    x = torch.zeros(1, 4)
    seconds = []
    for _ in range(ATTEMPTS):
        begin = perf_counter()
        by_autograd(module, x)
        seconds.append(perf_counter() - begin)
    module, x = module.to("cuda:0"), x.to("cuda:0")
    by_autograd(module, x)
    before = GPUS.counts()["operations"]
    by_autograd(module, x)
    return 1e6 * min(seconds) / (GPUS.counts()["operations"] - before)


def table(
    host_us: float, repeats: int, step: Callable[[], object], *, short: bool
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measures AmoebaNet-D's milliseconds per step, with free launches and at ``host_us`` each."""
    workload = WORKLOADS["amoebanet"]
    rows, found = [], []
    for n, m in CASES[-1:] if short else CASES:
        case = workload.case(n, m)
        for cost in (0.0, host_us):
            machine = replace(workload.rates(), host_us=cost)
            took = {}
            for way in WAYS:
                took[way] = measure(case, way, machine, repeats)
                step()
            ours = took[Way("pipert")].launches
            medians = (f"{steps.median:.1f}" for steps in took.values())
            cells = (f"n={n} m={m}", f"{cost:.1f}", *medians)
            counts = (str(took[PLAIN].launches), str(ours), f"{1e-3 * cost * ours:.1f}")
            rows.append(Row((*cells, *counts)))
            milliseconds = {str(way): steps.each for way, steps in took.items()}
            launches = {str(way): steps.launches for way, steps in took.items()}
            found.append({"n": n, "m": m, "host_us": cost, "steps_ms": milliseconds,
                          "launches": launches})  # fmt: skip
    return rows, found
