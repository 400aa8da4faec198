"""Compares schedules over slow links, in the virtual time of simulated GPUs.

::

    python benchmarks/simulated_schedules.py
    python benchmarks/simulated_schedules.py --link 25 --only 8x32
    python benchmarks/simulated_schedules.py --check      # exit with 1 when a bar is missed

The model is sixteen ``Linear(256)`` with ``Tanh``, and the mini-batch has 2048 rows. The devices do
0.5 TFLOP/s, their memory and launches cost nothing, and links take the time of their bytes. On
eight devices with 32 micro-batches a forward task takes 34 us, a backward task 67 us, and a copy
5.5 us. *MiB* is the peak of a step's allocations on the first device.

With *interleaved* a device has two partitions, half as large. *Ideal* is a pipeline with one
partition per device, whose links cost nothing. In the second table gradients of weights are put
off, which that pipeline does not do. The third does the same with sixteen transformer blocks,
beside 1F1B. In the fourth, four devices have one, two or four partitions
each: the ideal is ``m * n / (m + (n - 1) / v)``, which needs ``v`` times as many copies.

pipert itself runs; only the devices' clocks are simulated, so nothing here was measured on a GPU.
The figures are the same in each run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / each) for each in ("benchmarks", "", "examples")]

from tests import simulated_gpus  # noqa: E402

GPUS = simulated_gpus.start()

# isort: split
import torch  # noqa: E402
from _measure import Row, header, report, verdict  # noqa: E402
from models.gpt import Block, ModelConfig  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from pipert import Pipe  # noqa: E402

__all__ = ["main"]

CASES = ((2, 8), (4, 8), (4, 16), (8, 16), (8, 32), (8, 64))  # n, m
WAYS = ("autograd", "gpipe", "1f1b", "eager-1f1b", "interleaved")
IN_TURNS = (("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 2), ("interleaved", 4))  # v
DEVICES, MICRO_BATCHES = 4, (8, 16, 32)  # for the ways in IN_TURNS
APART = ("zb-h1", "zb-h2", "zb-v")
APART_BARS = {(4, 8): (3.0, 3.35, 3.1), (8, 8): (5.6, 5.6, 5.7), (8, 32): (6.2, 7.0, 6.6)}
OF_LINEARS = 0.93  # the lowest permitted gain of blocks over 1f1b, relative to that of Linears
LAYERS, WIDTH, ROWS = 16, 256, 2048
BAR = 0.97  # the lowest permitted ratio to the speed of loss.backward()


class Figure(NamedTuple):
    """The time and memory of one step."""

    microseconds: float
    bytes: int
    """The peak of the step's allocations on the first device."""


def layers() -> nn.Sequential:
    """Builds the model."""
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def blocks() -> nn.Sequential:
    """Builds as many transformer blocks."""
    config = ModelConfig(context=32, width=64, layers=LAYERS, heads=4)
    return nn.Sequential(*[Block(config) for _ in range(LAYERS)])


def mean_square(y: Tensor, _: object = None) -> Tensor:
    """Computes the loss."""
    return y.square().mean()


def step(model: nn.Module, x: Tensor, way: str) -> None:
    """Takes a step without an optimizer."""
    if isinstance(model, Pipe) and way != "autograd":
        model.forward_backward(x, loss_fn=mean_square, schedule=way)
    else:
        mean_square(model(x)).backward()  # type: ignore[no-untyped-call]


def measure(
    model: nn.Module, way: str = "autograd", shape: Sequence[int] = (ROWS, WIDTH)
) -> Figure:
    """Takes two steps; measures the second."""
    x = torch.randn(shape, device="cuda:0")
    step(model, x, way)
    torch.cuda.reset_peak_memory_stats(0)
    before = GPUS.live_bytes(0)
    GPUS.reset_time()
    step(model, x, way)
    return Figure(GPUS.makespan(), GPUS.peak_bytes(0) - before)


