"""Whether the simulator is right, where that can be measured: on CPU.

The other commands predict, from the times of single layers, what a pipeline takes on devices that
are not there. Here both are there. Each row compares the seconds of a call, and of a call and its
backward, with what ``_simulator.py`` predicts for it.

**Sleeping stages.** Eight partitions, 16 micro-batches. A forward sleeps ``T``, a backward ``2 T``,
and each notes how long that took, so that the prediction is about the order of the tasks alone.

**Convolutions.** Two partitions of a real model on two workers. The durations come from elsewhere:
between two steps of the pipe the partitions are run by themselves. *in company*: both at once, in a
thread each, for the forward. *alone*: one after the other in one thread, for the backward, which
on CPU runs in one thread for all partitions, and for recomputation. A forward predicted from times
alone stands beside it: two cores share caches, memory and clock, so it comes out too fast.

Durations and steps take turns, and what counts is the ratio of the medians.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import torch
from _measure import Row, report, rows, start
from _simulator import Plan, Seconds, Simulation, Transfer, checkpointed, simulate
from torch import Tensor, nn

from pipert import Pipe

__all__ = ["main"]

BAR = 0.05  # of the measured time
N, M = 8, 16
T = 0.02
BALANCE = [4, 5]  # of the convolutions
CHANNELS, SIDE, ROWS, CHUNKS = 64, 16, 4, 8  # rows are those of a micro-batch

Noted = dict[str, list[list[float]]]  # of each kind, of each partition, in the order of its tasks


class Sleep(nn.Module):
    """Sleeps in forward and backward, and notes for how long."""

    def __init__(self, noted: Noted, j: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.noted = {kind: of_kind[j] for kind, of_kind in noted.items()}

    def forward(self, x: Tensor) -> Tensor:
        _sleep(T, self.noted["forward"])
        y: Tensor = _SleepBack.apply(x + self.weight, self.noted)  # type: ignore[no-untyped-call]
        return y


class _SleepBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: dict[str, list[float]]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _sleep(2 * T, ctx.noted["backward"])
        return grad, None


def _sleep(seconds: float, noted: list[float]) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    noted.append(time.perf_counter() - begin)


def chain(
    m: int, n: int, forward: Seconds, recompute: Seconds, backward: Seconds, mode: str
) -> Simulation:
    """A pipeline on CPU."""
    transfers = [Transfer(j, j + 1, 0) for j in range(n - 1)]
    kept = checkpointed(mode, m)
    return simulate(Plan(m, n, forward, recompute, backward, kept, transfers, machine="cpu"))


def step(pipe: nn.Module, batch: Tensor) -> tuple[float, float]:
    """Seconds of the call, and of the call and its backward."""
    begin = time.perf_counter()
    out = pipe(batch)
    middle = time.perf_counter()
    out.sum().backward()
    return middle - begin, time.perf_counter() - begin


def sleeping(repeats: int, bar: float) -> list[Row]:
    """Measured, and predicted from the durations that were noted in the same step."""
    noted: Noted = {kind: [[] for _ in range(N)] for kind in ("forward", "backward")}

    def once() -> list[tuple[float, float]]:
        for lists in noted.values():
            for durations in lists:
                durations.clear()
        measured = step(pipe, torch.zeros(M, 1))
        forward, backward = noted["forward"], noted["backward"]
        predicted = chain(
            *(M, N),
            lambda i, j: forward[j][i],
            lambda i, j: 0.0,
            lambda i, j: backward[j][M - 1 - i],  # the last micro-batch first
            "never",
        )
        found = (predicted.forward_seconds, predicted.seconds)
        return list(zip(measured, found, strict=True))

    stages = nn.Sequential(*(Sleep(noted, j) for j in range(N)))
    pipe = Pipe(stages, [1] * N, devices=["cpu"] * N, chunks=M, checkpoint="never")
    with closing(pipe):
        pipe(torch.zeros(M, 1))  # to warm up
        steps = [once() for _ in range(repeats)]
    return compare(f"sleeping, n={N} m={M}", steps, bar)


def convolutions() -> nn.Sequential:
    """Nine layers of a size that a core takes milliseconds for."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(9)))


