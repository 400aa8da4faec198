"""Boundary tensors, which stand for those of earlier partitions, and changes of them in place.

Where a tensor ``x`` of an earlier partition is used, it is replaced by its *boundary tensor* ``s``,
which has its values and another graph. The model still holds ``x``, whose graph does not know what
is done to ``s``::

    x[:, 4:] = y      in partition 1: s is changed, and with it the values of x, but not its graph
    z = f(x)          in partition 2

1. In the partition that has changed it, ``x`` is still replaced by ``s``.
2. In a later partition ``x`` is replaced by a boundary tensor for ``s``, as the change has left it.
3. The graph of *another* tensor that shares the memory, such as a view, knows nothing of ``s``: if
   it is used after the change, it is refused. Without a pipe, autograd would track the change,
   because it is made to ``x`` itself.
4. If that tensor was brought into the partition before the change, the change is refused: a layer
   may hold both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pipert._torch import node_count, sequence_nr
from pipert.batch.tensors import describe
from pipert.stage.shared_memory import overlap

__all__: list[str] = []

Key = tuple[Node, int]
"""A tensor's place in the graph."""


class _BoundaryTensor:
    """A boundary tensor, with its version and node when it was made and when it was last used."""

    __slots__ = (
        "first_node", "first_version", "last_node", "last_version", "memory", "since", "tensor",
    )  # fmt: skip

    def __init__(self, original: Tensor, tensor: Tensor) -> None:
        self.tensor = tensor
        self.memory = _memory(original)
        self.first_version = self.last_version = tensor._version
        self.first_node = self.last_node = tensor.grad_fn
        self.since = node_count()

    def has_changed(self) -> bool:
        return self.tensor._version != self.first_version


class BoundaryTensors:
    """The boundary tensors of one micro-batch."""

    def __init__(self) -> None:
        self._current: dict[Key, _BoundaryTensor] = {}  # the current partition's
        self._changed: dict[Key, _BoundaryTensor] = {}  # those that earlier partitions have changed
        self._changes: dict[int, int] = {}  # first node of the partition that changed each memory

    def find(self, key: Key) -> Tensor | None:
        """Return the boundary tensor that a tensor already has in this partition (rule 1)."""
        found = self._current.get(key)
        if found is None:
            return None
        tensor = found.tensor
        if tensor._version != found.last_version:
            if tensor.grad_fn is found.last_node:
                raise _another_name()
            found.last_node, found.last_version = tensor.grad_fn, tensor._version
        return tensor

    def changed(self, key: Key) -> Tensor | None:
        """Return the boundary tensor that an earlier partition has changed, if any (rule 2)."""
        found = self._changed.get(key)
        return None if found is None else found.tensor

    def latest(self, tensor: Tensor) -> Tensor:
        """Return the boundary tensor with the tensor's latest change, or the tensor itself."""
        while (node := tensor.grad_fn) is not None:
            key = node, tensor.output_nr
            found = self._current.get(key) or self._changed.get(key)
            if found is None or not found.has_changed():
                break
            tensor = found.tensor
        return tensor

    def refuse_unseen(self, key: Key, user: Node) -> None:
        """Refuse a node that used a tensor unseen when it had a boundary tensor that was changed.

        It is refused even if the change came after the use. The user was made by this thread, which
        alone holds the tensor, so its number can be compared.
        """
        found = self._changed.get(key)
        if found is not None and sequence_nr(user) > found.since:
            raise RuntimeError(
                "a tensor that one partition has made is changed in place in a later one, and used "
                "in a custom autograd function or compiled code, where a step of a pipe does not "
                "see it; change a clone"
            )

    def refuse_stale(self, tensor: Tensor, number: int) -> None:
        """Refuse a tensor whose node has this number, if its memory was changed later (rule 3)."""
        if not (self._current or self._changes):
            return
        memory = _memory(tensor)
        if number < self._changes.get(memory, 0) or any(
            one.memory == memory and one.has_changed() for one in self._current.values()
        ):
            raise _another_name()

    def add(self, key: Key, tensor: Tensor, entered: Tensor) -> None:
        """Replace ``tensor`` by ``entered`` from now on."""
        self._current[key] = _BoundaryTensor(tensor, entered)

    def end(self, start: int) -> None:
        """End the partition, whose nodes are numbered from ``start``."""
        self._refuse_overlapping()
        for key, one in self._current.items():
            if one.has_changed():
                self._changes[one.memory] = start
                if one.tensor.grad_fn is not one.first_node:
                    self._changed[key] = one
        self._current.clear()

    def _refuse_overlapping(self) -> None:
        """Refuse a change of one of two boundary tensors that share memory (rule 4)."""
        changed = [one for one in self._current.values() if one.has_changed()]
        for one in changed:
            if one.tensor.grad_fn is one.first_node:
                continue  # changed through another tensor, or in a way that the graph does not know
            for other in changed:
                if other is not one and overlap(one.tensor, other.tensor):
                    raise RuntimeError(
                        f"two tensors of an earlier partition, {describe(one.tensor)} and "
                        f"{describe(other.tensor)}, share memory, and one was changed in place: "
                        "the plain module changes both, but a step of a pipe only that one. Change "
                        "a copy (inplace=False), or let the earlier partition clone one of them"
                    )


def refuse_old_base(view: Tensor, numbers: range) -> None:
    """Refuse a view whose base has a node with one of ``numbers``, those of earlier partitions.

    The view was made in an earlier partition, and autograd has since rebuilt its graph, because its
    memory was changed (rule 3).
    """
    base = view._base
    node = None if base is None else base.grad_fn
    if node is not None and sequence_nr(node) in numbers:
        raise _another_name()


def _memory(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    place: int = tensor.untyped_storage()._cdata
    return place


def _another_name() -> RuntimeError:
    return RuntimeError(
        "a tensor that one partition has made is changed in place in a later one, and used under "
        "another name, such as a view: a step of a pipe cannot follow that; change a clone, or "
        "make the view after the change"
    )
