"""Boundary tensors, which stand for those of earlier partitions, and changes of them in place.

Where a tensor ``x`` of an earlier partition is used, it is replaced by its *boundary tensor* ``s``,
which has its values, another device or another graph. The model still holds ``x``, which does not
know what is done to ``s``::

    x[:, 4:] = y      in partition 1: s is changed, but not the graph of x
    z = f(x)          in partition 2

1. In the partition that has changed it, ``x`` is still replaced by ``s``.
2. In a later partition ``s`` takes the place of ``x``, as the change has left it.
3. *Another* tensor that shares the memory, such as a view, knows nothing of ``s``: it is refused if
   it is used in a later partition, or overlaps and is used in the same one. Without a pipe,
   autograd would track the change, because it is made to ``x`` itself.
4. A hook that a layer registers on ``s`` would see a part of the gradient, and is refused. In the
   model's own code hooks are registered on ``x``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipert._torch import base_of, sequence_nr, storage_of, tensor_hooks
from pipert.batch.tensors import version
from pipert.stage.shared_memory import overlap


class _Boundary:
    """A boundary tensor, with its version and node, and its original's version, at first."""

    __slots__ = ("first_node", "first_version", "original", "tensor", "version")

    def __init__(self, original: Tensor, tensor: Tensor) -> None:
        self.original, self.tensor = original, tensor
        self.version, self.first_version = version(original), version(tensor)
        self.first_node = tensor.grad_fn

    def has_changed(self) -> bool:
        return version(self.tensor) != self.first_version


class BoundaryTensors:
    """The boundary tensors of one micro-batch.

    Args:
        cuts: whether the graph is cut between partitions, as in a step.
    """

    def __init__(self, cuts: bool) -> None:
        self._cuts = cuts
        self._current: dict[int, _Boundary] = {}  # the partition's, by the id of the original
        self.changed: dict[int, _Boundary] = {}
        """Those that earlier partitions have changed."""
        self._changes: dict[int, int] = {}  # first node of the partition that changed each memory

    def as_left(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of ``tensor`` since an earlier partition (rule 2)."""
        while (changed := self.changed.get(id(tensor))) is not None:
            tensor = changed.tensor
        return tensor

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the boundary tensor that ``tensor`` already has in this partition (rule 1)."""
        found = self._current.get(id(tensor))
        if found is None or not self._cuts and found.version != version(tensor):
            return None
        return found.tensor

    def with_whole_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose gradient is the sum over all partitions (rule 4)."""
        tensor = self.as_left(tensor)
        found = self._current.get(id(tensor))
        return tensor if found is None or not found.has_changed() else found.tensor

    def add(self, tensor: Tensor, entered: Tensor) -> None:
        """Replace ``tensor`` by ``entered`` from now on."""
        start = self._changes.get(memory_of(tensor)) if self._changes else None
        if start is not None and not (self._cuts and sequence_nr(tensor.grad_fn) >= start):
            raise RuntimeError(_ANOTHER_NAME)
        self._current[id(tensor)] = _Boundary(tensor, entered)

    def refuse_old_base(self, view: Tensor, earlier: range) -> None:
        """Refuse a view of an earlier tensor, of which autograd has rebuilt the graph (rule 3)."""
        base = base_of(view)
        node = None if base is None else base.grad_fn
        if node is not None and sequence_nr(node) in earlier:
            raise RuntimeError(_ANOTHER_NAME)

    def end(self, start: int) -> None:
        """End the partition, whose nodes are numbered from ``start``."""
        changed = [one for one in self._current.values() if one.has_changed()]
        for one in changed:
            for other in self._current.values():
                if other is not one and overlap(one.original, other.original):
                    raise RuntimeError(_ANOTHER_NAME)
        for key, one in self._current.items():
            is_tracked = one.tensor.grad_fn is not one.first_node
            if one.tensor.requires_grad and not is_tracked:
                if tensor_hooks(one.tensor) or one.tensor.retains_grad:
                    raise RuntimeError(_HOOKED)
            if one.has_changed():
                self._changes[memory_of(one.original)] = start
                if is_tracked or one.first_node is None or not self._cuts:
                    self.changed[key] = one
        self._current.clear()


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory have in common."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage_of(tensor)


_ANOTHER_NAME = (
    "a tensor that one partition has made is changed in place in a later one, and used under "
    "another name, such as a view, which a pipe cannot follow; change a clone (inplace=False), or "
    "make the view after the change"
)
_HOOKED = (
    "a layer registers a hook on its argument, or retains its gradient, but the argument is a "
    "tensor of an earlier partition, so that the layer would see a part of the gradient; do that "
    "in the model's own code, or with a clone in the layer"
)
