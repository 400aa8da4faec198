"""Measures one partition's memory for one micro-batch by running it alone on one device.

No pipe, no threads and no checkpoints: the layers are called one after the other on an otherwise
empty device, whose live bytes are read. So it gives the memory *required*, whatever a pipe
does. Skips are passed in and taken out as the layers yield them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipert.skip.routes import PartitionSkips, routes
from pipert.skip.store import of_task
from tests.simulated_gpus.simulation import Simulation

__all__ = ["Alone", "alone", "nbytes"]


class Alone(NamedTuple):
    """Bytes of one partition on one micro-batch, weights and ``.grad`` left out.

    The mini-batch is not its own: what partition 0 gets counts nothing, wherever it is kept.
    """

    weights: int
    inputs: dict[int, int]
    """What comes from other partitions, by partition: the value, and the skips that it pops."""
    outputs: dict[int, int]
    """What goes to others, by partition: the value to the next one, skips to those that pop."""
    unsaved: dict[int, int]
    """Those of them that its own backward does not need."""
    saved: int
    """What is kept from the forward to the backward."""
    forward: int
    """The most in a forward."""
    quiet: int
    """The most in a forward that saves nothing."""
    backward: int
    """The most in a backward that adds to a ``.grad`` which is there."""
    first: int
    """The most in a backward that makes ``.grad``, which counts here."""
    step: int
    """The most in a backward that returns the gradients of all weights at once."""
    largest: int
    """Of its weights."""

    @property
    def given(self) -> int:
        """Of all inputs."""
        return sum(self.inputs.values())

    @property
    def sent(self) -> int:
        """Of all outputs."""
        return sum(self.outputs.values())


def alone(
    gpus: Simulation, partitions: Sequence[nn.Sequential], x: Tensor, device: int
) -> list[Alone]:
    """Of each partition; ``x`` is the micro-batch that the first one gets."""
    found, value, stashed = list[Alone](), x, dict[Any, Tensor]()
    for j, (partition, skips) in enumerate(zip(partitions, routes(partitions), strict=True)):
        layers = copy.deepcopy(partition).to(f"cuda:{device}")
        layers.zero_grad(set_to_none=True)
        inputs = [value, *(stashed[key] for key, _ in skips.arriving)]
        probe = _Probe(gpus, layers, skips, inputs, device, j)
        with torch.autograd.set_multithreading_enabled(False):  # its threads let go a bit later
            found.append(probe.measure())
        value, *leaving = probe.outputs
        stashed.update(zip((key for key, _ in skips.leaving), leaving, strict=True))
        del probe, layers
    return found


class _Begin(torch.autograd.Function):
    """Values that need a gradient, from nothing that holds them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (torch.zeros((), device=grads[0].device), *[None] * len(grads))


class _Probe:
    """One partition on a device of its own; ``inputs`` and ``outputs`` are on the CPU."""

    def __init__(
        self,
        gpus: Simulation,
        layers: nn.Sequential,
        skips: PartitionSkips,
        inputs: list[Tensor],
        device: int,
        j: int,
    ) -> None:
        self.gpus, self.layers, self.skips, self.device = gpus, layers, skips, device
        self.inputs, self.outputs, self.j = inputs, list[Tensor](), j
        self.token = torch.zeros((), device=f"cuda:{device}", requires_grad=True)

    def measure(self) -> Alone:
        leaves = [p for p in self.layers.parameters() if p.requires_grad]
        quiet = self._peak(lambda: self._quietly())
        before = self._live()
        batch = self._inputs() if self.j == 0 else []  # partition 0 gets a part of the mini-batch
        base = self._live()
        self._start()
        edges, outputs = self._forward(batch or self._inputs())
        forward = self._most() - base
        sizes = {k: nbytes(y) for k, y in outputs.items()}
        whole = self._live()
        unsaved = {}
        for k in list(outputs):
            outputs[k] = []
            unsaved[k], whole = whole - self._live(), self._live()
        saved = self._live() - base
        first = self._backward(base, edges, None)
        backward = self._again(batch, None)
        step = self._again(batch, leaves)
        self.layers.zero_grad(set_to_none=True)
        del batch, edges, outputs
        assert self._live() == before, "the probe itself keeps something"
        weights = list(self.layers.parameters())
        return Alone(
            nbytes(weights), self._sources(), sizes, unsaved, saved, forward, quiet, backward,
            first, step, max([weight.nbytes for weight in weights], default=0),
        )  # fmt: skip

    def _sources(self) -> dict[int, int]:
        sources = [self.j - 1, *(s for _, s in self.skips.arriving)]
        by: dict[int, int] = {}
        for source, x in zip(sources, self.inputs, strict=True):
            by[source] = by.get(source, 0) + x.nbytes
        return by if self.j > 0 else {}

    def _again(self, batch: list[Tensor], leaves: list[nn.Parameter] | None) -> int:
        base = self._live()
        edges, outputs = self._forward(batch or self._inputs())
        del outputs
        return self._backward(base, edges, leaves)

    def _backward(
        self, base: int, edges: list[Any], leaves: list[nn.Parameter] | None
    ) -> int:
        """The most there is in the backward, from ``base`` on."""
        grads = [torch.ones(shape, device=f"cuda:{self.device}") for _, shape in edges]
        roots = [edge for edge, _ in edges]
        edges.clear()
        self._start()
        if leaves is None:
            torch.autograd.backward(roots, grads)
        else:
            torch.autograd.grad(roots, [self.token, *leaves], grads, allow_unused=True)
        most = self._most() - base
        self.token.grad = None
        return most

    def _quietly(self) -> None:
        with torch.no_grad():
            outputs = self._call(self._inputs())
        self.outputs = [y.detach().cpu() for y in outputs]

    def _forward(self, batch: list[Tensor]) -> tuple[list[Any], dict[int, list[Tensor]]]:
        """Where the backward begins, and the outputs by the partition that they go to."""
        xs = list(batch)
        floats = [k for k, x in enumerate(xs) if x.is_floating_point()]
        if self.j > 0:
            begun: Any = _Begin.apply(  # type: ignore[no-untyped-call]
                self.token, *[xs[k] for k in floats]
            )
            for k, x in zip(floats, begun, strict=True):
                xs[k] = x
            del begun, x
        del batch
        outputs = self._call(xs)
        edges = [(get_gradient_edge(y), y.shape) for y in outputs if y.requires_grad]
        to = [self.j + 1, *(k for _, k in self.skips.leaving)]
        by: dict[int, list[Tensor]] = {}
        for k, y in zip(to, outputs, strict=True):
            by.setdefault(k, []).append(y.detach())
        return edges, by

    def _call(self, xs: list[Tensor]) -> list[Tensor]:
        x, *arriving = xs
        xs.clear()
        if not self.skips:
            return [self._run(x)]
        store = self.skips.store(arriving)
        del arriving
        token = of_task.set(store)
        try:
            y = self._run(x)
            return [y, *(store.send(key) for key, _ in self.skips.leaving)]
        finally:
            store.clear()
            of_task.reset(token)

    def _run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def _inputs(self) -> list[Tensor]:
        return [x.detach().to(f"cuda:{self.device}") for x in self.inputs]

    def _live(self) -> int:
        return self.gpus.live_bytes(self.device)

    def _start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def _most(self) -> int:
        return self.gpus.peak_bytes(self.device)

    def _peak(self, call: Any) -> int:
        base = self._live()
        self._start()
        call()
        return self._most() - base


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Of all storages, each once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
