"""Measures how much measured costs vary, and how close balances come to the optimum.

**Steadiness.** Both products measure the same model on the CPU repeatedly and alternately, with the
same time budget. The *spread* of a layer is the range of its cost over its median. Costs are shares
of the whole model, since only the shares determine the balance. The table has the median spread
over the layers and the largest; *balances* is the number of different results.

**Optimum.** The longest block of a balance over the shortest possible, for random lists of costs:
uniform, heavy-tailed and growing. pipert's ratio must be 1. The shortest possible comes from a
program that shares nothing with the library: dynamic programming over all first blocks.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean, median

import torch
from _measure import Row, report, rows, start, take_turns, verdict
from torch import nn
from torchgpipe.balance import blockpartition
from torchgpipe.balance.profile import profile_times

from pipert.balance import balance_by_cost, layer_times

__all__ = ["main"]

PARTITIONS = 4
SECONDS = 1.0


def model() -> nn.Sequential:
    """Builds twelve layers whose costs differ by more than a factor of ten."""
    layers: list[nn.Module] = []
    for channels in (8, 16, 24):
        layers += [nn.LazyConv2d(channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    module = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(64), nn.Linear(64, 10))
    module(batch())
    return module


def batch() -> torch.Tensor:
    """Draws a micro-batch of small images."""
    return torch.randn(16, 3, 32, 32)


def theirs(costs: Sequence[float]) -> list[int]:
    """Returns torchgpipe's balance for these costs."""
    blocks: list[list[float]] = blockpartition.solve(list(costs), PARTITIONS)  # type: ignore
    return [len(block) for block in blocks]


def steadiness(repeats: int) -> list[Row]:
    """Measures the costs repeatedly; returns a row for each product."""
    module, sample = model(), batch()
    measures: dict[str, Callable[[], list[float]]] = {
        "pipert": lambda: layer_times(module, sample, timeout=SECONDS, device="cpu"),
        "torchgpipe": lambda: list(
            map(float, profile_times(module, sample, SECONDS, torch.device("cpu")))
        ),
    }
    found = take_turns(lambda name: measures[name](), list(measures), repeats=repeats, warm_up=0)
    table = []
    for name, costs in found.items():
        shares = [[cost / sum(row) for cost in row] for row in costs]
        columns = list(zip(*shares, strict=True))
        spreads = [(max(column) - min(column)) / median(column) for column in columns]
        solve = theirs if name == "torchgpipe" else lambda c: balance_by_cost(c, PARTITIONS)
        balances = {tuple(solve(row)) for row in costs}
        cells = (name, f"{median(spreads):.0%}", f"{max(spreads):.0%}", str(len(balances)))
        table.append(Row(cells))
    return table


def shortest(costs: Sequence[int], partitions: int) -> int:
    """Returns the length of the longest block in the best balance."""

    @cache
    def rest(begin: int, left: int) -> int:
        if left == 1:
            return sum(costs[begin:])
        ends = range(begin + 1, len(costs) - left + 2)
        return min(max(sum(costs[begin:end]), rest(end, left - 1)) for end in ends)

    return rest(0, partitions)


def longest(costs: Sequence[int], balance: Sequence[int]) -> int:
    """Returns the length of the longest block of a balance."""
    ends = [sum(balance[: j + 1]) for j in range(len(balance))]
    return max(sum(costs[end - b : end]) for end, b in zip(ends, balance, strict=True))


def optimum(lists: int) -> list[Row]:
    """Compares both products' balances of random costs with the best."""
    numbers = random.Random(0)
    kinds: list[Callable[[int], int]] = [
        lambda k: numbers.randint(1, 100),
        lambda k: int(numbers.paretovariate(1.2) * 10),
        lambda k: (k + 1) * numbers.randint(1, 10),
    ]
    ratios: dict[str, list[float]] = {"pipert": [], "torchgpipe": []}
    for number in range(lists):
        costs = [kinds[number % 3](k) for k in range(24)]
        best = shortest(costs, PARTITIONS)
        ours = longest(costs, balance_by_cost(costs, PARTITIONS))
        ratios["pipert"].append(ours / best)
        ratios["torchgpipe"].append(longest(costs, theirs(costs)) / best)
    missed = ("a balance of pipert's is not the best",) if max(ratios["pipert"]) > 1 else ()
    return [
        Row((name, f"{mean(r):.3f}", f"{max(r):.3f}"), missed if name == "pipert" else ())
        for name, r in ratios.items()
    ]


def large() -> list[Row]:
    """Measures the seconds for a balance of 1000 layers on 8 devices."""
    numbers = random.Random(0)
    costs = [numbers.random() for _ in range(1000)]
    speeds = [numbers.uniform(0.5, 2.0) for _ in range(8)]
    table = []
    for case, given in (("equal devices", None), ("devices of 8 speeds", speeds)):
        begin = time.perf_counter()
        balance_by_cost(costs, 8, speeds=given)
        took = time.perf_counter() - begin
        missed = (f"{case}: {took:.1f} s, the bar is 1 s",) if took > 1 else ()
        table.append(Row((case, f"{took:.3f}"), missed))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    table = steadiness(3 if arguments.short else 15)
    title = f"Costs of {len(model())} layers, measured for {SECONDS:.0f} s each time"
    columns = ("", "median spread", "largest spread", "balances")
    report(title, columns, table)
    title = f"Longest block over the shortest possible, 24 layers, {PARTITIONS} partitions"
    missed = report(title, ("", "mean", "worst"), optimum(60))
    title = "A balance of 1000 layers on 8 devices, seconds"
    missed += report(title, ("", "seconds"), rows(large, check=arguments.check))
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
