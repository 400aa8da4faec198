"""Exempts a layer from recomputation: ``R[i,j]`` takes what the layer returned in ``F[i,j]``.

A partition of an ``nn.Sequential`` is recomputed as a whole. So an exempt layer in it is called in
``F[i,j]`` alone, where it saves tensors as without checkpointing. Its output is copied, and
``R[i,j]`` goes on with the copy. For that

1. the graph of ``F[i,j]`` stays, and ``R[i,j]`` fills in what the other layers save
   (``autograd.checkpoint``, rule 4), so gradients pass through the layer's one and only graph;
2. the input that the layer would get in ``R[i,j]`` is compared with that of ``F[i,j]``, since what
   comes before it has no effect on the output of ``R[i,j]``;
3. it draws random numbers apart, so that those behind it repeat without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from torch import nn

from pipert._typing import Value
from pipert.autograd.hooks import Forget, without_hooks
from pipert.batch.tensors import tensors_of
from pipert.layers.effects import Effect
from pipert.layers.phase import checkpointing
from pipert.layers.random_numbers import drawing_apart

__all__ = ["never_recompute"]

M = TypeVar("M", bound=nn.Module)

_MARK = "_pipert_never_recompute"


def never_recompute(layer: M) -> M:
    """Exempt ``layer`` from recomputation, whatever ``checkpoint`` says; return it.

    It runs once for each micro-batch and keeps what it saves. All other layers are recomputed as
    before. For a layer that cannot do the same twice, or is expensive and saves little.

    >>> model = nn.Sequential(nn.Linear(8, 8), never_recompute(nn.Dropout()), nn.Linear(8, 8))

    A layer is exempt as a whole, also if a module inside it was marked; marking a module around
    layers marks these. May be called before or after the pipe is made. Copies and pickles are
    marked, too; ``state_dict()`` and ``forward`` stay as they are. It must not stash skips.
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"layer must be a module, such as model.get_submodule(name), got {layer!r}")
    for module in layer.modules():
        module.__dict__[_MARK] = True
    return layer


def is_exempt(modules: Collection[nn.Module]) -> bool:
    """Return whether the layer that consists of ``modules`` is exempt from recomputation."""
    return any([_MARK in module.__dict__ for module in modules])


class FromForward:
    """What ``R[i,j]`` needs of ``F[i,j]`` beside the input. Owned by what recomputes it.

    Args:
        effect: makes what compares the values that a layer gets, or that the partition returns.
        exempt: the layers that are not recomputed.
    """

    __slots__ = ("_effect", "_inputs", "_outputs", "exempt", "returned")

    def __init__(self, effect: Callable[[str], Effect], exempt: Collection[nn.Module]) -> None:
        self.returned = effect("")
        self.exempt = exempt
        self._effect = effect
        self._inputs: dict[str, Effect] = {}  # of calls of exempt layers
        self._outputs: dict[str, Callable[[], Value]] = {}

    def call(self, name: str, call: Callable[..., Value], /, *args: Any, **kwargs: Any) -> Value:
        """Call the exempt layer called ``name`` in ``F``; return the same value again in ``R``."""
        if name not in self._inputs:
            self._inputs[name] = self._effect(f"the input of {name}")
        self._inputs[name].note((args, kwargs))
        if name in self._outputs:
            return self._outputs[name]()
        with without_hooks(Forget), drawing_apart(), checkpointing(False):
            y = call(*args, **kwargs)
        self._outputs[name] = _copied(y)
        return y


def _copied(y: Value) -> Callable[[], Value]:
    """Copy ``y``; return what makes copies of that, which the next layer may change in place."""
    tensors, rebuild = tensors_of(y)
    kept = [(tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]
    return lambda: rebuild(tuple([t.detach().requires_grad_(g).clone() for t, g in kept]))
