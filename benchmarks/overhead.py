"""Measures the host cost of a task, that of its check, and the bytes a forward leaves alive.

**Host cost.** Each of ``n`` partitions is one ``nn.Linear(4, 4)``, and the mini-batch has ``m``
rows, one per micro-batch. So nearly all time is the runtime's: queues, threads, autograd. The cost
of a task is the wall time over ``n * m``. *forward* is the call of the pipe, and *forward+backward*
runs to the end of ``out.sum().backward()``. The garbage collector stays on.

**The check of recomputations** keeps a sample of each output and compares it. It is switched off in
every other step, of one partition with *always*, and processor time is compared, of all threads.

**Live activations.** PyTorch keeps no statistics of its CPU allocator, a ``TorchDispatchMode`` and
saved-tensor hooks do not reach the threads of both products, and a collector's walk misses tensors
that C++ holds. So the C library reports its memory in use, see ``_malloc.py``. The forward has left
alive the difference across it: saved activations and the gathered output. Before any measurement,
tensors of a known size must show in that counter.

*by count* is the memory that the checkpoint mode must keep, counted by hand, see ``must_keep``. The
excess over it, a few tenths of a MiB at any ``WIDTH``, is the graph itself. *held* is read after
the forward. *highest* is the maximum of *held* and of the readings at the end of every layer's
call, including recomputations: it shows whether recomputed activations pile up. It includes
gradients in transit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from _malloc import bytes_in_use, check_counter
from _measure import Row, both, medians, report, rows, start, take_turns, verdict
from torch import Tensor, nn

from pipert import Pipe
from pipert.recompute import segment

__all__ = ["main"]

FORWARD_BAR = TOTAL_BAR = 0.75  # the highest permitted ratio to torchgpipe's time

N, M = 4, 8  # partitions and micro-batches of the memory table
ROWS, WIDTH, BLOCKS = 256, 256, 3  # rows of a micro-batch, (Linear, GELU) blocks in a partition
ACTIVATION = ROWS * WIDTH * 4
TOLERANCE = ACTIVATION // 2  # bytes; less than any needlessly kept tensor

COST_COLUMNS = ("case", "pipert", "torchgpipe", "ratio", "bar")
MEMORY_COLUMNS = (
    *("checkpoint", "by count", "pipert held", "torchgpipe held"),
    *("pipert highest", "torchgpipe highest"),
)


def must_keep(checkpoint: str) -> int:
    """Returns the bytes that a forward has to leave alive, counted by hand.

    Kept whole, a micro-batch leaves the output of every layer but the last one, whose output is
    copied into the gathered output. Checkpointed, it leaves the inputs of the partitions after the
    first; the input of the first is the caller's.
    """
    whole = {"never": M, "except_last": 1, "always": 0}[checkpoint]
    kept = whole * (2 * BLOCKS * N - 1) + (M - whole) * (N - 1)
    return (kept + M) * ACTIVATION


def trivial(n: int) -> nn.Sequential:
    """Builds ``n`` layers that compute next to nothing."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))


