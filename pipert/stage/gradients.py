"""Sums of gradients of one partition in one step, and how they become ``.grad``.

The standard way is to let autograd add to ``.grad`` in each ``B[i,j]``. Then a step that fails
leaves some of it behind, hooks on parameters see a part of a gradient ``m`` times, and partitions
that share a parameter add in the order in which they happen to come by. So here:

1. Each partition has sums of its own, which its worker alone adds to, in the order of its schedule.
2. When the step has succeeded the caller takes the sums of all partitions, in their order.
3. They are delivered by autograd, in a graph that has nothing but them (:func:`delivery`). So hooks
   of parameters and of ``DistributedDataParallel`` are called as always, a sum becomes ``.grad``
   without a copy where that is possible, and callers on other threads do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipert.autograd.leaves import accumulators

__all__: list[str] = []


@dataclass(slots=True, eq=False)
class _Sum:
    weight: Tensor
    total: Tensor
    is_own: bool = False
    """Whether nobody else has the tensor."""

    def add(self, gradient: Tensor) -> None:
        """Add without changing what others have."""
        if self.total.layout == gradient.layout == torch.strided:
            # In the memory format of the weight, which may live on another device.
            own = torch.empty_like(self.weight, device=gradient.device)
            self.total, self.is_own = torch.add(self.total, gradient, out=own), True
        elif gradient.layout == torch.strided:
            self.total = gradient + self.total  # torch adds sparse to dense, not the other way
        else:
            self.total = self.total + gradient


class Gradients:
    """The sums of one partition. Its worker's; the caller's when all is over."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}  # by id: the hash of a tensor is a call in Python

    def add(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch; ``None`` for a weight that was not used."""
        totals, added = list[Tensor](), list[Tensor]()
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            before = self._sums.get(id(weight))
            if before is None:
                self._sums[id(weight)] = _Sum(weight, gradient)
            elif before.is_own and gradient.layout == torch.strided:
                totals.append(before.total)
                added.append(gradient)
            else:
                before.add(gradient)
        if totals:
            torch._foreach_add_(totals, added)  # of many small ones a call takes most of the time

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all of them: in their place, but for what others have as well."""
        own: dict[torch.device, list[Tensor]] = {}
        for one in self._sums.values():
            if one.is_own and one.total.layout == torch.strided:
                own.setdefault(one.total.device, []).append(one.total)
            else:
                one.total = scaled(one.total, factor)
        for device, totals in own.items():
            torch._foreach_mul_(totals, _on(factor, device))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its sum; leaves nothing behind."""
        sums, self._sums = self._sums, {}
        return [(of_weight.weight, of_weight.total) for of_weight in sums.values()]

    def clear(self) -> None:
        """Let go of everything."""
        self._sums.clear()

    def __repr__(self) -> str:
        return f"<Gradients of {len(self._sums)} weights>"


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tensors[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        result = (None, *ctx.gradients)
        ctx.gradients.clear()
        return result


class _End(torch.autograd.Function):
    """One end in place of one for each device, of which anomaly detection would read the gradients.

    On whatever stream it is. This one has none to read.
    """

    @staticmethod
    def forward(ctx: Any, *ends: Tensor) -> Tensor:
        ctx.count = len(ends)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.count)


def delivery(gradients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The end of a graph whose backward goes on from tensors with the gradient of each.

    The tensors all require grad. All the memory that this takes is allocated here, before any
    gradient arrives. Empties the list: what nobody else has becomes ``.grad`` as it is.
    """
    devices: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    while gradients:
        tensor, gradient = gradients.pop()
        of_device = devices.setdefault(tensor.device, ([], []))
        of_device[0].append(tensor)
        of_device[1].append(gradient)
        del gradient
    ends = []
    for reached, brought in devices.values():
        held = accumulators(reached)  # another caller's layers may be at work with these weights
        ends.append(_Deliver.apply(brought, *reached))  # type: ignore[no-untyped-call]
        del held
    end: Tensor = _End.apply(*ends)  # type: ignore[no-untyped-call]
    return end


def scaled(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """The product, on the device of the gradient and in its dtype."""
    product: Tensor = gradient * _on(factor, gradient.device)
    return product


def _on(factor: float | Tensor, device: torch.device) -> Any:
    return factor.to(device) if isinstance(factor, Tensor) else factor


def gathered(sums: Iterable[Gradients]) -> list[tuple[Tensor, Tensor]]:
    """Each weight and its sum, on its own device, of one partition after the other.

    A weight that several use is there several times: autograd adds, also sparse to dense.
    """
    return [
        (weight, total.to(weight.device))
        for of_partition in sums
        for weight, total in of_partition.take()
    ]