def alone(parts: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Median seconds of forward and backward of each partition: all forwards, then back."""
    found = []
    for j, part in enumerate(parts):
        starts = [x.clone().requires_grad_(j > 0) for x in inputs]
        outputs, forward = zip(*[_timed(partial(part, x)) for x in starts], strict=True)
        grad = torch.ones_like(outputs[0])
        _, backward = zip(*[_timed(partial(y.backward, grad)) for y in outputs[::-1]], strict=True)
        found.append((median(forward), median(backward)))
    return found


def in_company(
    parts: Sequence[nn.Module], inputs: Sequence[Tensor], *, keeping: bool
) -> list[float]:
    """Median seconds of the forward of each partition while all of them run, in threads.

    What it keeps for the backward counts: memory that is not used again has to be found anew.
    """
    together = threading.Barrier(len(parts))
    ends: list[list[float]] = [[] for _ in parts]
    outputs: list[Tensor] = []

    def run(j: int) -> None:
        torch.set_num_threads(1)
        starts = [x.clone().requires_grad_(j > 0) for x in inputs]
        if not keeping:
            with torch.no_grad():
                parts[j](starts[0])  # memory that the thread will use again
        together.wait()
        ends[j].append(time.perf_counter())
        with torch.set_grad_enabled(keeping):
            for x in starts:
                outputs.append(parts[j](x))
                ends[j].append(time.perf_counter())

    threads = [threading.Thread(target=run, args=(j,)) for j in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over = min(times[-1] for times in ends)
    # Of a thread that was late, because the machine is busy, at least the first.
    steps = [list(zip(times, times[1:])) for times in ends]
    return [median(b - a for a, b in of if b <= over or (a, b) == of[0]) for of in steps]


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


def convolving(mode: str, repeats: int, bar: float) -> list[Row]:
    """Measured, and predicted from the durations of the partitions by themselves."""
    module = convolutions()
    inputs = [torch.randn(ROWS, CHANNELS, SIDE, SIDE) for _ in range(CHUNKS)]
    parts = [module[: BALANCE[0]], module[BALANCE[0] :]]

    def once() -> tuple[list[tuple[float, float]], float]:
        by_themselves = alone(parts, inputs)
        forward = in_company(parts, inputs, keeping=mode == "never")
        measured = step(pipe, torch.cat(inputs))
        lonely = partial(_of_partition, [seconds for seconds, _ in by_themselves])
        backward = partial(_of_partition, [seconds for _, seconds in by_themselves])
        size = (CHUNKS, len(parts))
        found = chain(*size, partial(_of_partition, forward), lonely, backward, mode)
        too_fast = chain(*size, lonely, lonely, backward, mode).forward_seconds
        pairs = zip(measured, (found.forward_seconds, found.seconds), strict=True)
        return list(pairs), too_fast / measured[0]

    devices = ["cpu"] * len(parts)
    pipe = Pipe(module, BALANCE, devices=devices, chunks=CHUNKS, checkpoint=mode)
    with closing(pipe):
        steps = [once() for _ in range(repeats + 1)][1:]
    case = f"convolutions, n={len(parts)} m={CHUNKS}, {mode}"
    table = compare(case, [pairs for pairs, _ in steps], bar)
    ratio = median(ratio for _, ratio in steps)
    return [*table, Row((f"{case}, forward, alone", "", "", f"{ratio:.3f}", ""))]


def _of_partition(seconds: Sequence[float], i: int, j: int) -> float:
    return seconds[j]


def compare(case: str, steps: Sequence[Sequence[tuple[float, float]]], bar: float) -> list[Row]:
    """A row for the forward and one for the whole step, in milliseconds."""
    table = []
    for phase, pairs in zip(("forward", "forward+backward"), zip(*steps, strict=True), strict=True):
        measured, predicted = (1e3 * median(column) for column in zip(*pairs, strict=True))
        ratio = predicted / measured
        name = f"{case}, {phase}"
        missed = (f"{name}: predicted {ratio:.3f} of the measured",) * (abs(ratio - 1) > bar)
        cells = (name, f"{measured:.1f}", f"{predicted:.1f}", f"{ratio:.3f}", f"±{bar:.2f}")
        table.append(Row(cells, missed))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. 1 when ``--check`` was asked for and a bar was missed."""
    arguments = start(argv, __doc__)
    bar = BAR * arguments.slack
    cases: list[Callable[[], list[Row]]] = [partial(sleeping, 1 if arguments.short else 5, bar)]
    for mode in ("never", "except_last"):
        cases.append(partial(convolving, mode, 5 if arguments.short else 15, bar))
    table = [row for case in cases for row in rows(case, check=arguments.check)]
    columns = ("case", "measured", "predicted", "ratio", "bar")
    held = report("Predicted and measured, milliseconds", columns, table)
    return int(arguments.check and not held)


if __name__ == "__main__":
    sys.exit(main())
