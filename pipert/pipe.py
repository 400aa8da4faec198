"""``Pipe``: an ``nn.Sequential`` that runs pipeline-parallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, overload

from torch import nn

from pipert._torch import HOOK_TABLES
from pipert._typing import Device
from pipert.layers.batchnorm import check_batch_norm
from pipert.model.devices import devices_and_workers, refuse_data_parallel
from pipert.model.split import (
    check_balance,
    check_module,
    place,
    sequential,
    split,
)
from pipert.pipes.base import PipeBase
from pipert.schedules.plan import Schedule
from pipert.skip.declarations import keys_of, verify_skippables
from pipert.stage.assembly import Layered

__all__ = ["Pipe"]


class Pipe(PipeBase):
    """Runs an ``nn.Sequential`` over several devices, one worker thread for each.

    A call splits its arguments into micro-batches, passes them through the partitions in the order
    of the deterministic clock-cycle (section 3.2 of the paper), and joins the outputs. The result
    is the plain module's, gradients included; use the pipe in any training loop.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> with Pipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4) as pipe:
    ...     pipe(torch.randn(32, 8)).shape
    torch.Size([32, 1])

    Args:
        module: the layers. They move to their devices, and stay the same objects under the
            same names: ``state_dict()`` keys, parameter names and identities are the module's.
        balance: the number of layers in each partition, in order.
        devices: the device of each partition. A CUDA device may appear more than once, and is
            served by one thread. Each ``'cpu'`` is a logical device with a thread of its own;
            ``'cpu:0'`` and the like may appear more than once, too. Default: the CUDA devices in
            order, as many as needed; without CUDA, a logical device for each partition.
        chunks: the largest number of micro-batches that a call is split into; default 1.
        checkpoint: which micro-batches are recomputed in the backward instead of keeping their
            activations: ``'always'``, ``'except_last'`` (default) or ``'never'``; or a list with
            the mode of each partition.
        schedule: the order of the tasks of a step, that is of :meth:`forward_backward`. With
            ``'1f1b'`` (default) partition *j* keeps the activations of at most ``n - j``
            micro-batches; ``'eager-1f1b'`` keeps those of ``2 * (n - j) - 1`` and waits for no
            copies; ``'interleaved'`` is for devices with several partitions; ``'zb'``, ``'zb-h1'``,
            ``'zb-h2'`` and ``'zb-v'`` fill the bubble with gradients of weights; ``'gpipe'`` fills
            and drains. Or a function, see :func:`pipert.schedules.plan`.
        deferred_batch_norm: whether BatchNorm layers in training mode update their running
            statistics once for each call, from all its rows, rather than once for each micro-batch.
            Default: they do not, and there is a warning if the module has such layers.
        timeout: how many seconds a call may take before it raises :class:`PipelineTimeout`.
            Default: no limit.

    Raises:
        ValueError: ``balance`` is missing, does not add up, or has an entry below one; ``chunks``
            is below one; ``checkpoint`` or ``schedule`` is unknown; a device does not exist, or is
            named beyond the partitions; a buffer would be needed on two devices.
        TypeError: ``module`` is not a plain ``nn.Sequential``, its stashes and pops do not match,
            or ``devices`` names no devices.
        IndexError: there are more partitions than devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str | Sequence[str] | None = None,
        schedule: str | Schedule = "1f1b",
        deferred_batch_norm: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        check_module(module)
        balance = check_balance(module, balance)
        super().__init__(
            len(balance), chunks, checkpoint, schedule, deferred_batch_norm, timeout
        )
        refuse_data_parallel(module)
        verify_skippables(module)
        self._balance = balance
        self._devices, self._workers = devices_and_workers(devices, len(balance))
        check_batch_norm(module, deferred_batch_norm, stacklevel=3)
        self._partitions = split(module, self._balance)
        place(self._partitions, self._devices)
        self.training = module.training
        for name, layer in module._modules.items():
            super().add_module(name, layer)
        for name in HOOK_TABLES:  # the pipe must run the module's hooks as well
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_hooked"] = module
        self._start()

    def _model(self) -> Layered:
        return Layered(self._partitions, tuple(map(keys_of, self._partitions)))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) or name in self._modules:
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
