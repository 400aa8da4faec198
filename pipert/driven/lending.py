"""Parameters that something else stands for: on another device, or with hooks in a step.

As with tied weights (``layers.tied``) each is copied once for a run and partition, inside the graph
in a call. A layer that uses one gets the copy in each torch function that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipert.batch.tensors import version
from pipert.driven.transforms import outside_of_transforms
from pipert.layers.drawing import is_compiled
from pipert.layers.modules import modules_of
from pipert.layers.tied import Substitute
from pipert.stage.stage import Stage

__all__: list[str] = []


class Lending:
    """What stands for parameters in one run. Each partition's is its worker's.

    Args:
        module: the model.
        is_step: whether hooks are to see whole gradients.
        moves: whether there are several devices.
    """

    def __init__(self, module: nn.Module, is_step: bool, moves: bool) -> None:
        self._is_step = is_step
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._layers: dict[tuple[Any, ...], Substitute | None] = {}
        self.is_needed = moves or (is_step and _has_hooks(module))
        """Whether there are any such parameters, as far as is known in the caller."""
        weights = module.parameters() if self.is_needed else ()
        self._versions = {id(w): version(w) for w in weights}

    def is_lent(self, stage: Stage, weight: Tensor) -> bool:
        """Whether something else stands for a parameter here."""
        return weight.device != stage.place.device or (
            self._is_step and bool(weight._backward_hooks)
        )

    def of(self, stage: Stage, i: int, weight: nn.Parameter) -> Tensor:
        """What stands for a parameter in this partition."""
        key = stage.place.j, id(weight)
        if key not in self._copies:
            with outside_of_transforms():
                (copy,) = stage.ends.borrow(i, (weight,))
            self._copies[key] = weight, copy
        return self._copies[key][1]

    def around(
        self, stage: Stage, i: int, layers: Sequence[nn.Module], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """``call``, under what stands for parameters of the layer, and of others that it is given.

        Raises:
            ValueError: it is compiled, so that its parameters cannot be replaced.
        """
        key = stage.place.j, *layers
        if key not in self._layers:
            all_weights = dict.fromkeys(w for layer in layers for w in layer.parameters())
            weights = tuple(w for w in all_weights if self.is_lent(stage, w))
            if weights and is_compiled(layers[0]):
                raise ValueError(
                    "a compiled or scripted layer uses a parameter that lives on another device or "
                    "has a hook, so it cannot receive what stands for it; choose cuts that put the "
                    "layers that share it on one device, or leave this layer uncompiled"
                )
            copies = [self.of(stage, i, weight) for weight in weights]
            before = [self._versions[id(weight)] for weight in weights]
            self._layers[key] = Substitute(weights, copies, before) if weights else None
        substitute = self._layers[key]
        return call if substitute is None else partial(substitute.during, call)


def _has_hooks(module: nn.Module) -> bool:
    for part in modules_of(module):
        for weight in part._parameters.values():  # of each step, so nothing but this
            if weight is not None and weight._backward_hooks:
                return True
    return False
