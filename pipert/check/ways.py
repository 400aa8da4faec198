"""Runs the models of the checks in pipes, in all ways to run a step; words what a check finds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert.pipe import Pipe
from pipert.skip import Skippable, pop, skippable, stash

HOLDS, BROKEN, REPORTED, NOT_CHECKED = "holds", "DOES NOT HOLD", "reported", "not checked"
Results = dict[str, Tensor | None]


class Finding(NamedTuple):
    """A line of the report: a check, its outcome, what was seen, and what that means."""

    check: str
    outcome: str
    """``'reported'``: figures that are neither right nor wrong."""
    seen: str
    means: str = ""

    def __str__(self) -> str:
        means = f". That means: {self.means}" if self.outcome == BROKEN else ""
        return f"* **{self.outcome}** {self.check}: {self.seen}{means}"


def judged(check: str, faults: list[str], seen: str, means: str) -> Finding:
    """Makes a finding that holds if there are no ``faults``; it names the first few of them."""
    if not faults:
        return Finding(check, HOLDS, seen)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Finding(check, BROKEN, "; ".join(faults[:3]) + more, means)


class Way(NamedTuple):
    """A way to run a step: ``'loss.backward()'`` or a schedule, and the checkpoint mode."""

    schedule: str
    checkpoint: str

    def __str__(self) -> str:
        return f"{self.schedule}, checkpoint={self.checkpoint!r}"


CALL = "loss.backward()"
_MODES = ("never", "except_last", "always")
WAYS = tuple(Way(schedule, mode) for schedule in (CALL, "gpipe", "1f1b") for mode in _MODES)
NEVER = tuple(way for way in WAYS if way.checkpoint == "never")


class Case(NamedTuple):
    """A model with its input, and the target of its squared error, on the CPU."""

    name: str
    layers: nn.Sequential
    x: Tensor
    target: Tensor
    chunks: int = 4


@skippable(stash=["embedded"])
class _Stash(Skippable):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("embedded", x)
        return x.clone()


@skippable(pop=["embedded"])
class _Add(Skippable):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        embedded = yield pop("embedded")
        return x + embedded


def transformer(n: int, dtype: torch.dtype, dropout: float = 0.0, tied: bool = True) -> Case:
    """Makes a small transformer for ``n`` partitions, with all that makes a pipeline difficult.

    Its head shares the embedding's weight, if ``tied``, and the embedding is added again at the
    end, both across all partitions; one layer works in place. All its functions are smooth: where
    ReLU chooses between values that differ by rounding, a gradient jumps. No BatchNorm: it depends
    on the micro-batch.
    """
    torch.manual_seed(0)
    embedding, head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
    if tied:
        head.weight = embedding.weight
    blocks = [
        nn.TransformerEncoderLayer(16, 2, 64, dropout, "gelu", batch_first=True) for _ in range(n)
    ]
    layers = nn.Sequential(embedding, _Stash(), nn.ELU(inplace=True), *blocks, _Add(), head)
    tokens = torch.randint(8, (10, 12))  # micro-batches of 3, 3, 2 and 2
    return Case("transformer", layers.to(dtype), tokens, torch.randn(10, 12, 8, dtype=dtype))


def chain(n: int, m: int, layers: int, width: int, rows: int, dropout: float = 0.0) -> Case:
    """Makes ``n`` partitions of ``layers`` equal layers, and ``m`` micro-batches of ``rows``.

    Without dropout each layer saves one tensor of its input's size for the backward.
    """
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    each = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), *drop) for _ in range(n * layers)]
    x, target = torch.randn(m * rows, width), torch.randn(m * rows, width)
    name = f"{n} x {layers} layers of width {width}, {m} micro-batches of {rows} rows"
    return Case(name, nn.Sequential(*each), x, target, m)


@dataclass(frozen=True)
class Trial:
    """A model in a pipe, its input on the first device and its target on the last."""

    pipe: Pipe
    x: Tensor
    """A leaf that requires grad if it can; the first partition would have less work without."""
    target: Tensor

    def step(self, way: Way, outputs: bool = False) -> tuple[Tensor, Tensor | None]:
        """Runs forward and backward; returns the loss and, on request, outputs, without a graph."""
        self.pipe.checkpoint = way.checkpoint
        if way.schedule == CALL:
            return step(self.pipe, self.x, self.target)
        found = self.pipe.forward_backward(
            self.x, target=self.target, loss_fn=mse_loss, schedule=way.schedule,
            return_outputs=outputs,
        )  # fmt: skip
        return found if outputs else (found, None)

    def results(self, way: Way) -> Results:
        """Runs a step from a seed; returns its output, its loss and all gradients."""
        torch.manual_seed(7)
        self.pipe.zero_grad()
        self.x.grad = None
        loss, output = self.step(way, outputs=True)
        return {"output": output, "loss": loss, **gradients(self.pipe, self.x)}


@dataclass(frozen=True)
class Devices:
    """The devices of the partitions, in order."""

    partitions: tuple[torch.device, ...]

    @property
    def n(self) -> int:
        return len(self.partitions)

    @property
    def gpus(self) -> tuple[torch.device, ...]:
        """The CUDA devices, each once."""
        return tuple(dict.fromkeys(d for d in self.partitions if d.type == "cuda"))

    def synchronize(self) -> None:
        """Waits until all GPUs are idle."""
        for device in self.gpus:
            torch.cuda.synchronize(device)

    def timed(self, task: Callable[[], object]) -> float:
        """Returns the seconds that ``task`` takes from idle to idle."""
        self.synchronize()
        started = perf_counter()
        task()
        self.synchronize()
        return perf_counter() - started

    @contextlib.contextmanager
    def trial(self, case: Case) -> Iterator[Trial]:
        """Puts a model into a pipe on these devices."""
        x = leaf(case.x, self.partitions[0])
        layers, n = len(case.layers), self.n
        even = [layers // n + (j < layers % n) for j in range(n)]
        pipe = Pipe(case.layers, even, devices=self.partitions, chunks=case.chunks, timeout=60.0)
        with pipe:
            yield Trial(pipe, x, case.target.to(self.partitions[-1]))


def leaf(x: Tensor, device: torch.device) -> Tensor:
    """Copies an input to ``device`` as a leaf that requires grad if it can."""
    return x.to(device, copy=True).requires_grad_(x.is_floating_point())


def step(module: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Runs forward and ``loss.backward()``; returns loss and output, detached."""
    output = module(x)
    loss = mse_loss(output, target)
    torch.autograd.backward(loss)
    return loss.detach(), output.detach()


def gradients(module: nn.Module, x: Tensor) -> Results:
    """Returns the gradient of each parameter, and of the input."""
    found: Results = {f"the gradient of {k}": p.grad for k, p in module.named_parameters()}
    return {**found, "the gradient of the input": x.grad}
