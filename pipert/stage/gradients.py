"""Sums of gradients of one partition in one step, and how they become ``.grad``.

The standard way is to let autograd add to ``.grad`` in each ``B[i,j]``. Then a step that fails
leaves some of it behind, hooks on parameters see a part of a gradient ``m`` times, and partitions
that share a parameter add in the order in which they happen to come by. So here:

1. Each partition has sums of its own, which its worker alone adds to, in the order of its schedule.
2. When the step has succeeded the caller takes the sums of all partitions, in their order.
3. Where nobody listens, a sum becomes ``.grad`` as it is (:func:`split_off`).
4. The others are delivered by autograd, in a graph that has nothing but them (:func:`delivery`), at
   ten times the price. So hooks of parameters and of ``DistributedDataParallel`` are called as
   always, and callers on other threads do no harm.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat, starmap
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

from pipert.autograd.leaves import accumulators
from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME

__all__: list[str] = []

Arriving = list[tuple[Tensor, Tensor]]
"""Tensors that want a gradient, each with one."""


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
        if len({*map(id, weights)}) < len(weights):  # one that is used beside what stands for it
            for weight, gradient in zip(weights, gradients, strict=True):
                self.add((weight,), (gradient,))
            return
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
                before.add(gradient)  # one by one: in one call all sums would be there twice
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

    def take(self) -> Arriving:
        """Each weight with its sum; leaves nothing behind."""
        sums, self._sums = self._sums, {}
        return [(of_weight.weight, of_weight.total) for of_weight in sums.values()]

    def clear(self) -> None:
        """Let go of everything."""
        self._sums.clear()

    def __repr__(self) -> str:
        return f"<Gradients of {len(self._sums)} weights>"


def split_off(arriving: Arriving) -> Arriving:
    """Take those out that nobody listens to: :func:`give` is enough for them.

    A hook is on the tensor, or on its ``AccumulateGrad``, which holds the tensor while it lives.
    What is to be added to a gradient, what somebody else has as well, or what is laid out in
    another way, is left to autograd; so is what comes in several parts.
    """
    parts = Counter([id(tensor) for tensor, _ in arriving])
    strided, heard, unheard = torch.strided, Arriving(), Arriving()
    for pair in arriving:
        tensor, gradient = pair
        if (
            getrefcount(gradient) == _ALONE
            and _use_count(gradient) == parts[id(tensor)] == _use_count(tensor) == 1
            and type(tensor) is nn.Parameter
            and not tensor._backward_hooks
            and not tensor._post_accumulate_grad_hooks
            and tensor.grad is None
            and tensor.requires_grad
            and type(gradient) is Tensor
            and gradient.layout is strided is tensor.layout
            and gradient.dtype is tensor.dtype
            and gradient.stride() == tensor.stride()
            and ONE_THREAD_AT_A_TIME
        ):
            unheard.append(pair)
        else:
            heard.append(pair)
    arriving[:] = heard
    return unheard


def give(gradients: Arriving) -> Arriving:
    """Let gradients become ``.grad`` as they are. Returns those of which somebody hears meanwhile.

    A thread that goes backward takes a lock that Python has not. It cannot begin to between the
    look at a tensor and the gift: nothing here but the loop of ``deque`` is Python.
    """
    tensors = [tensor for tensor, _ in gradients]
    without = map(operator.is_, map(_grad.__get__, tensors), repeat(None))
    unheard = map(operator.eq, map(_use_count, tensors), repeat(1))
    both = map(operator.and_, without, unheard)
    deque(starmap(_grad.__set__, compress(gradients, both)), maxlen=0)
    return [pair for pair in gradients if pair[0].grad is not pair[1]]


def _references() -> int:
    """How many references a gradient has in :func:`split_off` that nobody else has."""
    pairs = [(torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))]
    for pair in pairs:
        tensor, gradient = pair
        found = getrefcount(gradient)
    return found


_ALONE = _references()
_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_grad: Any = Tensor.grad


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


def delivery(gradients: Arriving) -> Tensor:
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


def gathered(sums: Iterable[Gradients]) -> Arriving:
    """Each weight and its sum, on its own device, of one partition after the other.

    A weight that several use is there several times: autograd adds, also sparse to dense.
    """
    return [
        (weight, total if total.device == weight.device else total.to(weight.device))
        for of_partition in sums
        for weight, total in of_partition.take()
    ]
