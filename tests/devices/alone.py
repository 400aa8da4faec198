"""Measures the memory that one partition needs for one micro-batch, alone on one device.

Without a pipe, threads or checkpoints: the layers are called one after the other on an otherwise
empty device, whose live bytes are read. The result is the memory *required*, whatever a pipe
does. Skips are passed in and taken out as the layers yield them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipert.recompute.effects import sampled
from pipert.skip.declarations import keys_of
from pipert.skip.store import Key, Store, of_task
from tests.simulated_gpus.simulation import Simulation

__all__ = ["Alone", "alone", "nbytes"]


class Alone(NamedTuple):
    """Bytes that one partition needs for one micro-batch, besides its weights and ``.grad``.

    The mini-batch belongs to the caller: the input of partition 0 is never counted.
    """

    weights: int
    largest: int
    """Bytes of the largest weight."""
    inputs: dict[int, int]
    """Bytes received, by sending partition: the value, and the skips that this one pops."""
    outputs: dict[int, int]
    """Bytes sent, by receiving partition: the value to the next one, skips to those that pop."""
    unsaved: dict[int, int]
    """Bytes of the outputs that this partition's own backward does not need, likewise."""
    saved: int
    """Bytes kept from the forward to the backward."""
    forward: int
    """Peak of a forward."""
    quiet: int
    """Peak of a forward that saves nothing."""
    backward: int
    """Peak of a backward that adds to an existing ``.grad``."""
    first: int
    """Peak of a backward that creates ``.grad``, which is counted here."""
    step: int
    """Peak of a backward that returns the gradients of all weights at once."""
    samples: int
    """Bytes of two samples of each output: a forward and its recomputation are compared by them."""

    @property
    def given(self) -> int:
        """Bytes of all inputs."""
        return sum(self.inputs.values())

    @property
    def sent(self) -> int:
        """Bytes of all outputs."""
        return sum(self.outputs.values())


class _Skips(NamedTuple):
    """The skips of one partition."""

    arriving: list[tuple[Key, int]]
    """Those that it pops, each with the partition that it comes from."""
    leaving: list[tuple[Key, int]]
    """Those that later partitions pop, each with the next of them."""


def _skips(partitions: Sequence[nn.Sequential]) -> list[_Skips]:
    """Returns the skips of each partition, in the order of their stashes."""
    keys = [*map(keys_of, partitions)]
    found = [_Skips([], []) for _ in keys]
    for key in keys_of(nn.Sequential(*partitions)):
        on_its_way = [j for j, each in enumerate(keys) if key in each]
        for j, k in itertools.pairwise(on_its_way):
            found[j].leaving.append((key, k))
            found[k].arriving.append((key, j))
    return found


def alone(
    gpus: Simulation, partitions: Sequence[nn.Sequential], x: Tensor, device: int
) -> list[Alone]:
    """Measures each partition; ``x`` is the micro-batch that the first one receives."""
    found, value, stashed = list[Alone](), x, dict[Key, Tensor]()
    for j, (partition, skips) in enumerate(zip(partitions, _skips(partitions), strict=True)):
        layers = copy.deepcopy(partition).to(f"cuda:{device}")
        layers.zero_grad(set_to_none=True)
        inputs = [value, *(stashed[key] for key, _ in skips.arriving)]
        probe = _Probe(gpus, layers, skips, inputs, device, j)
        with torch.autograd.set_multithreading_enabled(False):  # its threads free memory later
            found.append(probe.measure())
        value, *leaving = probe.outputs
        stashed.update(zip((key for key, _ in skips.leaving), leaving, strict=True))
        del probe, layers
    return found


