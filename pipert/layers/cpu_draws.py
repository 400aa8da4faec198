"""Lets a task draw from a generator of its own on the CPU, whose default one all threads share.

* **Operations** that draw take a generator, or have an overload that does, as ``rand(size)`` has. A
  kernel adds it (``layers/dispatch_keys.py``), whoever calls the operation: a layer, a scripted
  function, a hook, a transform. One that is given another generator than the default one draws from
  that. Operations being traced draw nothing until they run.
* **Functions** such as ``torch.manual_seed``, ``get_rng_state`` and ``fork_rng``, and so
  ``torch.utils.checkpoint``, look up ``torch.random.default_generator``, and
  ``torch.cuda.default_generators``. Stand-ins there lead to the task's.

Where torch lacks the key, tasks take turns with the default generator, as on a GPU
(``layers/default_generators.py``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pipert._torch import backward_id, identity
from pipert.layers import control_flow, forward_mode
from pipert.layers.dispatch_keys import Key, current_task, is_traced, operations, set_current_task

Operation = Callable[..., Any]

CPU = torch.device("cpu")


class Drawing(Protocol):
    """The task whose random numbers are drawn: the current one."""

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that the task has for ``device``."""

    def note_draw(self) -> None:
        """Note that the run has drawn random numbers."""


def _register(drawing: Key) -> None:
    takers = {_kind(op): op for op, _ in operations(_takes_generator)}
    packets = {f"aten::{packet.__name__}" for packet, *_ in takers}
    for op, schema in operations(lambda schema: schema.name in packets):
        drawing.register(op, _adding_generator(takers[_kind(op)], _place_of_generator(schema)))
    drawing.register(_NATIVE_DROPOUT, _native_dropout)
    forward_mode.register(drawing)


DRAWING = Key("TESTING_ONLY_GenericMode", _register)


def current() -> Any:
    """Return the task that this thread, or its backward, is inside of; ``None`` outside of all."""
    # An interrupt may leave a task set, but not the key included.
    return current_task() if DRAWING.is_included() or not DRAWING.works() else None


def prepare() -> None:
    """Prepare the process for tasks that draw."""
    _prepare_key()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        real_generators()


@cache
def _prepare_key() -> None:
    setattr(torch.random, "default_generator", _OfTask())  # noqa: B010
    try:
        DRAWING.prepare()
        setattr(torch.random, "fork_rng", partial(_fork_rng, torch.random.fork_rng))  # noqa: B010
        control_flow.refuse_where(_are_tasks_concurrent)
    except RuntimeError as error:
        warnings.warn(
            f"{error}. So tasks of layers that might draw random numbers wait for each other",
            stacklevel=2,
        )


def _are_tasks_concurrent() -> bool:
    task = current()
    return task is not None and task.run.is_concurrent


class _OfTask:
    """Stands in for the CPU's default generator, for functions that save or set its state."""

    def __getattr__(self, name: str) -> Any:
        task: Drawing | None = current()
        return getattr(torch.default_generator if task is None else task.generator(CPU), name)


class _Apart:
    """Has a generator of its own on the CPU, for what a checkpoint recomputes in a backward."""

    __slots__ = ("_generator", "used")

    outer = None
    shared = ()
    is_concurrent = False

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self.used = False

    @property
    def run(self) -> _Apart:
        """What a pipe that is called in there notes its draws on."""
        return self

    def generator(self, device: torch.device) -> torch.Generator:
        return self._generator if device == CPU else real_generators()[device.index]

    def note_draw(self) -> None:
        """Do nothing: the state is put back anyway."""


@contextlib.contextmanager
def _fork_rng(fork_rng: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Does what ``torch.random.fork_rng`` does, in a backward without the default generator.

    ``torch.utils.checkpoint`` recomputes in such blocks. In the backward of a call, which is no
    task, several devices' threads would save, set and restore one state at once.
    """
    if backward_id() < 0 or current() is not None:
        with fork_rng(*args, **kwargs):
            yield
        return
    before = current_task()
    set_current_task(_Apart())
    try:
        with DRAWING.included(), fork_rng(*args, **kwargs):
            yield
    finally:
        set_current_task(before)


class _OfDevices:
    """Stands in for the default generators of GPUs.

    In a task, those of other GPUs than its own are its own generators: ``torch.manual_seed`` seeds
    those of all, in which other tasks may be drawing.
    """

    def __init__(self, real: tuple[torch.Generator, ...]) -> None:
        self.real = real

    def __getitem__(self, k: int) -> torch.Generator:
        task: Drawing | None = current()
        return self.real[k] if task is None else task.generator(torch.device("cuda", k))

    def __len__(self) -> int:
        return len(self.real)

    def __iter__(self) -> Iterator[torch.Generator]:
        return map(self.__getitem__, range(len(self)))


def real_generators() -> tuple[torch.Generator, ...]:
    """Return the default generators of all GPUs, behind the stand-in."""
    generators: Any = torch.cuda.default_generators
    if isinstance(generators, _OfDevices):
        return generators.real
    found = _OfDevices(generators)
    setattr(torch.cuda, "default_generators", found)  # noqa: B010
    return found.real


def _takes_generator(schema: Any) -> bool:
    return any(argument.name == "generator" for argument in schema.arguments)


def _place_of_generator(schema: Any) -> int | None:
    """Return the index of the generator among the positional arguments, if it is one of them."""
    places = (k for k, x in enumerate(schema.arguments) if x.name == "generator")
    return next((k for k in places if not schema.arguments[k].kwarg_only), None)


def _kind(operation: Any) -> tuple[Any, ...]:
    """Return a key that ``randint.low_out`` and ``randint.low_generator_out`` have in common."""
    words = operation.name().partition(".")[2].split("_")
    return operation.overloadpacket, *[word for word in words if word not in _IGNORED]


_IGNORED = ("", "default", "generator", "with")  # as in rand.generator_with_names


def _adding_generator(operation: Operation, place: int | None) -> Operation:
    """Makes a kernel that adds a generator to calls of ``operation``, which accepts one.

    Calls of the overload that the kernel replaces may have one at ``place``, the last, or by name.
    """

    default: Any = torch.default_generator  # for which there may be several objects

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("generator", None)
        if place is not None and len(args) > place:
            args, given = args[:place], args[place]
        with DRAWING.excluded():
            task: Drawing | None = current_task()
            is_other = given is not None and identity(given) != identity(default)
            if task is None or is_other or not _is_on_cpu(args, kwargs) or is_traced():
                return operation(*args, generator=given, **kwargs)
            drawn = operation(*args, generator=task.generator(CPU), **kwargs)
            task.note_draw()
            return drawn

    return draw


_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """Does what the operation does, which takes no generator.

    Where a dispatch mode is on, as in the call in which torch.compile compiles, the operation that
    draws inside of it comes to no kernel.
    """
    with DRAWING.excluded():
        task: Drawing | None = current_task()
        if task is None or not x.is_cpu or train is False or not x.numel() or is_traced():
            return _NATIVE_DROPOUT(x, p, train)
        mask = torch.empty_like(x, dtype=torch.bool, requires_grad=False)
        mask.bernoulli_(1 - p, generator=task.generator(CPU))
        task.note_draw()
        return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws on the CPU."""
    device: Any = kwargs.get("device")
    if device is None:
        if args and not kwargs and type(args[0]) is Tensor:  # as usual, and at a fifth of the cost
            return args[0].is_cpu
        tensors = [x for x in (kwargs.get("out"), *args) if isinstance(x, Tensor)]
        return tensors[0].is_cpu if tensors else True
    found: str = device.type
    return found == "cpu"
