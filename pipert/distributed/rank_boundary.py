"""Sends values from one rank's partition to the next: a header on CPU, then the tensors' bytes.

torch's stages send tuples of tensors of the same shapes for each micro-batch. A value here is any
pytree together with the skips that travel along, and no two micro-batches need be alike:

1. The header has the value with a meta tensor for each tensor, so it tells the structure, whatever
   is no tensor, and each tensor's shape, dtype, strides and ``requires_grad``. The receiver
   allocates by it. Of a partition that has failed it says so, and no tensor follows.
2. A tensor is sent as the bytes of its memory, since not every backend accepts every dtype. So a
   dense tensor keeps its memory format, such as ``channels_last``. One that occurs twice is sent
   once.
3. Tensors that shared memory no longer do behind the boundary. They may be read there, but not
   changed in place, as the plain module would change both. The header says which these are.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.batch.tensors import tensors_of
from pipert.stage.shared_memory import find_shared


class Parcel(NamedTuple):
    """A value ready to be sent."""

    header: bytes
    tensors: Sequence[Tensor]
    """Its tensors, dense and without a graph."""


FAILED = b"failed"
"""The header that a partition sends after a failure."""


def pack(value: Value) -> Parcel:
    """Make a parcel of the output of a partition."""
    tensors, rebuild = tensors_of(value)
    if sparse := [t.layout for t in tensors if t.layout != torch.strided]:
        raise TypeError(f"a tensor of layout {sparse[0]} cannot be sent to a rank; make it dense")
    metas = tuple([torch.empty_like(t, device="meta", requires_grad=t.requires_grad)
                   for t in tensors])  # fmt: skip
    structure = pickle.dumps(rebuild(metas))
    header = pickle.dumps((metas, structure, find_shared(value)))
    return Parcel(header, list(map(_dense_like, tensors, metas)))


class Arrived:
    """A value that arrives from another partition.

    Args:
        header: the header of its parcel.
        device: where its tensors belong.
        tensors: these, if they are on this rank already; else memory is allocated for them.
    """

    def __init__(self, header: bytes, device: torch.device, tensors: Sequence[Tensor]) -> None:
        metas, self._structure, self.shared = pickle.loads(header)
        self.tensors = tensors or [_empty_like(meta, device) for meta in metas]
        self._grads = [meta.requires_grad and torch.is_grad_enabled() for meta in metas]

    def rebuild(self, tensors: Tensors) -> Value:
        """Return the value with these tensors; this alone runs code of the value's classes."""
        return tensors_of(pickle.loads(self._structure))[1](tensors)

    def leaves(self) -> Tensors:
        """Return the tensors; those that required grad are leaves that do."""
        pairs = zip(self.tensors, self._grads, strict=True)
        return tuple([tensor.requires_grad_(grad) for tensor, grad in pairs])

    def gradients(self, dxs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients to send back of leaves that came with grad: zeros where ``None``."""
        # Not of all that require grad now, which a layer that changes a leaf in place may cause.
        leaves = [leaf for leaf, grad in zip(self.tensors, self._grads, strict=True) if grad]
        return [
            torch.zeros_like(leaf) if dx is None else _dense_like(dx, leaf)
            for leaf, dx in zip(leaves, dxs, strict=True)
        ]


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _dense_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor without a graph, in memory laid out as that of ``like``."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:  # a gradient
        tensor = tensor.to_dense()
    if tensor.stride() == like.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return _empty_like(like, tensor.device).copy_(tensor)


def transfers(
    operation: Callable[..., dist.Work | None],
    tensors: Iterable[Tensor],
    rank: int,
    group: dist.ProcessGroup,
) -> list[dist.P2POp]:
    """Return operations that send dense tensors to a rank, or receive them from it, as bytes."""
    memories = [t.detach().as_strided((t.numel(),), (1,)) for t in tensors if t.numel()]
    return [dist.P2POp(operation, m.view(torch.uint8), rank, group) for m in memories]
