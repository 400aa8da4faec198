"""Compares ``pipe.forward_backward`` with ``loss.backward()`` and with other runtimes.

**Convolutions.** There are nine, with 32 channels of 64x64; a mini-batch of 32 rows is in 8
micro-batches on two partitions. Eight runtimes take turns: the plain module in one thread,
torchgpipe in its three modes, ``Schedule1F1B`` of ``torch.distributed.pipelining`` in two processes
over gloo, and pipert with ``loss.backward()`` (*autograd*), with ``'gpipe'`` and with ``'1f1b'``.
All have one intra-op thread per worker. Half of the plain time times ``(m + n - 1) / m`` is what
two cores could reach with equal partitions and no overhead.

**Sleeping stages** sleep ``T`` forward and ``2T`` backward, so that no core is needed and only the
order counts: with equal stages no schedule of whole tasks ends before ``(m + n - 1) * 3T``, and
both schedules could end then. With *autograd* one thread runs the backward of all partitions. With
``'interleaved'`` sixteen such stages are on four workers, in one, two or four partitions each; none
ends before ``(m + (n - 1) / v) * 4 * 3T``.

**Live activations.** Each output of a layer is a storage that its backward needs. Whenever a layer
returns, the live storages of all partitions are counted, and the C library's allocated memory is
read (``_malloc.py``), which includes gradients in transit. With ``'1f1b'`` partition *j* may keep
``min(n - j, m)`` micro-batches, however many there are.

**Host cost** is measured as in ``overhead.py``: partitions of one ``nn.Linear(4, 4)``, one row for
each micro-batch, microseconds for each of the ``n * m`` pairs of a forward and a backward.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from _malloc import bytes_in_use, check_counter
from _measure import Row, report, rows, start, take_turns, verdict
from _schedule1f1b import BALANCE, CHUNKS, TORCHS, batch, convolutions, processes
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torchgpipe import GPipe

from pipert import Pipe

__all__ = ["main"]

# The bars: the highest permitted ratios.
OF_TORCHGPIPE, OF_PROCESSES, OF_IDEAL = 0.6, 0.9, 1.1  # to the times of the other runtimes
OF_NOMINAL = 1.06  # to (m + n - 1) * 3T

N, M = 8, 32  # sleeping stages and their micro-batches
T = 0.02
WORKERS, IN_TURNS = 4, (1, 2, 4)  # workers, and partitions on each of them

WAYS = ("autograd", "gpipe", "1f1b")
MODES = ("never", "except_last", "always")
BLOCKS, ROWS, WIDTH = 3, 256, 256  # (Linear, GELU) in a partition, rows of a micro-batch

Step = Callable[[], Any]
Timed = Callable[[], tuple[float, float]]


def step_of(pipe: Pipe, way: str, x: Tensor, target: Tensor) -> Step:
    """Makes a function that takes a step of a pipe and returns the loss."""
    if way != "autograd":
        return partial(
            pipe.forward_backward, x, target=target, loss_fn=functional.mse_loss, schedule=way
        )
    return partial(by_autograd, pipe, x, target)


def by_autograd(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Takes a step of any model with ``loss.backward()``; returns the loss."""
    loss = functional.mse_loss(model(x), target)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def timed(step: Step) -> tuple[float, float]:
    """Takes a step; returns its seconds and the loss."""
    begin = time.perf_counter()
    loss = step()
    return time.perf_counter() - begin, float(loss)


# Convolutions -------------------------------------------------------------------------------------


@contextmanager
def runtimes() -> Iterator[dict[str, Timed]]:
    """Yields a function per runtime, by name, that takes a step and returns seconds and loss."""
    x, target = batch()
    devices = ["cpu"] * len(BALANCE)
    found: dict[str, Timed] = {}
    models: list[nn.Module] = []
    with ExitStack() as stack:

        def add(name: str, model: nn.Module, step: Step) -> None:
            models.append(model)
            found[name] = partial(timed, step)

        plain = convolutions()
        add("plain, one thread", plain, partial(by_autograd, plain, x, target))
        for mode in MODES:
            peer = GPipe(
                convolutions(), BALANCE, devices=devices, chunks=CHUNKS, checkpoint=mode
            )
            add(f"torchgpipe, {mode}", peer, partial(by_autograd, peer, x, target))
        found["Schedule1F1B, two processes"] = partial(stack.enter_context(processes()), TORCHS)
        for way in WAYS:
            pipe = Pipe(
                convolutions(), BALANCE, devices=devices, chunks=CHUNKS, checkpoint="never"
            )
            stack.enter_context(closing(pipe))
            add(f"pipert, {way}", pipe, step_of(pipe, way, x, target))
        yield {name: partial(_afresh, models, step) for name, step in found.items()}


