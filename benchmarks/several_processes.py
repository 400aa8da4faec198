"""Compares steps over two processes with steps of torch's stages, and with one process.

The model is the nine convolutions of ``forward_backward.py``, 32 channels of 64x64, with a
mini-batch of 32 rows in 8 micro-batches, under 1F1B. The runtimes take turns: ``PipelineStage`` and
``Schedule1F1B`` of ``torch.distributed.pipelining``, used as in its documentation, in two processes
over gloo; ``pipert.distributed.Pipe`` and ``pipert.distributed.pipeline`` in the same processes;
``pipert.Pipe`` and ``pipert.pipeline`` with two CPU workers in this process. All have one intra-op
thread for each partition. The bars limit what the second adds to the first, since the ranks agree
before and after a step, and all get the loss; and what the third adds to the second, since each
rank runs the model's own forward.

With **layers that compute nothing**, nine ``nn.Linear(4, 4)``, a step takes only the time of the
host. It has no bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter

from _measure import Row, report, rows, start, take_turns, verdict
from _schedule1f1b import ANY, BALANCE, CASES, CHUNKS, OURS, TORCHS, processes
from torch.nn import functional

from pipert import ModulePipe, Pipe, pipeline

__all__ = ["main"]

BARS = {OURS: (TORCHS, 1.03), ANY: (OURS, 1.05)}
"""The highest permitted ratios to the time of another runtime."""

Timed = Callable[[], tuple[float, float]]


@contextmanager
def runtimes(case: str) -> Iterator[dict[str, Timed]]:
    """Yields a function per runtime, by name, that takes a step and returns seconds and loss."""
    model, data = CASES[case]
    x, target = data()

    def step(pipe: Pipe | ModulePipe) -> tuple[float, float]:
        begin = perf_counter()
        pipe.zero_grad()
        loss = pipe.forward_backward(x, target=target, loss_fn=functional.mse_loss)
        return perf_counter() - begin, loss.item()

    devices = ["cpu"] * len(BALANCE)
    chain = Pipe(model(), BALANCE, devices=devices, chunks=CHUNKS)
    whole = pipeline(model(), [str(BALANCE[0])], devices=devices, chunks=CHUNKS)
    with chain, whole, processes(case) as step_of:
        over_ranks = {name: partial(step_of, name) for name in (TORCHS, OURS, ANY)}
        yield {**over_ranks, "Pipe": partial(step, chain), "pipeline": partial(step, whole)}


def measured(case: str, repeats: int, slack: float | None) -> list[Row]:
    """Measures milliseconds per step and their ratios to torch's; without ``slack``, no bar."""
    with runtimes(case) as steps:
        samples = take_turns(lambda name: steps[name](), tuple(steps), repeats=repeats)
    losses = [loss for found in samples.values() for _, loss in found]
    assert max(losses) - min(losses) < 1e-4, "they do not compute the same"
    seconds = {name: median(took for took, _ in found) for name, found in samples.items()}
    table = []
    for name, took in seconds.items():
        bar, missed = "", list[str]()
        if name in BARS and slack is not None:
            other, most = BARS[name]
            bar = f"{most * slack:.2f} of {other}"
            if (ratio := took / seconds[other]) > most * slack:
                missed = [f"{name} takes {ratio:.3f} of {other}, the bar is {bar}"]
        ratio = took / seconds[TORCHS]
        table.append(Row((name, f"{1e3 * took:.1f}", f"{ratio:.3f}", bar), tuple(missed)))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    check, repeats = arguments.check, 5 if arguments.short else 25
    columns = "runtime", "step, ms", f"of {TORCHS}", "bar"
    table = rows(partial(measured, "convolutions", repeats, arguments.slack), check=check)
    missed = report("Nine convolutions, two partitions, 8 micro-batches", columns, table)
    table = rows(partial(measured, "linears", 4 * repeats, None), check=check)
    missed += report("Nine layers that compute nothing, likewise", columns, table)
    return verdict(missed, check=check)


if __name__ == "__main__":
    sys.exit(main())
