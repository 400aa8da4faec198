"""What a partition was like when it computed, so that it computes the same again."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from pipert.batch.tensors import version
from pipert.layers.buffers import Buffers, may_change_buffers
from pipert.layers.modules import modules_of

__all__: list[str] = []

Home = dict[str, nn.Parameter | None]


class Snapshot:
    """The parameters of a partition and their versions. One for a stage."""

    __slots__ = ("_modules", "_parameters", "buffers")

    def __init__(self, partition: nn.Module) -> None:
        self._modules: set[nn.Module] = set()
        self._parameters: list[tuple[Home, str, nn.Parameter | None, int]] = []
        self.buffers: Buffers | None = None
        """Those that calls might change, if any."""
        self.add(partition)

    def add(self, module: nn.Module) -> None:
        """Note what a module is like before its first call, also one of another partition."""
        if module in self._modules:
            return
        self._modules.add(module)
        # Walking the modules again for each R would cost more than the rest of it for small ones.
        # A parameter that is still uninitialised is about to change.
        self._parameters += [
            (home, name, p, version(p))
            for home, name, p in _places(module)
            if p is None or not is_lazy(p)
        ]
        if may_change_buffers(module):
            self.buffers = self.buffers or Buffers()
            self.buffers.add(module)

    def is_current(self) -> bool:
        """Whether the parameters are still the same, and unchanged."""
        return all(
            home.get(name) is p and version(p) == before
            for home, name, p, before in self._parameters
        )


def _places(module: nn.Module) -> list[tuple[Home, str, nn.Parameter | None]]:
    """The parameters of a module by where they are looked up, which is quick to do again.

    A scripted module cannot be looked up in.
    """
    return [
        (home if isinstance(home, dict) else {name: parameter}, name, parameter)
        for home in (child._parameters for child in modules_of(module))
        for name, parameter in home.items()
    ]