def real() -> nn.Sequential:
    """Builds ``N`` partitions of layers, each of which needs its output for its backward."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(*((nn.Linear(WIDTH, WIDTH), nn.GELU())[k % 2] for k in range(2 * BLOCKS)))
            for _ in range(N)
        )
    )


def host_cost(n: int, m: int, checkpoint: str, repeats: int, slack: float) -> list[Row]:
    """Measures microseconds per task, for the forward and for forward plus backward."""
    batch = torch.randn(m, 4)
    with both(partial(trivial, n), n, chunks=m, checkpoint=checkpoint) as runners:

        def measure(name: str) -> tuple[float, float]:
            begin = perf_counter()
            out = runners[name](batch)
            middle = perf_counter()
            out.sum().backward()
            end = perf_counter()
            return (middle - begin) * 1e6 / (n * m), (end - begin) * 1e6 / (n * m)

        samples = take_turns(measure, tuple(runners), repeats=repeats)
    table = []
    for phase, bar, ours, theirs in zip(
        ("forward", "forward+backward"),
        (FORWARD_BAR * slack, TOTAL_BAR * slack),
        medians(samples["pipert"]),
        medians(samples["torchgpipe"]),
        strict=True,
    ):
        case = f"{phase}, n={n} m={m}, {checkpoint}"
        ratio = ours / theirs
        missed = (f"{case}: {ratio:.2f} of torchgpipe, the bar is {bar}",) if ratio > bar else ()
        cells = (case, f"{ours:.0f}", f"{theirs:.0f}", f"{ratio:.2f}", f"{bar:.1f}")
        table.append(Row(cells, missed))
    return table


def cost_of_check(repeats: int) -> list[Row]:
    """Measures processor time of steps with and without the check, a row for each kind of layer."""
    unchecked: Any = patch.object(segment, "sampled", lambda y: [])
    table = []
    for layers, width, micro_rows in (("trivial", 4, 1), ("2 ms", 1024, 64)):
        module, batch = nn.Sequential(nn.Linear(width, width)), torch.randn(M * micro_rows, width)
        with closing(Pipe(module, [1], devices=["cpu"], chunks=M, checkpoint="always")) as pipe:

            def measure(name: str, pipe: Pipe = pipe, batch: Tensor = batch) -> tuple[float]:
                with nullcontext() if name == "checked" else unchecked:
                    begin = process_time()
                    pipe(batch).sum().backward()
                    return ((process_time() - begin) * 1e6 / M,)

            names = "checked", "unchecked"
            samples = take_turns(measure, names, repeats=repeats)
        (total,), (without,) = medians(samples["checked"]), medians(samples["unchecked"])
        extra = total - without
        share = f"{100 * extra / without:.1f}%"
        table.append(Row((layers, f"{without:.0f}", f"{total:.0f}", f"{extra:.0f}", share)))
    return table


def live_activations(repeats: int) -> list[Row]:
    """Measures the bytes alive after the forward and the peak of a step, a row for each mode."""
    batch = torch.randn(M * ROWS, WIDTH)
    readings: list[int] = []

    def read(_layer: nn.Module, _args: object, _out: Tensor) -> None:
        readings.append(bytes_in_use())

    def build() -> nn.Sequential:
        module = real()
        for layer in module.modules():
            if not isinstance(layer, nn.Sequential):
                layer.register_forward_hook(read)
        return module

    def measure(name: str) -> tuple[int, int]:
        gc.collect()
        readings.clear()
        before = bytes_in_use()
        out = runners[name](batch)
        gc.collect()
        held = bytes_in_use()
        out.sum().backward()
        return held - before, max(held, *readings) - before

    table = []
    above = 0.0  # bytes held in the previous mode
    for checkpoint in ("always", "except_last", "never"):
        with both(build, N, chunks=M, checkpoint=checkpoint) as runners:
            samples = take_turns(measure, tuple(runners), repeats=repeats)
        held, highest = medians(samples["pipert"])
        peer_held, peer_highest = medians(samples["torchgpipe"])
        missed = []
        if held > peer_held + TOLERANCE:
            missed.append(f"{checkpoint}: {_mib(held)} MiB held, torchgpipe {_mib(peer_held)}")
        if highest > peer_highest + TOLERANCE:
            missed.append(
                f"{checkpoint}: {_mib(highest)} MiB at the highest, torchgpipe {_mib(peer_highest)}"
            )
        if held <= above:
            missed.append(f"{checkpoint}: {_mib(held)} MiB held, not above a mode that keeps less")
        above = held
        figures = (must_keep(checkpoint), held, peer_held, highest, peer_highest)
        table.append(Row((checkpoint, *map(_mib, figures)), tuple(missed)))
    return table[::-1]


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    repeats = 7 if arguments.short else 31
    cost: list[Row] = []
    for n, m in ((4, 8), (8, 32)):
        for checkpoint in ("never", "except_last"):
            measure = partial(host_cost, n, m, checkpoint, repeats, arguments.slack)
            cost += rows(measure, check=arguments.check)
    missed = report("Host cost of a trivial task, microseconds", COST_COLUMNS, cost)

    table = cost_of_check(25 * repeats)
    columns = "layers", "unchecked", "checked", "the check", "of the step"
    report("The check of recomputations, microseconds of a micro-batch", columns, table)

    reason = check_counter(ACTIVATION)
    if reason:
        print(f"Live activations are not measured: {reason}.")
    else:
        memory = rows(partial(live_activations, 3 if arguments.short else 7), check=arguments.check)
        missed += report(f"Live activations, n={N} m={M}, MiB", MEMORY_COLUMNS, memory)
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