def _afresh(models: Sequence[nn.Module], step: Timed) -> tuple[float, float]:
    for model in models:
        model.zero_grad()
    return step()


def convolving(repeats: int, slack: float) -> list[Row]:
    """Measures milliseconds per step of each runtime, and pipert's default relative to each."""
    with runtimes() as steps:
        samples = take_turns(lambda name: steps[name](), tuple(steps), repeats=repeats, warm_up=1)
    losses = [loss for found in samples.values() for _, loss in found]
    assert max(losses) - min(losses) < 1e-4, "they do not compute the same"
    seconds = {name: median(took for took, _ in found) for name, found in samples.items()}
    ours, plain = seconds["pipert, 1f1b"], seconds["plain, one thread"]
    n = len(BALANCE)
    seconds["half of plain, by (m+n-1)/m"] = plain / n * (CHUNKS + n - 1) / CHUNKS
    best = min((name for name in seconds if name.startswith("torchgpipe")), key=seconds.__getitem__)
    bars = {
        best: OF_TORCHGPIPE,
        "Schedule1F1B, two processes": OF_PROCESSES,
        "half of plain, by (m+n-1)/m": OF_IDEAL,
    }
    table = []
    for name, took in seconds.items():
        ratio, bar = ours / took, bars.get(name, 0.0) * slack
        missed = (f"1f1b takes {ratio:.2f} of {name}, the bar is {bar:.2f}",) * (0 < bar < ratio)
        cells = (name, f"{1e3 * took:.0f}", f"{took / plain:.2f}", f"{ratio:.2f}")
        table.append(Row((*cells, f"{bar:.2f}" if bar else ""), missed))
    return table


# Sleeping stages ----------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """Sleeps ``T`` seconds forward and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(T)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * T)
        return grads[0], grads[0].sum()


class Stage(nn.Module):
    """A partition that only sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


def sleeping(repeats: int, slack: float) -> list[Row]:
    """Measures milliseconds per step of each schedule, relative to the shortest possible."""
    x, target = torch.zeros(M, 1), torch.zeros(M, 1)
    stages = nn.Sequential(*(Stage() for _ in range(N)))
    with closing(
        Pipe(stages, [1] * N, devices=["cpu"] * N, chunks=M, checkpoint="never")
    ) as pipe:
        steps = {way: step_of(pipe, way, x, target) for way in WAYS}
        samples = take_turns(lambda way: timed(steps[way])[0], WAYS, repeats=repeats, warm_up=1)
    shortest, table = (M + N - 1) * 3 * T, []
    for way in WAYS:
        took = median(samples[way])
        ratio, bar = took / shortest, 1 + (OF_NOMINAL - 1) * slack
        is_ours = way != "autograd"
        missed = (f"{way}: {ratio:.3f} of the shortest, the bar is {bar:.2f}",)
        cells = (way, f"{1e3 * shortest:.0f}", f"{1e3 * took:.0f}", f"{ratio:.3f}")
        row = (*cells, f"{bar:.2f}" if is_ours else "")
        table.append(Row(row, missed * (is_ours and ratio > bar)))
    return table


def sleeping_in_turns(m: int, repeats: int) -> list[Row]:
    """Measures milliseconds per step with one, two and four sleeping partitions per worker."""
    x, target, steps = torch.zeros(m, 1), torch.zeros(m, 1), {}
    with ExitStack() as stack:
        for v in IN_TURNS:
            devices = [f"cpu:{j % WORKERS}" for j in range(WORKERS * v)]
            stages = nn.Sequential(*(Stage() for _ in range(WORKERS * max(IN_TURNS))))
            balance = [len(stages) // len(devices)] * len(devices)
            pipe = Pipe(stages, balance, devices=devices, chunks=m, checkpoint="never")
            stack.enter_context(closing(pipe))
            steps[f"v={v}"] = step_of(pipe, "interleaved", x, target)
        samples = take_turns(lambda way: timed(steps[way])[0], tuple(steps), repeats=repeats)
    table = []
    for v, found in zip(IN_TURNS, samples.values(), strict=True):
        shortest, took = (m + (WORKERS - 1) / v) * max(IN_TURNS) * 3 * T, median(found)
        cells = (f"m={m}, v={v}", f"{1e3 * shortest:.0f}", f"{1e3 * took:.0f}")
        table.append(Row((*cells, f"{took / shortest:.3f}")))
    return table


# Live activations ---------------------------------------------------------------------------------


class Alive:
    """A counter of live storages that layers have returned, and of their peak."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.most, self.highest = 0, 0
        self.known: list[Any] = []
        self.before = bytes_in_use()

    def note(self, _layer: nn.Module, _args: object, y: Tensor) -> None:
        """A forward hook: counts the storages alive when a layer returns ``y``. Thread-safe."""
        self.known.append(StorageWeakRef(y.untyped_storage()))  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(not known.expired() for known in list(self.known)))
        self.highest = max(self.highest, bytes_in_use() - self.before)


