"""Random numbers that do not depend on thread timing, and that a recomputation draws again.

The CPU's default generator is one for the process. Workers that draw from it at once would share
its numbers out by timing, and a recomputation cannot rewind it under the others. So each task has a
stream of random numbers of its own:

* Its seed comes from the run's seed and the task's place ``(i, j)``. The run's seed is one number
  drawn from the caller's generator, when the first task of the run asks for random numbers: a
  model without randomness leaves the generator as it was, a random one moves it by one draw.
* While a layer runs, a ``TorchFunctionMode`` watches for functions that draw. Under a lock it gives
  the default generator the state of the task's stream, calls the function, and puts everything
  back. The lock is held for one function, never while anything else waits.
* ``R[i,j]`` starts the same stream again.

Layers known not to draw (``may_draw``) run without the watching, which costs about a microsecond
for each torch function. What draws without passing a torch function, such as compiled code, draws
from the shared generator, as it would without pipert.

A **CUDA** device has a generator of its own, and one worker, whose tasks draw in a fixed order.
There ``F[i,j]`` notes the state and ``R[i,j]`` puts it back for its duration; a lock for each
device keeps the two apart. A run inside a layer of another run takes no such lock: the outer one
holds it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._typing import Value
from pipert.errors import NestedCheckpointError

__all__: list[str] = []

_MASK = (1 << 64) - 1

# Held while the default generator has a task's state in it.
_swapping = threading.Lock()


def _renew_lock() -> None:
    global _swapping
    _swapping = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # whoever held it is not there in the child


class RunSeed:
    """The seed of one run, drawn when it is first needed.

    Args:
        outer: the stream of the task inside which the run was started, if any; it is drawn from
            instead of the generator, for the same reason.
    """

    __slots__ = ("_outer", "_seed")

    def __init__(self) -> None:
        self._outer = _current.get()
        self._seed: int | None = None

    def get(self) -> int:
        """The seed; the caller holds ``_swapping``."""
        if self._seed is None:
            state = torch.default_generator.get_state()
            if self._outer is not None:
                torch.default_generator.set_state(self._outer.state())
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
            if self._outer is not None:
                self._outer.keep(torch.default_generator.get_state())
                torch.default_generator.set_state(state)
        return self._seed


class _Stream:
    """The random numbers of one task: a generator state that goes in and out of the default one."""

    __slots__ = ("_place", "_seed", "_state")

    def __init__(self, seed: RunSeed, place: int) -> None:
        self._seed = seed
        self._place = place
        self._state: Tensor | None = None

    def state(self) -> Tensor:
        if self._state is None:
            seed = _mix(self._seed.get() ^ _mix(self._place))
            self._state = torch.Generator().manual_seed(seed).get_state()
        return self._state

    def keep(self, state: Tensor) -> None:
        self._state = state


_current: ContextVar[_Stream | None] = ContextVar("pipert_random_stream", default=None)


class _Watch(TorchFunctionMode):
    """Hands the functions that draw to the task's stream."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        if name not in _DRAWING or (kwargs and kwargs.get("generator") is not None):
            return func(*args, **kwargs or {})
        with _swapping:
            mine = self._stream.state()  # first: it may draw the run's seed from the generator
            shared = torch.default_generator.get_state()
            torch.default_generator.set_state(mine)
            try:
                result = func(*args, **kwargs or {})
            finally:
                self._stream.keep(torch.default_generator.get_state())
                torch.default_generator.set_state(shared)
        if not torch.equal(mine, self._stream.state()):
            _refuse_nested_checkpoint()
        return result


