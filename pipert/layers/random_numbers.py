"""Makes random numbers independent of thread timing, and repeats them in recomputations.

The CPU's default generator is shared by the process. Workers drawing from it at once would divide
its numbers by timing, and a recomputation cannot rewind it under the others. So each task has its
own stream of random numbers:

* Its seed comes from the run's seed and the task's place ``(i, j)``. The run's seed is one number
  drawn from the caller's generator when the first task of the run needs random numbers: a
  model without randomness leaves the generator untouched, a random one advances it by one draw.
* While a layer runs, a ``TorchFunctionMode`` watches for functions that draw. Under a lock it sets
  the default generator to the state of the task's stream, calls the function, and restores
  the generator. The lock is held for one function, never while waiting for anything else. As
  without pipert, the user's other threads should not draw during a run.
* ``R[i,j]`` restarts the same stream.

Layers known not to draw (``may_draw``) run without this mode, which costs about a microsecond
per torch function. Compiled layers cannot be watched; those that could draw run one at a time and
have the generator to themselves.

On a CUDA device the device's generator is treated likewise, for the same reason: a recomputation
and the forward of another caller may share the device.

``dropout`` on CPU bypasses the default generator: it is by far the most common,
and a user thread that draws at that very moment would change its mask.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._typing import Value
from pipert.errors import NestedCheckpointError, ReentrantCallError
from pipert.layers.compiling import CompileLock
from pipert.layers.drawing import (
    FUNCTIONS_THAT_DRAW,
    is_compiled,
    may_draw,
    may_draw_inside,
)
from pipert.queues.process_lock import ProcessLock

__all__: list[str] = []

_MASK = (1 << 64) - 1

# Held while the default generator holds a task's state.
_lending = ProcessLock()
# Held around it: a compilation restores the default generators.
_compiling = CompileLock()
_lent: ContextVar[bool] = ContextVar("pipert_generator_lent", default=False)


class RunSeed:
    """The seed of one run, drawn when first needed.

    Made in the caller. A run inside a task of another run draws from that task's stream instead of
    the generator, like everything else there.

    Raises:
        ReentrantCallError: a compiled layer, which has the generator to itself, called a pipe.
    """

    __slots__ = ("_outer", "_seed", "_used")

    def __init__(self) -> None:
        if _lent.get():
            raise ReentrantCallError(
                "a compiled layer called a pipe; the pipe's layers would wait for the random "
                "generator that the compiled layer holds. Compile the layers of the inner pipe"
            )
        self._outer = _current.get()
        self._seed: int | None = None
        self._used = False

    def get(self) -> int:
        """Returns the number the next draw would give; the caller holds ``_lending``."""
        if self._seed is None:
            state = torch.default_generator.get_state()
            self._seed = self._draw()
            torch.default_generator.set_state(state)
        return self._seed

    def use(self) -> None:
        """Advance the generator, once, after random numbers have been drawn."""
        if not self._used:
            self._used = True
            state = torch.default_generator.get_state()
            self._draw()
            if self._outer is not None:
                moved = torch.default_generator.get_state()
                torch.default_generator.set_state(state)
                self._outer.keep(moved)

    def forget(self) -> bool:
        """Release the number if nothing has been drawn with it; returns whether it was released."""
        if not self._used:
            self._seed = None
        return not self._used

    def _draw(self) -> int:
        if self._outer is not None:
            torch.default_generator.set_state(self._outer.states()[0])
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


class _Stream:
    """The random numbers of one task: states swapped into and out of the default generators."""

    __slots__ = ("_defaults", "_place", "_seed", "_states")

    def __init__(self, seed: RunSeed, place: int, device: torch.device) -> None:
        self._seed = seed
        self._place = place
        self._defaults = [torch.default_generator]
        if device.type == "cuda":
            self._defaults.append(torch.cuda.default_generators[device.index])
        self._states: list[Tensor] = []

    def states(self) -> list[Tensor]:
        """Returns the states to draw with, the CPU's first; the caller holds ``_lending``."""
        if not self._states:
            seed = _mix(self._seed.get() ^ _mix(self._place))
            self._states = [
                torch.Generator(default.device).manual_seed(seed).get_state()
                for default in self._defaults
            ]
        return self._states

    def keep(self, state: Tensor) -> None:
        """Continue from ``state`` on the CPU."""
        self._states = [state, *self.states()[1:]]
        self._seed.use()

    @contextlib.contextmanager
    def in_default_generators(self) -> Iterator[None]:
        """Make the default generators draw this stream's numbers."""
        with _compiling.current, _lending.current:
            mine = self.states()
            shared = [default.get_state() for default in self._defaults]
            _set_states(self._defaults, mine)
            try:
                yield
            finally:
                self._states = [default.get_state() for default in self._defaults]
                _set_states(self._defaults, shared)
                drawn = not all(map(torch.equal, mine, self._states))
                if drawn:
                    self._seed.use()
                elif self._seed.forget():
                    self._states = []
        if drawn:
            refuse_nested_checkpoint(_DRAWN)

    @contextlib.contextmanager
    def own_generator(self) -> Iterator[torch.Generator]:
        """Yields a CPU generator that draws this stream's numbers, for one thread."""
        with _compiling.current, _lending.current:
            states = self.states()
            self._seed.use()
        generator = torch.Generator()
        generator.set_state(states[0])
        yield generator
        self._states = [generator.get_state(), *states[1:]]
        refuse_nested_checkpoint(_DRAWN)


