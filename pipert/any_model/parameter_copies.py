"""Replaces parameters and buffers that live on another device, or that have hooks in a step.

As with tied weights (``layers.tied``), each is copied once per run and partition; in a call, inside
the graph. The torch functions that a layer calls get the copy in its place. A layer that changes
one in place is refused, so a buffer that layers on several devices share is never written. So is a
model's own code that changes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import tensor_hooks
from pipert._typing import Value
from pipert.any_model.boundary_tensors import memory_of
from pipert.batch.tensors import version
from pipert.layers.buffers import original_of
from pipert.layers.compiling import is_compiled
from pipert.layers.modules import modules_of
from pipert.layers.tied import Substitute, refuse_functions
from pipert.stage.stage import Stage
from pipert.workers.context import is_transformed

__all__: list[str] = []


class ParameterCopies:
    """The copies of parameters in one run. Those of a partition are used only while it runs.

    In a step hooks must see whole gradients. ``moves`` is whether tensors may have to move between
    devices; ``buffers`` has the ids of the buffers that layers of several partitions share.
    """

    def __init__(
        self, module: nn.Module, is_step: bool, moves: bool, buffers: Collection[int]
    ) -> None:
        self._module = module
        self._is_step = is_step
        self._buffers = buffers if moves else ()
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}
        self._substitutes: dict[tuple[Any, ...], Substitute | None] = {}
        self._has_looked = False  # at the graph of a micro-batch, which is once per run
        weights = _weights_of(module) if is_step or moves else []
        self.is_needed = moves or any(map(tensor_hooks, weights))
        """Whether any parameter may need a copy, as far as the caller can tell."""
        own = [*weights, *self._shared_by(module)] if self.is_needed else []
        self._versions = {id(weight): version(weight) for weight in own}

    def _replaced(self, stage: Stage, weights: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that have copies in the partition of ``stage``."""
        device, is_step = stage.place.device, self._is_step
        return [w for w in weights if w.device != device or is_step and tensor_hooks(w)]

    def _shared_by(self, module: nn.Module) -> list[Tensor]:
        """Return the shared buffers of ``module``."""
        own = _buffers_of(module) if self._buffers else ()
        return [buffer for buffer in own if id(buffer) in self._buffers]

    def copy_of(self, stage: Stage, i: int, weight: Tensor) -> Tensor:
        """Return the copy of ``weight`` in the partition of ``stage``, or itself."""
        if not self._replaced(stage, (weight,)):
            return weight
        key = stage.place.j, id(weight)
        if key not in self._copies:
            if is_transformed():
                raise RuntimeError(_TRANSFORMED)
            (copy,) = stage.ends.borrow(i, (weight,))
            self._copies[key] = weight, copy, version(copy)
        return self._copies[key][1]

    def refuse_changes(self, changed: Collection[Tensor]) -> None:
        """Refuse changes of copies: of those here, or of a ``changed`` tensor's elsewhere."""
        is_lost = any([version(copy) != before for _, copy, before in [*self._copies.values()]])
        if changed and not is_lost:
            own = {*map(memory_of, (*self._module.parameters(), *self._module.buffers()))}
            is_lost = not own.isdisjoint(map(memory_of, changed))
        if is_lost:
            raise RuntimeError(CHANGED)

    def refuse_functions(self, y: Value) -> None:
        """Refuse a ``Function`` of the model's own code that got a parameter, not its copy."""
        if self._copies and not self._has_looked and torch.is_grad_enabled():
            copied = {id(weight) for weight, _, _ in [*self._copies.values()]}
            self._has_looked = refuse_functions(y, copied)

    def wrap(
        self, stage: Stage, i: int, layers: Sequence[nn.Module], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``call``, made to use the copies of parameters of ``layers``.

        These are the called layer, which must not be compiled, and the modules in its arguments.
        """
        key = stage.place.j, *layers
        if key not in self._substitutes:
            own: list[Tensor] = [w for layer in layers for w in _weights_of(layer)]
            own += [b for layer in layers for b in self._shared_by(layer)]
            own += [b for given in layers[1:] for b in _buffers_of(given)]
            weights = tuple(dict.fromkeys(self._replaced(stage, own)))
            if weights and is_compiled(layers[0]):
                raise ValueError(
                    "a compiled or scripted layer uses a parameter that lives on another device or "
                    "has a hook, and cannot be given a copy in its place; choose cuts that put the "
                    "layers that share it on one device, or leave this layer uncompiled"
                )
            copies = [self.copy_of(stage, i, weight) for weight in weights]
            before = [self._versions.setdefault(id(w), version(w)) for w in weights]
            self._substitutes[key] = Substitute(weights, copies, before) if weights else None
        substitute = self._substitutes[key]
        return call if substitute is None else partial(substitute.during, call)


def _weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module``; one that two modules share, twice."""
    tables = [part._parameters.values() for part in modules_of(module)]
    return [weight for table in tables for weight in table if weight is not None]


def _buffers_of(module: nn.Module) -> list[Tensor]:
    """Return the buffers of ``module``, in whose place a recomputation puts clones."""
    tables = [[*part._buffers.values()] for part in modules_of(module)]
    return [original_of(buffer) for table in tables for buffer in table if buffer is not None]


CHANGED = (
    "a model's own code changes a parameter or buffer in place that lives on the device of another "
    "partition, or has a hook: it would change a copy, and be lost. Change it in a layer, or once "
    "per mini-batch, outside of forward, such as after optimizer.step()"
)
_TRANSFORMED = (
    "a transform of torch.func in a model's own code uses a parameter that lives on another device "
    "or has a hook, and cannot be given a copy in its place; use it before the transform as well"
)