class TaskRandom:
    """What ``F[i,j]`` and ``R[i,j]`` share of their random numbers.

    Args:
        seed: the run's seed.
        place: a number of the task, unique in its run.
        device: where the partition computes.
    """

    __slots__ = ("_device", "_device_state", "_place", "_seed")

    def __init__(self, seed: RunSeed, place: int, device: torch.device) -> None:
        self._seed = seed
        self._place = place
        self._device = device
        self._device_state: Tensor | None = None

    def run(self, compute: Callable[[Value], Value], value: Value) -> Value:
        """``compute(value)`` with the task's random numbers, from their start each time."""
        stream = _Stream(self._seed, self._place)
        token = _current.set(stream)
        try:
            with self._on_device(), _Watch(stream):
                return compute(value)
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        with _exclusive(self._device):
            generator = torch.cuda.default_generators[self._device.index]
            if self._device_state is None:
                self._device_state = generator.get_state()
                yield
                return
            state = generator.get_state()
            generator.set_state(self._device_state)
            try:
                yield
            finally:
                generator.set_state(state)


_device_locks: dict[torch.device, threading.Lock] = {}
_device_locks_lock = threading.Lock()
_holds_device: ContextVar[bool] = ContextVar("pipert_holds_device", default=False)


@contextlib.contextmanager
def _exclusive(device: torch.device) -> Iterator[None]:
    """Keep ``F`` and ``R`` of one device apart on the host."""
    if _holds_device.get():
        yield
        return
    with _device_locks_lock:
        lock = _device_locks.setdefault(device, threading.Lock())
    with lock:
        token = _holds_device.set(True)
        try:
            yield
        finally:
            _holds_device.reset(token)


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer could draw random numbers: anything but a leaf known not to."""
    kind = type(layer)
    if layer._forward_hooks or layer._forward_pre_hooks:
        return True
    if kind in _DROPOUTS:
        return layer.training
    return kind not in _DETERMINISTIC


def _mix(number: int) -> int:
    """Spread close numbers over 64 bits (splitmix64); the CPU generator takes 32 bits of a seed."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _refuse_nested_checkpoint() -> None:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _TORCH_CHECKPOINT:
            raise NestedCheckpointError(
                "a layer used torch.utils.checkpoint around an operation that draws random numbers "
                "from the CPU's generator; its recomputation would draw others. Take it out of the "
                "layer and let the pipe checkpoint, with checkpoint='except_last' or 'always'"
            )
        frame = frame.f_back if frame.f_code is not _TASK_CODE else None


_TORCH_CHECKPOINT = torch.utils.checkpoint.__file__
_TASK_CODE = TaskRandom.run.__code__


def _functions_that_draw() -> frozenset[str]:
    """Names of torch functions that may draw from a default generator.

    What torch marks, and by hand what is composed of it without a mark of its own.
    """
    names = {
        "_sample_dirichlet", "binomial", "dropout1d", "dropout2d", "dropout3d", "dropout_",
        "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout",
        "feature_dropout_", "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d", "fractional_max_pool3d_with_indices", "gumbel_softmax",
        "multi_head_attention_forward", "random_", "rrelu", "rrelu_",
        "scaled_dot_product_attention", "svd_lowrank", "pca_lowrank",
    }  # fmt: skip
    for name in dir(torch.ops.aten):
        packet: Any = getattr(torch.ops.aten, name)
        overloads: list[str] = getattr(packet, "overloads", list)()
        tags = [tag for overload in overloads for tag in getattr(packet, overload).tags]
        if torch.Tag.nondeterministic_seeded in tags:
            names.add(name)
    return frozenset(names)


_DRAWING = _functions_that_draw()

_DROPOUTS = frozenset(
    {
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
        nn.FeatureAlphaDropout, nn.RReLU,
    }  # fmt: skip
)

_DETERMINISTIC = frozenset(
    {
        nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Flatten,
        nn.Unflatten, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm,
        nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        nn.LocalResponseNorm, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
        nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
        nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample,
        nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReLU, nn.ReLU6,
        nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
        nn.Tanh, nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
        nn.GLU, nn.Softsign, nn.Tanhshrink, nn.LogSigmoid, nn.Threshold,
    }  # fmt: skip
)
