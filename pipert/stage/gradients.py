"""Sums up the gradients of a partition in one step, and delivers the sums to ``.grad``.

The standard way is to let autograd add to ``.grad`` in each ``B[i,j]``. Then a step that fails
leaves partial gradients behind, hooks on parameters see ``m`` parts of a gradient, and partitions
that share a parameter add to it in the order in which they happen to run. So here:

1. Each partition has its own sums. Only its worker adds to them, in the order of its schedule.
2. When the step has succeeded, the caller takes the sums of all partitions, in their order.
3. A sum that no hook or thread can observe becomes ``.grad`` as it is (:func:`split_off`).
4. The others are delivered by autograd, through a graph of nothing else (:func:`delivery`), at ten
   times the cost. So hooks of parameters and of ``DistributedDataParallel`` are called as always,
   and callers on other threads do no harm.
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
"""Tensors, each with the gradient to deliver to it."""


@dataclass(slots=True, eq=False)
class _Sum:
    weight: Tensor
    total: Tensor
    is_own: bool = False
    """Whether nobody else holds the total."""

    def has_become_own(self) -> bool:
        """Whether nobody holds the first gradient any more, which is laid out as the weight."""
        self.is_own = (
            type(self.total) is Tensor
            and self.total.layout == torch.strided
            and self.total.stride() == self.weight.stride()
            and self.total.untyped_storage().nbytes() == self.total.nbytes
            and self.holders() in _NOBODY_ELSE
            and ONE_THREAD_AT_A_TIME
        )
        return self.is_own

    def holders(self) -> tuple[int, ...]:
        """Count who holds the total, its memory, and the tensor of which it is a view."""
        total, storage, base = self.total, self.total.untyped_storage(), self.total._base
        of_total = getrefcount(total), _use_count(total)
        of_storage = getrefcount(storage), _storage_use_count(storage._cdata)
        of_base = () if base is None else (getrefcount(base), _use_count(base))
        return *of_total, *of_storage, *of_base

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient`` out of place, since others may hold the total."""
        if self.total.layout == gradient.layout == torch.strided:
            # In the memory format of the weight, which may live on another device.
            result = torch.empty_like(self.weight, device=gradient.device)
            self.total, self.is_own = torch.add(self.total, gradient, out=result), True
        elif gradient.layout == torch.strided:
            self.total = gradient + self.total  # torch adds sparse to dense, not the other way
        else:
            self.total = self.total + gradient


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
        totals, added = list[Tensor](), list[Tensor]()
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            entry = self._sums.get(id(weight))
            if entry is None:
                self._sums[id(weight)] = _Sum(weight, gradient)
            elif gradient.layout == torch.strided and (entry.is_own or entry.has_become_own()):
                totals.append(entry.total)
                added.append(gradient)
            else:
                entry.add(gradient)  # one by one: a single call would hold all sums twice
        if totals:
            torch._foreach_add_(totals, added)  # for small tensors a call each would dominate

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all sums by ``factor``, in place where nobody else holds them."""
        in_place: dict[torch.device, list[Tensor]] = {}
        for entry in self._sums.values():
            if entry.is_own and entry.total.layout == torch.strided:
                in_place.setdefault(entry.total.device, []).append(entry.total)
            else:
                entry.total = scaled(entry.total, factor)
        for device, totals in in_place.items():
            torch._foreach_mul_(totals, _on(factor, device))

    def take(self) -> Arriving:
        """Return each weight with its sum, and forget them."""
        sums, self._sums = self._sums, {}
        return [(entry.weight, entry.total) for entry in sums.values()]

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()

    def __repr__(self) -> str:
        return f"<Gradients of {len(self._sums)} weights>"


def split_off(arriving: Arriving) -> Arriving:
    """Take out and return the gradients that nobody observes, for :func:`give` to deliver.

    A hook is on the tensor, or on its ``AccumulateGrad``, which holds the tensor while it lives.
    Autograd also delivers a gradient that must be added to another, that somebody else holds, that
    has another layout than the tensor, or that comes in several parts.
    """
    parts = Counter([id(tensor) for tensor, _ in arriving])
    strided, observed, unobserved = torch.strided, Arriving(), Arriving()
    for pair in arriving:
        tensor, gradient = pair
        if (
            getrefcount(gradient) == _UNSHARED_REFERENCES
            and _use_count(gradient) == parts[id(tensor)] == _use_count(tensor) == 1
            and type(tensor) is nn.Parameter
            and not tensor._backward_hooks
            and not tensor._post_accumulate_grad_hooks
            and tensor.grad is None
            and tensor.requires_grad
            and type(gradient) is Tensor
            and gradient.layout is strided is tensor.layout
            and gradient.dtype is tensor.dtype is tensor.grad_dtype
            and gradient.stride() == tensor.stride()
            and ONE_THREAD_AT_A_TIME
        ):
            unobserved.append(pair)
        else:
            observed.append(pair)
    arriving[:] = observed
    return unobserved


def give(gradients: Arriving) -> Arriving:
    """Assign gradients to ``.grad``; return those that somebody has begun to observe meanwhile.

    A backward on another thread holds a lock that Python code cannot take. But none can begin
    between the check of a tensor and the assignment: ``deque`` runs the loop without Python code.
    """
    tensors = [tensor for tensor, _ in gradients]
    are_without_grad = map(operator.is_, map(_grad.__get__, tensors), repeat(None))
    are_unobserved = map(operator.eq, map(_use_count, tensors), repeat(1))
    both = map(operator.and_, are_without_grad, are_unobserved)
    deque(starmap(_grad.__set__, compress(gradients, both)), maxlen=0)
    return [pair for pair in gradients if pair[0].grad is not pair[1]]


def _unshared_references() -> int:
    """Count the references to a gradient in :func:`split_off` that nobody else holds."""
    pairs = [(torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))]
    for pair in pairs:
        tensor, gradient = pair
        count = getrefcount(gradient)
    return count


_UNSHARED_REFERENCES = _unshared_references()
_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_grad: Any = Tensor.grad


def _nobody_else() -> set[tuple[int, ...]]:
    """Count the holders of totals that nobody else holds, one of which is a view."""
    with torch.inference_mode(False):
        weight = torch.empty(0, device="cpu")
        return {
            _Sum(weight, torch.empty(1, 2, device="cpu")).holders(),
            _Sum(weight, torch.empty(1, 2, device="cpu").t()).holders(),
        }


_NOBODY_ELSE = _nobody_else()


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


def scaled(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """Return the product, on the gradient's device and in its dtype."""
    product: Tensor = gradient * _on(factor, gradient.device)
    return product


def _on(factor: float | Tensor, device: torch.device) -> Any:
    return factor.to(device) if isinstance(factor, Tensor) else factor


def gathered(sums: Iterable[Gradients]) -> Arriving:
    """Return each weight with its sum, moved to the weight's device, partition by partition.

    A weight that several partitions use occurs several times: autograd adds, also sparse to dense.
    """
    return [
        (weight, total if total.device == weight.device else total.to(weight.device))
        for partition_sums in sums
        for weight, total in partition_sums.take()
    ]