class _Begin(torch.autograd.Function):
    """Makes values require a gradient, with a graph that does not hold them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (torch.zeros((), device=grads[0].device), *[None] * len(grads))


class _Probe:
    """A partition on its own device; ``inputs`` and ``outputs`` are on the CPU."""

    def __init__(
        self,
        gpus: Simulation,
        layers: nn.Sequential,
        skips: _Skips,
        inputs: list[Tensor],
        device: int,
        j: int,
    ) -> None:
        self.gpus, self.layers, self.skips, self.device = gpus, layers, skips, device
        self.inputs, self.outputs, self.j = inputs, list[Tensor](), j
        self.token = torch.zeros((), device=f"cuda:{device}", requires_grad=True)

    def measure(self) -> Alone:
        leaves = [p for p in self.layers.parameters() if p.requires_grad]
        quiet = self._peak(self._forward_without_grad)
        before = self._live()
        batch = self._inputs() if self.j == 0 else []  # partition 0 reads the caller's mini-batch
        base = self._live()
        self._reset_peak()
        edges, outputs = self._forward(batch or self._inputs())
        forward = self._peak_bytes() - base
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
            nbytes(weights), max([w.nbytes for w in weights], default=0), self._sources(), sizes,
            unsaved, saved, forward, quiet, backward, first, step, self._samples(),
        )  # fmt: skip

    def _samples(self) -> int:
        values = [one[2] for y in self.outputs for one in sampled([y.requires_grad_()])]
        return 2 * nbytes([one for one in values if one is not None])

    def _sources(self) -> dict[int, int]:
        sources = [self.j - 1, *(s for _, s in self.skips.arriving)]
        sizes: dict[int, int] = {}
        for source, x in zip(sources, self.inputs, strict=True):
            sizes[source] = sizes.get(source, 0) + x.nbytes
        return sizes if self.j > 0 else {}

    def _again(self, batch: list[Tensor], leaves: list[nn.Parameter] | None) -> int:
        base = self._live()
        edges, outputs = self._forward(batch or self._inputs())
        del outputs
        return self._backward(base, edges, leaves)

    def _backward(
        self, base: int, edges: list[Any], leaves: list[nn.Parameter] | None
    ) -> int:
        """Returns the peak of the backward, above ``base``."""
        grads = [torch.ones(shape, device=f"cuda:{self.device}") for _, shape in edges]
        roots = [edge for edge, _ in edges]
        edges.clear()
        self._reset_peak()
        if leaves is None:
            torch.autograd.backward(roots, grads)
        else:
            torch.autograd.grad(roots, [self.token, *leaves], grads, allow_unused=True)
        peak = self._peak_bytes() - base
        self.token.grad = None
        return peak

    def _forward_without_grad(self) -> None:
        with torch.no_grad():
            outputs = self._call(self._inputs())
        self.outputs = [y.detach().cpu() for y in outputs]

    def _forward(self, batch: list[Tensor]) -> tuple[list[Any], dict[int, list[Tensor]]]:
        """Returns the edges where the backward begins, and the outputs by receiving partition."""
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
        sent: dict[int, list[Tensor]] = {}
        for k, y in zip(to, outputs, strict=True):
            sent.setdefault(k, []).append(y.detach())
        return edges, sent

    def _call(self, xs: list[Tensor]) -> list[Tensor]:
        x, *arriving = xs
        xs.clear()
        pairs = zip(self.skips.arriving, arriving, strict=True)
        store = Store({key: skip for (key, _), skip in pairs})
        arriving.clear()
        token = of_task.set(store)
        try:
            y = self._run(x)
            skips = store.skips()
            return [y, *(skips[key] for key, _ in self.skips.leaving)]
        finally:
            of_task.reset(token)

    def _run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def _inputs(self) -> list[Tensor]:
        return [x.detach().to(f"cuda:{self.device}") for x in self.inputs]

    def _live(self) -> int:
        return self.gpus.live_bytes(self.device)

    def _reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def _peak_bytes(self) -> int:
        return self.gpus.peak_bytes(self.device)

    def _peak(self, call: Any) -> int:
        base = self._live()
        self._reset_peak()
        call()
        return self._peak_bytes() - base


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
