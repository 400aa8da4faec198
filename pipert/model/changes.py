"""Refuses modules that were put into a model after its pipe was made.

Layers are found, placed and intercepted when the pipe is made. A module that replaces one later,
such as an adapter around it, would be called unseen: in the partition before it, on whatever device
it is, and without recomputation. So it is refused. The inside of layers may change at will.

Finding layers takes a walk through all modules, so each call only compares the children of the few
modules around the layers, in C.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from pipert.layers.intercepted import is_unseen
from pipert.layers.modules import modules_of
from pipert.model.cuts import layers_of, lookup

__all__: list[str] = []


class Changes:
    """Detects changes of a model since its layers were found.

    Args:
        model: the model.
        cuts: the modules at which it is cut, by name.
        layers: its layers.
    """

    def __init__(
        self, model: nn.Module, cuts: Mapping[str, nn.Module], layers: Collection[nn.Module]
    ) -> None:
        self._model = model
        self._cuts = cuts
        self._layers = layers
        # Unknown before the first check: in a copy of a pipe the model may have changed already.
        self._children: list[tuple[nn.Module, dict[str, nn.Module | None]]] | None = None

    def refuse(self) -> None:
        """Refuse changes that make calls go unseen.

        Raises:
            RuntimeError: a cut was replaced, another layer with parameters was added, or a layer
                was compiled.
        """
        if compiled := [layer for layer in self._layers if is_unseen(layer)]:
            names = [name for name, module in self._model.named_modules() if module in compiled]
            raise RuntimeError(
                f"the layers {names} were compiled after the pipe was made, so it no longer sees "
                "their calls; compile layers first, then make the pipe again"
            )
        if self._children is not None and all(
            module._modules == children for module, children in self._children
        ):
            return
        known = {name: cut for name, cut in self._cuts.items() if lookup(self._model, name) is cut}
        added = [
            name
            for name, layer in layers_of(self._model, known).items()
            if layer not in self._layers and next(layer.parameters(), None) is not None
        ]
        if found := [*(name for name in self._cuts if name not in known), *added]:
            raise RuntimeError(
                f"the modules {found} were replaced or added after the pipe was made, so it would "
                "neither place nor recompute them, nor begin a partition there; put adapters and "
                "other layers into the model first, and make the pipe again: "
                "pipert.pipeline(pipe.module, cuts, ...)"
            )
        inside = {part for layer in self._layers for part in modules_of(layer)}
        around = [module for module in modules_of(self._model) if module not in inside]
        self._children = [(module, dict(module._modules.items())) for module in around]
