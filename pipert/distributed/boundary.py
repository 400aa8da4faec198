"""Packs the values that cross a partition boundary into tensors of constant shape.

torch's stages send tuples of tensors with the same shapes for each micro-batch. A value here is any
pytree together with the skips that travel along, and micro-batches may differ in rows:

1. The value's tensors are sent; one that occurs twice is sent once. The rest of the pytree travels
   when the ranks meet a new shape, and must not change from then on.
2. A tensor whose shape differs between micro-batches is flattened, padded to the size of the
   largest, and cut to size behind the boundary. This is exact, whatever the loss.
3. Complex numbers are sent as pairs of real numbers, through which gradients come back. Other
   dtypes that are not floating-point are sent as the bytes of floats, since not every backend and
   not every version of torch's stages accepts each dtype.
4. A dense tensor arrives in the memory format that it left in, such as ``channels_last``, so that
   random tensors like it, and results computed from it, are as in one process.
5. Tensors that shared memory no longer do behind the boundary. They may be read there, but not
   changed in place, as the plain module would change both.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.batch.tensors import describe, tensors_of
from pipert.stage.shared_memory import Shared, find_shared

__all__: list[str] = []


class Sample(NamedTuple):
    """A value at a boundary, as it travels when the ranks meet a new shape."""

    value: Value
    """The value, detached and on CPU."""
    grads: tuple[bool, ...]
    """Whether each of its tensors requires grad."""
    shared: Shared
    """Which of its tensors share memory, or did when they left the layer that made them."""

    def on(self, device: torch.device) -> Value:
        """Return the value on ``device``, with leaves for the tensors that require grad."""
        tensors, rebuild = tensors_of(self.value)
        pairs = zip(tensors, self.grads, strict=True)
        return rebuild(tuple([t.to(device).requires_grad_(grad) for t, grad in pairs]))


def sample_of(value: Value, handed_on: Shared) -> Sample:
    """Make a sample of a value, which stays as it is.

    Args:
        value: the output of a partition.
        handed_on: which of its tensors shared memory before they came to this partition.
    """
    tensors, rebuild = tensors_of(value)
    detached = rebuild(tuple([tensor.detach().cpu() for tensor in tensors]))
    grads = tuple([tensor.requires_grad for tensor in tensors])
    return Sample(detached, grads, {**handed_on, **find_shared(value)})


class Boundary:
    """Packs and unpacks values between partitions ``j - 1`` and ``j``, for one shape of mini-batch.

    Args:
        j: the partition that receives.
        samples: a value for each kind of micro-batch.
        kinds: for each micro-batch, the index of the sample of its kind.

    Raises:
        TypeError: a value cannot be sent, or the samples differ in their tensors' number, dtypes or
            ``requires_grad``.
    """

    def __init__(self, j: int, samples: Sequence[Sample], kinds: Sequence[int]) -> None:
        self._name = f"between partitions {j - 1} and {j}"
        self._kinds = kinds
        parts = [tensors_of(sample.value) for sample in samples]
        self._rebuild = [rebuild for _, rebuild in parts]
        self._shapes = [[tensor.shape for tensor in tensors] for tensors, _ in parts]
        self._orders = [[_dim_order(tensor) for tensor in tensors] for tensors, _ in parts]
        self._inverses = [[_inverse(order) for order in orders] for orders in self._orders]
        self._frames = [_frame(sample.value) for sample in samples]
        self._dtypes = [tensor.dtype for tensor in parts[0][0]]
        for (tensors, _), sample in zip(parts, samples, strict=True):
            for tensor in tensors:
                if tensor.layout != torch.strided or tensor.is_nested:
                    raise TypeError(f"{describe(tensor)} {self._name} is not dense: {_REMEDY}")
            same = [tensor.dtype for tensor in tensors] == self._dtypes
            if not same or sample.grads != samples[0].grads:
                raise TypeError(
                    f"what crosses {self._name} differs between micro-batches: "
                    f"{describe(samples[0].value)} and {describe(sample.value)}; {_REMEDY}"
                )
        self._grads = samples[0].grads
        self._shared = [sample.shared for sample in samples]
        self._laid_out = [
            [_laid_out(shape, order) for shape, order in zip(*of_kind, strict=True)]
            for of_kind in zip(self._shapes, self._orders, strict=True)
        ]
        columns = zip(self._dtypes, *self._laid_out, strict=True)
        self._sent = [_sent_as(dtype, shapes) for dtype, *shapes in columns]
        metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self._sent]
        pairs = zip(metas, self._grads, strict=True)
        self.metas = tuple([t.requires_grad_(grad) for t, grad in pairs])
        """Meta tensors like those that are sent for each micro-batch."""

    def pack(self, i: int, value: Value) -> Tensors:
        """Return the tensors to send for a value of micro-batch ``i``.

        Raises:
            TypeError: the value has changed since the ranks met this shape: its structure, or its
                tensors' shapes, dtypes or ``requires_grad``.
        """
        kind = self._kinds[i]
        tensors, _ = tensors_of(value)
        shapes = [tensor.shape for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        if shapes != self._shapes[kind] or dtypes != self._dtypes:
            raise TypeError(
                f"{describe(value)} crosses {self._name}, where a micro-batch of the same shape "
                f"had other tensors: {_REMEDY}"
            )
        if any(t.requires_grad and not g for t, g in zip(tensors, self._grads, strict=True)):
            raise TypeError(
                f"{describe(value)} {self._name} requires grad, and did not when a micro-batch of "
                f"the same shape came first: {_REMEDY}"
            )
        if not _equal(_frame(value), self._frames[kind]):
            raise TypeError(
                f"what is no tensor in the value {self._name} has changed: {_frame(value)}, and "
                f"{self._frames[kind]} when a micro-batch of the same shape came first; let it be "
                "a tensor, or compute it where it is used"
            )
        laid_out = map(_permuted, tensors, self._orders[kind])
        return tuple([_packed(t, *sent) for t, sent in zip(laid_out, self._sent, strict=True)])

    def shared(self, i: int) -> Shared:
        """Return which tensors of micro-batch ``i`` shared memory before they were packed."""
        return self._shared[self._kinds[i]]

    def unpack(self, i: int, tensors: Tensors) -> Value:
        """Return the value of micro-batch ``i`` that was packed into ``tensors``."""
        kind = self._kinds[i]
        laid_out = map(_unpacked, tensors, self._laid_out[kind], self._dtypes)
        return self._rebuild[kind](tuple(map(_permuted, laid_out, self._inverses[kind])))

    def __repr__(self) -> str:
        return f"<Boundary {self._name}>"


_REMEDY = (
    "torch's stages send the same dense tensors for each micro-batch of a shape. Choose a balance "
    "that does not cut here"
)


def _frame(value: Value) -> Value:
    """Return the value with each tensor replaced by its number."""
    tensors, rebuild = tensors_of(value)
    numbered: Any = tuple([f"tensor {k}" for k in range(len(tensors))])
    return rebuild(numbered)


def _equal(frame: Value, known: Value) -> bool:
    """Compare frames; objects without a usable ``==``, such as NaN, by their pickled bytes."""
    return bool(frame == known) or pickle.dumps(frame) == pickle.dumps(known)


def _dim_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in their order in memory; empty if in order, or if not dense."""
    order: tuple[int, ...] = torch.empty_like(tensor, device="meta").dim_order()
    return () if list(order) == sorted(order) else order


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


