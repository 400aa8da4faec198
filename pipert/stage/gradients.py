"""Sums up the gradients of a partition in one step, and delivers the sums to ``.grad``.

The standard way is to let autograd add to ``.grad`` in each ``B[i,j]``. Then a step that fails
leaves partial gradients behind, hooks on parameters see ``m`` parts of a gradient, and partitions
that share a parameter add to it in the order in which they happen to run. So here:

1. Each partition has its own sums. Only its worker adds to them, in the order of its schedule.
2. When the step has succeeded, the caller takes the sums of all partitions, in their order.
3. Autograd delivers them, through a graph of nothing else (:func:`delivery`). So hooks of
   parameters and of ``DistributedDataParallel`` are called as always.
4. What is delivered has memory of its own, which autograd makes the ``.grad`` if there is none. A
   gradient that came from a graph may share its memory with other gradients, or with whatever a
   layer keeps, so a sum of only one is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import add_in_place
from pipert.autograd import streams
from pipert.autograd.leaves import accumulators

_PLAIN = {Tensor, nn.Parameter}
Arriving = list[tuple[Tensor, Tensor]]
"""Tensors, each with the gradient to deliver to it."""


@dataclass(slots=True, eq=False)
class _Sum:
    weight: Tensor
    total: Tensor
    is_own: bool = False
    """Whether the total was computed here, so that nobody else has its memory."""

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient`` out of place, since others may hold the total."""
        if _are_plain(self.total, gradient) and type(self.weight) in _PLAIN:
            # In the memory format of the weight, which may live on another device. Tensors of other
            # classes have no ``empty_like``.
            like = {"dtype": self.total.dtype, "device": gradient.device}
            result = torch.empty_like(self.weight, **like)  # type: ignore[arg-type]
            self.total = torch.add(self.total, gradient, out=result)
        elif gradient.layout == torch.strided:
            self.total = gradient + self.total  # torch adds sparse to dense, not the other way
        else:
            self.total = self.total + gradient
        self.is_own = True


def _are_plain(total: Tensor, gradient: Tensor) -> bool:
    """Return whether both are dense, and of no other class."""
    strided = total.layout == gradient.layout == torch.strided
    return strided and type(total) in _PLAIN and type(gradient) in _PLAIN


class Gradients:
    """The sums of one partition. Used by its worker, and by the caller after the run."""

    __slots__ = ("_sums", "stand_ins")

    def __init__(self) -> None:
        self.stand_ins: dict[Tensor, Tensor] = {}  # from a leaf to the tensor that it stands for
        self._sums: dict[int, _Sum] = {}  # by id: the hash of a tensor is a call in Python

    def add(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch; ``None`` for a leaf that was not used."""
        weights = leaves
        if self.stand_ins:
            weights = [self.stand_ins.get(leaf, leaf) for leaf in leaves]
        if len({*map(id, weights)}) < len(weights):  # a weight is used beside its stand-in
            for weight, gradient in zip(weights, gradients, strict=True):
                self.add((weight,), (gradient,))
            return
        # Autograd may have added up a gradient on the stream on which its leaf was first used (D1).
        streams.record([gradient for gradient in gradients if gradient is not None])
        totals, added = list[Tensor](), list[Tensor]()
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            entry = self._sums.get(id(weight))
            if entry is None:
                self._sums[id(weight)] = _Sum(weight, gradient)
            elif entry.is_own and _are_plain(entry.total, gradient):
                totals.append(entry.total)
                added.append(gradient)
            else:
                entry.add(gradient)  # one by one: a single call would hold all sums twice
        if totals:  # of one class, as torch adds no DTensor beside others
            add_in_place(totals, added)  # for small tensors a call each would dominate

    def take(self) -> Arriving:
        """Return each weight with its sum, on the weight's device, in memory that nobody else has.

        Each is forgotten as it is copied.
        """
        taken = []
        while self._sums:
            entry = self._sums.pop(next(iter(self._sums)))
            total = entry.total.to(entry.weight.device, copy=not entry.is_own)
            taken.append((entry.weight, total))
        return taken

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return torch.empty((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        result = (None, *ctx.gradients)
        ctx.gradients.clear()
        return result


class _End(torch.autograd.Function):
    """Joins the ends of all devices into one.

    With an end per device, anomaly detection would read the gradients of each, on whatever stream
    is current. This one has none to read.
    """

    @staticmethod
    def forward(ctx: Any, *ends: Tensor) -> Tensor:
        ctx.count = len(ends)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.count)


def delivery(gradients: Arriving) -> Tensor:
    """Return the end of a graph whose backward continues from each tensor with its gradient.

    All tensors require grad. All the memory needed is allocated here, before any gradient arrives.
    The list is emptied, so that a gradient nobody else holds can become ``.grad`` as it is.
    """
    devices: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    while gradients:
        tensor, gradient = gradients.pop()
        on_device = devices.setdefault(tensor.device, ([], []))
        on_device[0].append(tensor)
        on_device[1].append(gradient)
        del gradient
    ends = []
    for targets, delivered in devices.values():
        held = accumulators(targets)  # another caller's layers may be at work with these weights
        ends.append(_Deliver.apply(delivered, *targets))  # type: ignore[no-untyped-call]
        del held
    end: Tensor = _End.apply(*ends)  # type: ignore[no-untyped-call]
    return end
