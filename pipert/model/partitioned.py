"""``Partitioned``: an ``nn.Sequential`` that is split and placed, and still looks like one.

This is the part of a pipe that runs nothing: layers, devices, hooks, and the state that it shares
with the module it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self, overload

from torch import nn

from pipert._torch import HOOK_TABLES
from pipert._typing import Device
from pipert.layers.batchnorm import check_batch_norm
from pipert.model.data_parallel import refuse_data_parallel
from pipert.model.devices import default_devices, parse_devices
from pipert.model.placed import Placed
from pipert.model.settings import whole
from pipert.model.split import (
    check_balance,
    check_module,
    place,
    sequential,
    split,
    warn_if_not_batch_first,
)
from pipert.skip.verify import verify_skippables

__all__: list[str] = []


class Partitioned(Placed):
    """The layers of an ``nn.Sequential`` on their devices; its arguments are ``Pipe``'s."""

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int],
        devices: Iterable[Device] | None,
        deferred_batch_norm: bool | None,
    ) -> None:
        super().__init__()
        check_module(module)
        refuse_data_parallel(module)
        verify_skippables(module)
        self._balance = [whole(count, "each entry of balance") for count in balance]
        n = len(self._balance)
        parsed = default_devices(n) if devices is None else parse_devices(devices)
        check_balance(module, self._balance, len(parsed))
        self._live_on(parsed[:n], deferred_batch_norm)
        check_batch_norm(module, deferred_batch_norm)
        warn_if_not_batch_first(module)
        self._partitions = split(module, self._balance)
        place(self._partitions, self._devices)
        self.training = module.training
        # Not add_module: it refuses layers named like an attribute of this class.
        self._modules.update(module._modules)
        for name in HOOK_TABLES:  # the pipe must run the module's hooks as well
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_hooked"] = module

    def __setattr__(self, name: str, value: Any) -> None:
        # A layer may be named like a setting, and must not shadow it.
        if name in self._own:
            object.__setattr__(self, name, value)
        elif isinstance(value, nn.Module) or name in self._modules:
            self.add_module(name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            self.add_module(name, None)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse to replace, add or remove a layer.

        Raises:
            ValueError: ``module`` is not the layer that the pipe has under this name.
        """
        if module is None or module is not self._modules.get(name):
            raise ValueError(
                f"{name!r} cannot be set: a Pipe has the layers of the module that it was made of."
                " Change that module before the pipe is made; or close the pipe, change the "
                "module, and make a new one"
            )

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Whether the pipe's or the module's backward hooks are full ones; ``None`` without any."""
        own: bool | None = self.__dict__["_full_backward_hook"]
        module = self.__dict__.get("_hooked")
        return own if own is not None or module is None else module._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, full: bool | None) -> None:
        self.__dict__["_full_backward_hook"] = full

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition."""
        return list(self._balance)

    def __len__(self) -> int:
        return sum(self._balance)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        """The layer at ``index``, or an ``nn.Sequential`` of a slice of them."""
        layers = [layer for partition in self._partitions for layer in partition._modules.items()]
        if not isinstance(index, slice):
            layer = layers[index][1]
            assert layer is not None
            return layer
        return sequential(dict(layers[index]), self.training)

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Refuse to replace a layer, as :meth:`add_module` does."""
        self.add_module(list(self._modules)[index], layer)

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._partitions:
            yield from partition

    def train(self, mode: bool = True) -> Self:
        """As in ``nn.Module``."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def __repr__(self) -> str:
        lines = [f"Pipe({self.extra_repr()}"]
        for j, (partition, device) in enumerate(zip(self._partitions, self._devices, strict=True)):
            lines.append(f"  partition {j} on {device}:")
            for name, layer in partition._modules.items():
                lines.append(f"    ({name}): {repr(layer)}".replace("\n", "\n    "))
        return "\n".join(lines) + "\n)" if len(lines) > 1 else lines[0] + ")"