def measure_pipe(way: str, n: int, m: int, v: int = 1, of_blocks: bool = False) -> Figure:
    """Measures a step on ``n`` devices with ``v`` partitions each."""
    module = blocks() if of_blocks else layers()
    shape = (64, 32, 64) if of_blocks else (ROWS, WIDTH)
    numbers = [*range(n), *reversed(range(n))] if way == "zb-v" else [*range(n)] * v
    devices = [f"cuda:{k}" for k in numbers]
    balance = [len(module) // len(devices)] * len(devices)
    with Pipe(module, balance, devices=devices, chunks=m, checkpoint="never") as pipe:
        return measure(pipe, way, shape)


def row(n: int, m: int, plain: Figure) -> Row:
    """Measures all ways of one case."""
    found = {way: measure_pipe(way, n, m, 1 + (way == "interleaved")) for way in WAYS}
    ups = [f"{plain.microseconds / found[way].microseconds:.2f}" for way in WAYS]
    kept = [f"{found[way].bytes / 2**20:.1f}" for way in WAYS]
    reached = found["autograd"].microseconds / found["eager-1f1b"].microseconds
    missed = (f"n={n} m={m}: eager-1f1b has {reached:.3f} of autograd",) * (reached < BAR)
    return Row((f"n={n} m={m}", f"{m * n / (m + n - 1):.2f}", *ups, *kept), missed)


def row_apart(n: int, m: int, plain: Figure) -> Row:
    """Measures the ways that put off gradients of weights."""
    found = [measure_pipe(way, n, m) for way in APART]
    ups = [plain.microseconds / figure.microseconds for figure in found]
    missed = tuple([
        f"n={n} m={m}: {way} is {up:.2f} times as fast as plain, the bar is {bar}"
        for way, up, bar in zip(APART, ups, APART_BARS[n, m], strict=True)
        if up < bar
    ])  # fmt: skip
    cells = [f"{up:.2f}" for up in ups] + [f"{figure.bytes / 2**20:.1f}" for figure in found]
    return Row((f"n={n} m={m}", f"{m * n / (m + n - 1):.2f}", *cells), missed)


def row_of_blocks(n: int, m: int) -> Row:
    """Compares what blocks and Linears gain over 1F1B when gradients of weights are put off."""
    gains = []
    for of_blocks in (True, False):
        ways = ("1f1b", *APART)
        base, *found = [measure_pipe(way, n, m, of_blocks=of_blocks).microseconds for way in ways]
        gains.append([base / microseconds for microseconds in found])
    ratios = [gain / of_linears for gain, of_linears in zip(*gains, strict=True)]
    missed = tuple([
        f"n={n} m={m}: blocks gain {ratio:.2f} of what Linears gain by {way}"
        for way, ratio in zip(APART, ratios, strict=True)
        if ratio < OF_LINEARS
    ])  # fmt: skip
    cells = [f"{up:.2f}" for up in gains[0]] + [f"{ratio:.2f}" for ratio in ratios]
    return Row((f"n={n} m={m}", *cells), missed)


def rows_in_turns(m: int, plain: Figure) -> list[Row]:
    """Measures the same devices with one, two and four partitions each."""
    n, table, fastest = DEVICES, [], 0.0
    for way, v in IN_TURNS:
        found = measure_pipe(way, n, m, v)
        up, ideal = plain.microseconds / found.microseconds, m * n / (m + (n - 1) / v)
        missed = (f"m={m}: {way} with v={v} is no faster than what is above it",) * (up <= fastest)
        fastest = max(fastest, up)
        cells = f"{ideal:.2f}", f"{up:.2f}", f"{found.bytes / 2**20:.1f}"
        table.append(Row((f"m={m}, {way}, v={v}", *cells), missed))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if a wait was missing, or under ``--check`` a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--link", type=float, default=12, help="GB/s of a link; default 12")
    parser.add_argument("--only", help="cases to run, such as 4x16,8x32")
    arguments = parser.parse_args(argv)
    only = arguments.only.split(",") if arguments.only else [f"{n}x{m}" for n, m in CASES]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(), "Simulated GPUs: nothing here was measured on one.", sep="\n", end="\n\n")
    GPUS.rates(launch_us=0, memory_gbps=1e6, link_gbps=arguments.link, tflops=0.5)
    plain = measure(layers().to("cuda:0"))
    cases = [(int(n), int(m)) for n, m in (case.split("x") for case in only)]
    table = [row(n, m, plain) for n, m in cases]
    title = f"simulated, speed-up over plain on one device, links {arguments.link:g} GB/s"
    missed = report(title, ("case", "ideal", *WAYS, *(f"{way} MiB" for way in WAYS)), table)
    chosen = [case for case in APART_BARS if case in cases or not arguments.only]
    if chosen:
        table = [row_apart(n, m, plain) for n, m in chosen]
        columns = ("case", "ideal", *APART, *(f"{way} MiB" for way in APART))
        missed += report(f"{title}, gradients of weights apart", columns, table)
        table = [row_of_blocks(n, m) for n, m in chosen]
        columns = ("case", *APART, *(f"{way} of Linears'" for way in APART))
        missed += report("simulated, transformer blocks, gain over 1f1b", columns, table)
    if not arguments.only:
        table = [row for m in MICRO_BATCHES for row in rows_in_turns(m, plain)]
        title = f"{title}, {DEVICES} devices with v partitions each"
        missed += report(title, ("case", "ideal", "speed-up", "MiB"), table)
    return verdict(missed, check=arguments.check, reports=GPUS.reports())


if __name__ == "__main__":
    sys.exit(main())