def _laid_out(shape: torch.Size, order: tuple[int, ...]) -> torch.Size:
    """Return the shape with its dimensions in their order in memory."""
    return torch.Size([shape[dim] for dim in order]) if order else shape


def _permuted(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    return tensor.permute(order) if order else tensor


def _sent_as(dtype: torch.dtype, shapes: Sequence[torch.Size]) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype in which a tensor is sent that has one of these shapes."""
    if dtype.is_complex:
        shapes, dtype = [torch.Size([*shape, 2]) for shape in shapes], dtype.to_real()
    if dtype.is_floating_point:
        alike = all(shape == shapes[0] for shape in shapes)
        return shapes[0] if alike else torch.Size([max(map(prod, shapes))]), dtype
    size = max(map(prod, shapes)) * dtype.itemsize
    return torch.Size([-(-size // torch.float32.itemsize)]), torch.float32


def _packed(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == dtype and tensor.shape == shape:
        return tensor.contiguous()
    flat = tensor.flatten()
    if tensor.dtype == dtype:
        return F.pad(flat, (0, prod(shape) - flat.numel()))
    flat = flat.view(torch.uint8)
    return F.pad(flat, (0, prod(shape) * dtype.itemsize - flat.numel())).view(dtype)


def _unpacked(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(_unpacked(tensor, torch.Size([*shape, 2]), dtype.to_real()))
    if tensor.dtype != dtype:
        tensor = tensor.detach().view(torch.uint8)[: prod(shape) * dtype.itemsize].view(dtype)
    return tensor if tensor.shape == shape else tensor[: prod(shape)].view(shape)