def _set_states(generators: list[torch.Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


_current: ContextVar[_Stream | None] = ContextVar("pipert_random_stream", default=None)


class Watch(TorchFunctionMode):
    """Makes functions that draw use the task's stream."""

    belongs_to_its_task = True  # a run started inside does not adopt it

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        generator = kwargs.get("generator") if kwargs else None
        if name not in FUNCTIONS_THAT_DRAW or generator not in (None, torch.default_generator):
            return func(*args, **kwargs or {})
        if func is F.dropout:
            return _dropout(self._stream, func, *args, **kwargs or {})
        with self._stream.in_default_generators():
            return func(*args, **kwargs or {})


def _dropout(
    stream: _Stream,
    func: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Computes ``F.dropout`` on CPU, with the stream's own generator."""
    if not training or not 0.0 < p < 1.0 or not input.is_cpu or type(input) is not Tensor:
        with stream.in_default_generators():
            return func(input, p, training, inplace)
    with stream.own_generator() as generator:
        noise = torch.empty_like(input, requires_grad=False)
        noise.bernoulli_(1 - p, generator=generator).div_(1 - p)
    return input.mul_(noise) if inplace else input * noise


def begin_stream(seed: RunSeed, place: int, device: torch.device) -> None:
    """Let :func:`call_layer` draw the random numbers of one task, the same each time.

    For the rest of the task, in its own copy of the caller's context variables.

    Args:
        seed: the run's seed.
        place: the task's number, unique in its run.
        device: the partition's device.
    """
    _current.set(_Stream(seed, place, device))


def call_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Value:
    """Calls the layer, which draws from the current task's stream if there is one.

    A compiled layer cannot be watched. It has the generators to itself while it runs, unless none
    of its modules could draw.
    """
    stream = _current.get()
    if stream is None or not may_draw(layer):
        return layer(*args, **kwargs)
    if not is_compiled(layer):
        with Watch(stream):
            return layer(*args, **kwargs)
    if not may_draw_inside(layer):
        return layer(*args, **kwargs)
    token = _lent.set(True)
    try:
        with stream.in_default_generators():
            return layer(*args, **kwargs)
    finally:
        _lent.reset(token)


def _mix(number: int) -> int:
    """Spreads close numbers over 64 bits (splitmix64); the CPU generator uses 32 bits of a seed."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def refuse_nested_checkpoint(message: str) -> None:
    """Refuse ``torch.utils.checkpoint`` inside the current layer.

    Raises:
        NestedCheckpointError: with ``message``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _TORCH_CHECKPOINT:
            raise NestedCheckpointError(
                f"{message}. Take it out of the layer and let the pipe checkpoint, with "
                "checkpoint='except_last' or 'always'"
            )
        frame = frame.f_back if frame.f_code is not _LAYER_CODE else None


_DRAWN = (
    "a layer used torch.utils.checkpoint around an operation that draws random numbers from the "
    "CPU's generator; its recomputation would draw others"
)
_TORCH_CHECKPOINT = torch.utils.checkpoint.__file__
_LAYER_CODE = call_layer.__code__
