"""What a checkpointed task has been given, as it was before its layers ran."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pipert._typing import Tensors, Value
from pipert.batch.tensors import describe, tensors_of, version

__all__: list[str] = []


def leaves(xs: Tensors) -> Tensors:
    """Begin a graph whose leaves are ``xs``."""
    return tuple([x.requires_grad_() for x in xs])


class Inputs:
    """The tensors of a value without the graph that made them, to compute with again.

    The layers get copies, so that an in-place first layer cannot corrupt them. If anything else has
    changed them they are refused, as autograd does.

    Args:
        value: any pytree.
    """

    __slots__ = ("_rebuild", "_tensors", "_versions", "_wanting")

    def __init__(self, value: Value) -> None:
        tensors, self._rebuild = tensors_of(value)
        self._tensors = [tensor.detach() for tensor in tensors]
        self._wanting = [k for k, tensor in enumerate(tensors) if tensor.requires_grad]
        self._versions = list(map(version, tensors))

    def fresh(self, begin: Callable[[Tensors], Tensors] = leaves) -> Value:
        """Return the value with copies, no leaves, which layers may change in place.

        Args:
            begin: begins the graph, from detached tensors that want a gradient.

        Raises:
            RuntimeError: an input was changed in place.
        """
        for tensor, before in zip(self._tensors, self._versions, strict=True):
            if version(tensor) != before:
                raise RuntimeError(
                    "an input of a checkpointed partition was modified in place between its "
                    f"forward and its recomputation: {describe(tensor)}; clone it before modifying "
                    "it"
                )
        tensors = [tensor.detach() for tensor in self._tensors]
        if self._wanting:
            begun = begin(tuple([tensors[k] for k in self._wanting]))
            for k, tensor in zip(self._wanting, begun, strict=True):
                tensors[k] = tensor
        return self._rebuild(tuple(map(Tensor.clone, tensors)))

    def __repr__(self) -> str:
        return f"<{len(self._tensors)} inputs>"
