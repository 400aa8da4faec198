"""A GPT as it is, by ``pipert.pipeline``, beside the same layers rewritten as an ``nn.Sequential``.

The layers are the same objects' copies: an embedding, transformer blocks, a head. One model has a
``forward`` of its own, whose calls are intercepted; the other is a ``Pipe``. Layers are **tiny** (8
columns, 4 rows of 4 tokens: what a pipe does for each layer is all there is) or **real** (some two
milliseconds forward). Four micro-batches, two and four partitions on CPU workers, one intra-op
thread each. *Plain* is the model without a pipe, micro-batch by micro-batch.
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
from _measure import Row, report, rows, start, take_turns, verdict
from torch import Tensor, nn
from torch.nn import functional

import pipert
from pipert import Pipe

__all__ = ["main"]

CHUNKS, BLOCKS, VOCABULARY = 4, 8, 64
WAYS = ("call", "1f1b")


class Size(NamedTuple):
    """Of the layers."""

    name: str
    width: int
    tokens: int
    batch: int
    bar: float
    """Of the time of the ``Sequential``, at most."""


SIZES = (Size("tiny", 8, 4, 16, 1.25), Size("real", 128, 32, 32, 1.03))


class Block(nn.Module):
    """One of a transformer."""

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
    """With a ``forward`` of its own."""

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
        for part, of_target in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            loss_of(model(part), of_target).backward()  # type: ignore[no-untyped-call]
    else:
        model.forward_backward(x, target=target, loss_fn=loss_of, schedule=way)


@contextmanager
def products(size: Size, n: int, checkpoint: str | None) -> Iterator[dict[str, Callable[[], Any]]]:
    """A step of each, by name."""
    model = GPT(size.width)
    x = torch.randint(VOCABULARY, (size.batch, size.tokens))
    target = torch.randint(VOCABULARY, (size.batch, size.tokens))
    options: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": checkpoint, "devices": ["cpu"] * n}
    own = copy.deepcopy(model)
    layers = nn.Sequential(own.embedding, *own.blocks, own.head)
    per = BLOCKS // n
    balance = [1 + per, *[per] * (n - 2), per + 1]
    with ExitStack() as stack:
        rewritten = stack.enter_context(closing(Pipe(layers, balance, **options)))
        cuts = [f"blocks.{k * per}" for k in range(1, n)]
        as_it_is = copy.deepcopy(model)
        driven = stack.enter_context(closing(pipert.pipeline(as_it_is, cuts, **options)))
        steps: dict[str, Callable[[], Any]] = {}
        steps["plain"] = partial(_afresh, model, "plain", x, target)
        for way in WAYS:
            steps[f"Sequential {way}"] = partial(_afresh, rewritten, way, x, target)
            steps[f"as it is {way}"] = partial(_afresh, driven, way, x, target)
        yield steps


def _afresh(model: nn.Module, way: str, x: Tensor, target: Tensor) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    take_step(model, way, x, target)
    return time.perf_counter() - begin


def measure(
    size: Size, n: int, checkpoint: str | None, repeats: int, slack: float
) -> list[Row]:
    """Milliseconds of each way, and the ratio that counts."""
    with products(size, n, checkpoint) as steps:
        samples = take_turns(lambda name: steps[name](), tuple(steps), repeats=repeats, warm_up=2)
    took = {name: 1e3 * median(found) for name, found in samples.items()}
    table = []
    for way in WAYS:
        ours, other = took[f"as it is {way}"], took[f"Sequential {way}"]
        ratio, bar = ours / other, size.bar * slack
        what = f"{size.name}, n={n}, {checkpoint or 'default'}, {way}"
        missed = (f"{what}: {ratio:.2f} of the Sequential, the bar is {bar:.2f}",) * (ratio > bar)
        cells = (f"{took['plain']:.1f}", f"{other:.1f}", f"{ours:.1f}", f"{ratio:.2f}")
        table.append(Row((what, *cells, f"{bar:.2f}"), missed))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. 1 when ``--check`` was asked for and a bar was missed."""
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
    head = ("milliseconds of a step", "plain", "Sequential", "as it is", "ratio", "bar")
    missed = report("A GPT as it is and as a Sequential", head, found)
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
