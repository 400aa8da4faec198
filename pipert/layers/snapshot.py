"""What a partition was like when it computed, so that it computes the same again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from pipert.batch.tensors import Versions
from pipert.layers.buffers import Buffers, may_change_buffers
from pipert.layers.modules import modules_of

__all__: list[str] = []

Home = dict[str, nn.Parameter | None]
Place = tuple[Home, str, nn.Parameter | None]


class Snapshot:
    """The parameters of a partition and their versions. One for a stage.

    Each run makes one, and each ``R`` compares it. So it walks the modules once, and comparing is
    done in C.
    """

    __slots__ = ("_homes", "_modules", "_names", "_of", "_parameters", "_versions", "buffers")

    def __init__(self, partition: nn.Module) -> None:
        self._modules: set[nn.Module] = set()
        self._homes: list[Home] = []
        self._names: list[str] = []
        self._parameters: list[nn.Parameter | None] = []
        self._of: dict[nn.Module, list[Place]] = {}
        self._versions = Versions()
        self.buffers: Buffers | None = None
        """Those that calls might change, if any."""
        self.add(partition)

    def add(self, module: nn.Module) -> None:
        """Note what a module is like before its first call, also one of another partition."""
        if module in self._modules:
            return
        self._modules.add(module)
        parts = modules_of(module)
        # A parameter that is still uninitialised is about to change.
        found = [] if _are_sharded(parts) else _places(parts)
        places = [one for one in found if one[2] is None or not is_lazy(one[2])]
        self._homes += [home for home, _, _ in places]
        self._names += [name for _, name, _ in places]
        self._parameters += [parameter for _, _, parameter in places]
        self._versions.add(p for _, _, p in places if p is not None)
        if may_change_buffers(parts):
            self.buffers = self.buffers or Buffers()
            self.buffers.add(module, parts)

    def refuse_replaced(self, module: nn.Module) -> None:
        """Refuse one of the modules inside, if others are in place of its parameters.

        Raises:
            RuntimeError: it would compute with its own when it does so again.
        """
        places = self._of.get(module)
        if places is None:
            own = {id(part._parameters) for part in modules_of(module)}
            every = zip(self._homes, self._names, self._parameters, strict=True)
            places = self._of[module] = [place for place in every if id(place[0]) in own]
        if not all([home.get(name) is parameter for home, name, parameter in places]):
            raise RuntimeError(
                "a layer is called with parameters in place of its own, as by "
                "torch.func.functional_call, which are not there when it is recomputed; "
                "use checkpoint='never'"
            )

    def is_current(self) -> bool:
        """Whether the parameters are still the same, and unchanged."""
        found = map(dict.get, self._homes, self._names)
        same = all(map(operator.is_, found, self._parameters))
        return same and self._versions.are_current()


def _are_sharded(parts: Iterable[nn.Module]) -> bool:
    """Whether they have other parameters while they compute, as by ``fully_shard``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in parts)


def _places(parts: Iterable[nn.Module]) -> list[Place]:
    """The parameters of modules by where they are looked up, which is quick to do again.

    A scripted module cannot be looked up in.
    """
    return [
        (home if isinstance(home, dict) else {name: parameter}, name, parameter)
        for home in [part._parameters for part in parts]
        for name, parameter in home.items()
    ]
