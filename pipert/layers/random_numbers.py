"""Makes random numbers independent of thread timing, and repeats them in recomputations.

The standard way is one default generator for each device, which all threads share. Workers that
draw from the CPU's at once would get numbers that depend on timing, and a recomputation cannot
rewind it while others draw. So each task has random numbers of its own, seeded from the run's seed
and the task's number (``Place.number``):

* on a GPU it draws from the device's default generator, which it has to itself meanwhile
  (``layers/default_generators.py``);
* on the CPU it draws from a generator of its own, wherever its partition is
  (``layers/cpu_draws.py``).

``R[i,j]`` starts with the seed of ``F[i,j]``; the loss and ``B[i,j]`` of a step have their own. In
a call, ``B`` draws from the default generators, as autograd's threads do without a pipe.

The run's seed is a number drawn from the caller's generator. If nothing in the run has drawn when
it is over, the generator gets its old state back: a model without randomness leaves it untouched, a
random one advances it by one draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import WithoutDispatch, WithoutFunctions
from pipert.layers.cpu_draws import CPU, DRAWING, current
from pipert.layers.default_generators import default_generator
from pipert.layers.dispatch_keys import set_current_task

_MASK = (1 << 64) - 1


class RunSeed:
    """The seed of one run. The caller draws it, from the generator of a task that he is inside of.

    If ``given`` was agreed on with other processes, it is the seed; the generator advances, too.
    """

    __slots__ = ("_given", "_outer", "_states", "is_concurrent", "number", "used")

    def __init__(self, given: int | None = None) -> None:
        self._outer: Draws | None = current()
        self._given = given
        self.number: int | None = None
        self._states: tuple[Tensor, Tensor] | None = None  # before and after the seed was drawn
        self.used = False
        """Whether any task has drawn."""
        self.is_concurrent = self._outer is not None and self._outer.run.is_concurrent
        """Whether several tasks may run at the same time."""
        if given is not None:
            self.draw()  # also where no layer draws: the generators of all processes move alike

    def draw(self) -> None:
        """Draw the seed, unless that has been done. Called if any layer might draw."""
        if self.number is not None:
            return
        with self._generator() as generator, WithoutFunctions(), WithoutDispatch():
            before = generator.get_state()
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            self.number = int(drawn.item()) if self._given is None else self._given
            self._states = before, generator.get_state()

    def settle(self) -> None:
        """Put the generator's state back if nothing was drawn. Called when the run is over."""
        states, self._states = self._states, None
        if self._outer is not None:
            self._outer.run.used |= self.used
        if self.used or states is None:
            return
        with self._generator() as generator, WithoutFunctions(), WithoutDispatch():
            if torch.equal(generator.get_state(), states[1]):  # else another thread has drawn, too
                generator.set_state(states[0])

    @contextlib.contextmanager
    def _generator(self) -> Iterator[torch.Generator]:
        if self._outer is not None:
            yield self._outer.generator(CPU)
            return
        default = default_generator(CPU)
        with default.changed:
            default.wait()
            yield default.generator


