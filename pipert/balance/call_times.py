"""Times the blocks of a model, each from the first call of its module to that of the next block's.

The standard way is to run the model with hooks that read the clock. That takes a device with room
for the whole model, and then there would be no need for a pipeline. So the model's own forward
runs, but each *layer* that it calls is computed by a copy on the device, made for this call, and
measured by itself, forward and then backward. The model continues with its detached output.

1. A *block* begins with the first call of its module. All measured time belongs to the current
   block, including repeated calls of earlier layers and the model's own code between layers. Time
   before the first block belongs to the first block.
2. The backward of a layer starts from ones for its output and ends at its parameters and those
   arguments that need a gradient. There is none if its output needs no gradient, as under
   ``no_grad``.
3. Of the model's own code only the forward is measured; its backward counts as twice that.
4. The model may be on other devices. The layers' copies are on the measuring device, and every
   tensor that an operation of the model's own code uses is brought there.

Each call of a layer computes once, since its arguments may remember it, as a cache of keys and
values does. So there is no call to warm up: callers should ignore the first round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipert._typing import Value
from pipert.autograd.hooks import without_hooks
from pipert.balance.by_time import forward_and_backward, now
from pipert.balance.probe import cloned, copied, note_layer
from pipert.batch.microbatch import Arguments
from pipert.model.calls import intercepted, settled, unchanged

__all__: list[str] = []


def block_times(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    begins: Collection[str],
    example: Arguments,
    device: torch.device,
) -> dict[str, float]:
    """Return the seconds of each block, by the name of its layer, in the order of first calls.

    The layers called ``begins`` begin a block. Parameters, gradients, buffers and torch's random
    state stay unchanged. Forward hooks run.
    """
    gathering = _Gathering(device)
    stopwatch = _Stopwatch(layers, begins, device, gathering)
    elsewhere = any(t.device != device for t in (*model.parameters(), *model.buffers()))
    with (
        unchanged(model, device),
        torch.inference_mode(False),
        torch.enable_grad(),
        intercepted(layers.values(), stopwatch),
        gathering if elsewhere else contextlib.nullcontext(),
    ):
        args, kwargs = settled(example, device)
        stopwatch.started = now(device)
        model(*args, **kwargs)
        stopwatch.count_own_code()
    stopwatch.seconds.pop(_FIRST, None)
    return stopwatch.seconds


_FIRST = ""  # stands for the first block, until it begins
_WITH_BACKWARD = 3  # times the forward (rule 3)


class _Stopwatch:
    """Measures one forward of the model; its layers go backward one by one."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        begins: Collection[str],
        device: torch.device,
        gathering: _Gathering,
    ) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self._begins = begins
        self._device = device
        self._gathering = gathering
        self._block = _FIRST
        self.seconds = {_FIRST: 0.0}
        self.started = 0.0

    def count_own_code(self) -> None:
        """Add the time since the last layer has ended."""
        self.seconds[self._block] += _WITH_BACKWARD * (now(self._device) - self.started)

    def call(self, module: nn.Module, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Measure a copy of a layer, and return its detached output."""
        name = self._names.get(module)
        if name is None:  # a layer inside a pipe
            return call(*args, **kwargs)
        self.count_own_code()
        if name in self._begins and name not in self.seconds:
            self._block = name
            self.seconds[name] = self.seconds.pop(_FIRST, 0.0)
        try:
            with self._gathering.paused(), without_hooks():  # those of a checkpoint around layers
                output = self._measure(module, Arguments(args, kwargs))
        except Exception as error:
            note_layer(error, name, module)
            raise
        self.started = now(self._device)
        return output

    def _measure(self, layer: nn.Module, arguments: Arguments) -> Value:
        inputs: Arguments = cloned(settled(arguments, self._device))
        copy = copied(layer, self._device)
        seconds, output = forward_and_backward(
            lambda given: copy(*given.args, **given.kwargs), inputs, copy, self._device
        )
        self.seconds[self._block] += seconds
        torch.clear_autocast_cache()  # it would keep the copy alive
        return cloned(settled(output, self._device))  # no leaves: they may be changed in place


class _Gathering(TorchFunctionMode):
    """Brings the tensors of each operation to a device (rule 4)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the tensors of operations where they are."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_paused:
            args, kwargs = pytree.tree_map_only(Tensor, self._bring, (args, kwargs or {}))
        return func(*args, **kwargs or {})

    def _bring(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self._device else tensor.to(self._device)
