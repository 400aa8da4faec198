"""Compares an unchanged GPT in ``pipert.pipeline`` with the same layers as an ``nn.Sequential``.

Both have copies of the same layers: an embedding, transformer blocks, a head. One model has a
``forward`` of its own, whose calls are intercepted; the other is a ``Pipe``. Layers are **tiny** (8
columns, 4 rows of 4 tokens, so that only the pipe's work for each layer counts) or **real** (about
two milliseconds forward). There are four micro-batches, and two or four partitions on CPU workers,
with one intra-op thread each. *Plain* is the model without a pipe, micro-batch by micro-batch.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from _measure import Row, cell, report, rows, start, take_turns, verdict
from torch import Tensor, nn
from torch.nn import functional

import pipert
from pipert import Pipe

__all__ = ["main"]

CHUNKS, BLOCKS, VOCABULARY = 4, 8, 64
WAYS = ("call", "1f1b")


class Size(NamedTuple):
    """The size of the layers and the mini-batch."""

    name: str
    width: int
    tokens: int
    batch: int
    bar: float
    """The highest permitted ratio to the time of the ``Sequential``."""


SIZES = (Size("tiny", 8, 4, 16, 1.25), Size("real", 128, 32, 32, 1.03))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixing, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixing(self.before(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        found: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return found


class GPT(nn.Module):
    """A GPT with a ``forward`` of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h)
        return logits


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def take_step(model: Any, way: str, x: Tensor, target: Tensor) -> None:
    if way == "call":
        loss_of(model(x), target).backward()  # type: ignore[no-untyped-call]
    elif way == "plain":
        for part, target_part in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            loss_of(model(part), target_part).backward()  # type: ignore[no-untyped-call]
    else:
        model.forward_backward(x, target=target, loss_fn=loss_of, schedule=way)


@contextmanager
def products(size: Size, n: int, checkpoint: str | None) -> Iterator[dict[str, Callable[[], Any]]]:
    """Yields a function per product, by name, that takes a step and returns its seconds."""
    model = GPT(size.width)
    x = torch.randint(VOCABULARY, (size.batch, size.tokens))
    target = torch.randint(VOCABULARY, (size.batch, size.tokens))
    options: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": checkpoint, "devices": ["cpu"] * n}
    copied = copy.deepcopy(model)
    layers = nn.Sequential(copied.embedding, *copied.blocks, copied.head)
    per = BLOCKS // n
    balance = [1 + per, *[per] * (n - 2), per + 1]
    with ExitStack() as stack:
        rewritten = stack.enter_context(closing(Pipe(layers, balance, **options)))
        cuts = [f"blocks.{k * per}" for k in range(1, n)]
        as_it_is = copy.deepcopy(model)
        unchanged = stack.enter_context(closing(pipert.pipeline(as_it_is, cuts, **options)))
        steps: dict[str, Callable[[], Any]] = {}
        steps["plain"] = partial(_afresh, model, "plain", x, target)
        for way in WAYS:
            steps[f"Sequential {way}"] = partial(_afresh, rewritten, way, x, target)
            steps[f"as it is {way}"] = partial(_afresh, unchanged, way, x, target)
        yield steps


def _afresh(model: nn.Module, way: str, x: Tensor, target: Tensor) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    take_step(model, way, x, target)
    return time.perf_counter() - begin


def measure(
    size: Size, n: int, checkpoint: str | None, repeats: int, slack: float
) -> list[Row]:
    """Measures milliseconds of each way, and the ratios to the ``Sequential``."""
    with products(size, n, checkpoint) as steps:
        samples = take_turns(lambda name: steps[name](), tuple(steps), repeats=repeats, warm_up=2)
    took = {name: 1e3 * median(found) for name, found in samples.items()}
    table = []
    for way in WAYS:
        ours, other = took[f"as it is {way}"], took[f"Sequential {way}"]
        ratio, what = ours / other, f"{size.name}, n={n}, {checkpoint or 'default'}, {way}"
        # Steps on CPU depend on which cores the threads wake on.
        bar = size.bar * slack if way == "call" else None
        missed: tuple[str, ...] = ()
        if bar is not None and ratio > bar:
            missed = (f"{what}: {ratio:.2f} of the Sequential, the bar is {bar:.2f}",)
        cells = (f"{took['plain']:.1f}", f"{other:.1f}", f"{ours:.1f}", f"{ratio:.2f}")
        table.append(Row((what, *cells, cell(bar, 2)), missed))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    repeats = 5 if arguments.short else 100
    settings = [
        (size, n, checkpoint)
        for size in SIZES
        for n in (2, 4)
        for checkpoint in ("never", None)
        if not arguments.short or n == 2
    ]
    found = []
    for size, n, checkpoint in settings:
        case = partial(measure, size, n, checkpoint, repeats, arguments.slack)
        found += rows(case, check=arguments.check)
    head = ("milliseconds of a step", "plain", "Sequential", "pipeline", "ratio", "bar")
    missed = report("A GPT in a pipeline and as a Sequential", head, found)
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