def living(n: int, m: int) -> list[Row]:
    """Measures the peak of live micro-batches, summed over the partitions, and of bytes."""
    torch.manual_seed(0)
    x, target, alive = torch.randn(m * ROWS, WIDTH), torch.randn(m * ROWS, WIDTH), Alive()
    layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU())[k % 2] for k in range(2 * BLOCKS * n)]
    for layer in layers:
        layer.register_forward_hook(alive.note)
    found = {}
    with closing(
        Pipe(
            nn.Sequential(*layers), [2 * BLOCKS] * n, devices=["cpu"] * n, chunks=m,
            checkpoint="never",
        )  # fmt: skip
    ) as pipe:
        for way in WAYS * 2:  # once to warm up
            pipe.zero_grad()
            alive.clear()
            step_of(pipe, way, x, target)()
            found[way] = alive.most / (2 * BLOCKS), alive.highest
    bar = sum(min(n - j, m) for j in range(n))
    most = found["1f1b"][0]
    missed = (f"n={n} m={m}: {most:.1f} alive under 1f1b, the bar is {bar}",) * (most > bar)
    counts = (f"{found[way][0]:.1f}" for way in WAYS)
    sizes = (f"{found[way][1] / 2**20:.1f}" for way in WAYS)
    return [Row((f"n={n} m={m}", *counts, str(bar), *sizes), missed)]


# Host cost ----------------------------------------------------------------------------------------


def host_cost(n: int, m: int, checkpoint: str, repeats: int) -> list[Row]:
    """Measures microseconds per micro-batch and partition, and their ratios to autograd's."""
    torch.manual_seed(0)
    x, target = torch.randn(m, 4), torch.randn(m, 4)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))
    with closing(
        Pipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint)
    ) as pipe:
        steps = {way: step_of(pipe, way, x, target) for way in WAYS}

        def measure(way: str) -> float:
            pipe.zero_grad()
            return timed(steps[way])[0]

        samples = take_turns(measure, WAYS, repeats=repeats)
    cost = {way: 1e6 * median(found) / (n * m) for way, found in samples.items()}
    ratios = [cost[way] / cost["autograd"] for way in WAYS[1:]]
    cells = (*(f"{cost[way]:.0f}" for way in WAYS), *(f"{ratio:.2f}" for ratio in ratios))
    return [Row((f"n={n} m={m}, {checkpoint}", *cells))]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the five tables; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    short, slack = arguments.short, arguments.slack
    missed: list[str] = []

    def show(
        title: str, columns: Sequence[str], cases: Sequence[Callable[[], list[Row]]]
    ) -> None:
        table = [row for case in cases for row in rows(case, check=arguments.check)]
        missed.extend(report(title, columns, table))

    show(
        f"A step of nine convolutions, n={len(BALANCE)} m={CHUNKS}, milliseconds",
        ("runtime", "step", "of plain", "1f1b takes", "bar"),
        [partial(convolving, 5 if short else 11, slack)],
    )
    show(
        f"A step of sleeping stages, n={N} m={M}, T={1e3 * T:.0f} ms, milliseconds",
        ("schedule", "(m+n-1)*3T", "measured", "ratio", "bar"),
        [partial(sleeping, 1 if short else 5, slack)],
    )
    show(
        f"{WORKERS * max(IN_TURNS)} sleeping stages on {WORKERS} workers, v partitions each, ms",
        ("case", "(m+(n-1)/v)*12T", "measured", "ratio"),
        [partial(sleeping_in_turns, m, 1 if short else 5) for m in (8, 16)],
    )
    reason = check_counter(ROWS * WIDTH * 4)
    if reason:
        print(f"Bytes are not to be trusted: {reason}.")
    show(
        "Live activations, micro-batches of all partitions, and MiB at the highest",
        ("case", *WAYS, "bar of 1f1b", *(f"{way} MiB" for way in WAYS)),
        [partial(living, n, m) for n, m in ((4, 2), (4, 8), (4, 32))],
    )
    sizes = [(n, m, mode) for n, m in ((4, 8), (8, 32)) for mode in MODES[:2]]
    show(
        "Host cost of a forward and a backward of a trivial task, microseconds",
        ("case", *WAYS, *(f"{way}/autograd" for way in WAYS[1:])),
        [partial(host_cost, *size, 7 if short else 31) for size in sizes],
    )
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