class Draws:
    """The random numbers of one task.

    Args:
        run: the run's seed.
        number: the task's number, unique in its run.
        device: where its partition is.
    """

    __slots__ = (
        "_own", "_parts", "_seed", "_states", "device", "number", "outer", "run", "shared",
    )  # fmt: skip

    def __init__(self, run: RunSeed, number: int, device: torch.device) -> None:
        self.run = run
        self.number = number
        self.device = device
        self.outer: Draws | None = current()
        assert run.number is not None
        self._seed = _mix(run.number ^ _mix(number))
        self._own: dict[torch.device, torch.Generator] = {}
        self.shared = [] if DRAWING.works() else [CPU]
        """The devices whose default generators it uses."""
        if device.type == "cuda":
            self.shared.append(device)
        self._states: dict[torch.device, Tensor] = {}
        """The state that each of these began with, or was left in, last."""
        self._parts = 0

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that the task has for ``device``."""
        if device in self.shared:
            return default_generator(device).generator
        found = self._own.get(device)
        if found is None:
            found = self._own[device] = torch.Generator(device)
            state = self._states.get(device)
            found.manual_seed(self._seed) if state is None else found.set_state(state)
        return found

    def from_here(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes a block in which the numbers are drawn again that are drawn next."""
        used = dict(self._own) | {each: default_generator(each).generator for each in self.shared}
        states = {device: generator.get_state() for device, generator in used.items()}
        return partial(_drawing_from, states, self.run, self.number, self.device)

    def note_draw(self) -> None:
        """Note that the run has drawn random numbers."""
        self.run.used = True

    def __enter__(self) -> None:
        """Make this the current task, which has the default generators that it needs to itself."""
        set_current_task(self)
        try:
            for device in self.shared:
                self.enter(device)
        except BaseException:  # such as an interrupt while it waits
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for device in reversed(self.shared):
            self.leave(device)
        set_current_task(self.outer)

    def enter(self, device: torch.device) -> None:
        """Have the default generator of ``device``, seeded, or as the task has left it."""
        default = default_generator(device)
        default.enter(self)
        if device in self._states:
            default.generator.set_state(self._states[device])
        else:
            default.generator.manual_seed(self._seed)
            self._states[device] = default.generator.get_state()

    def leave(self, device: torch.device) -> bool:
        """Put the default generator of ``device`` back; return whether the task had it."""
        left = default_generator(device).leave(self)
        if left is None:
            return False
        begun = self._states.get(device)
        self._states[device] = left
        if begun is not None and not self.run.used:
            with WithoutFunctions(), WithoutDispatch():
                if not torch.equal(left, begun):
                    self.run.used = True
        return True

    def part(self) -> Draws:
        """Return random numbers for a part of the task that its recomputation will not have."""
        self._parts += 1
        return Draws(self.run, ~(self.number + (self._parts << 48)), self.device)


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Draw the random numbers of a task in the block."""
    with draws, DRAWING.included():
        yield


def _drawing_from(states: dict[torch.device, Tensor], *args: Any) -> AbstractContextManager[None]:
    draws = Draws(*args)
    draws._states.update(states)
    return drawing(draws)


def drawing_apart() -> AbstractContextManager[None]:
    """Return a block for a part of the current task, if any, that its recomputation leaves out."""
    draws = current()
    return drawing(draws.part()) if isinstance(draws, Draws) else contextlib.nullcontext()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Let others draw while this thread waits for a run in the block, if it is inside of tasks."""
    draws: Draws | None = current()
    left = []
    try:
        while draws is not None:
            left += [(draws, device) for device in reversed(draws.shared) if draws.leave(device)]
            draws = draws.outer
        yield
    finally:
        for outer, device in reversed(left):
            outer.enter(device)


def next_seed() -> int:
    """Return the seed that the next run will have, without advancing the generator."""
    seed = RunSeed()
    seed.draw()
    seed.settle()
    assert seed.number is not None
    return seed.number


def initialise_apart(module: nn.Module) -> None:
    """Let a lazy module, at its first call, draw its parameters beside the task's other numbers.

    ``R[i,j]`` draws the numbers of ``F[i,j]`` again, but finds the parameters initialised: a
    dropout behind them would get the numbers that they got.
    """
    module.__dict__.setdefault(_METHOD, partial(_initialise, module))


_METHOD = "initialize_parameters"


def _initialise(module: Any, *args: Any, **kwargs: Any) -> None:
    del module.__dict__[_METHOD]  # the class has it, too, until it is initialised
    with drawing_apart():
        module.initialize_parameters(*args, **kwargs)


def _mix(number: int) -> int:
    """Spreads close numbers over 64 bits (splitmix64); the CPU generator uses 32 bits of a seed."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
