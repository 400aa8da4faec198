"""Makes random numbers independent of thread timing, and repeats them in recomputations.

The CPU's default generator is shared by the process. Workers that draw from it at once would get
numbers that depend on timing, and a recomputation cannot rewind it while others use it. So each
task has generators of its own, one for each device that it draws on:

* Their seed comes from the run's seed and the task's number (``Place.number``). The run's seed is
  one number drawn from the caller's generator when the first task of the run draws: a model without
  randomness leaves the generator untouched, a random one advances it by one draw.
* While the task computes, every operation that draws gets one (``layers/generators.py``), whoever
  calls it: a layer, a scripted function, a hook, a transform, a thread of autograd.
* ``R[i,j]`` starts with the seed of ``F[i,j]``; the loss and ``B[i,j]`` of a step have their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from pipert.layers.compiling import CompileLock
from pipert.layers.dispatch_keys import plain_operations, stash, stashed
from pipert.layers.generators import DRAWING, DRAWN
from pipert.layers.nested_checkpoint import refuse_nested_checkpoint
from pipert.queues.process_lock import ProcessLock

__all__: list[str] = []

_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")
# Held while a run's first number is drawn, and while a default generator is lent.
_draw_lock = ProcessLock(reentrant=True)
# Taken before it, since a compilation restores the default generators.
_compile_lock = CompileLock()


class RunSeed:
    """The seed of one run, drawn when first needed.

    Made by the caller. A run inside a task of another run draws from that task's generator. If
    ``given`` was agreed on with other processes, it is the seed for good; the generator advances
    all the same.
    """

    __slots__ = ("_before", "_is_given", "_number", "_outer", "used")

    def __init__(self, given: int | None = None) -> None:
        self._outer: Stream | None = stashed() if DRAWING.is_included() else None
        self._number = given
        self._is_given = given is not None
        self._before: torch.Tensor | None = None  # the generator's state before it was advanced
        self.used = False

    def get(self) -> int:
        """Return the number that the next draw would give; the caller holds ``_draw_lock``."""
        if self._number is None:
            self._number = _draw(self._generator().clone_state())
        return self._number

    def use(self) -> None:
        """Advance the generator, once, after the run has drawn random numbers."""
        if not self.used:
            self._before = self._generator().get_state()
            _draw(self._generator())
            self.used = True
            if self._outer is not None:
                self._outer.seed.use()

    def settle(self) -> None:
        """Advance the generator again if a layer has reset it. Called when the run is over.

        ``fork_rng`` saves and restores the generator's state, as ``torch.utils.checkpoint`` does in
        a backward. Where two threads do that at once, one may save the state that the other has
        set, and restore it in the end: the state in which the run began.
        """
        before, self._before = self._before, None
        if before is not None and self._outer is None:
            with _draw_lock.current, plain_operations():
                if torch.equal(before, torch.default_generator.get_state()):
                    _draw(torch.default_generator)

    def forget(self) -> None:
        """Forget the number if nothing has been drawn with it, so that another may be drawn."""
        if not self.used and not self._is_given:
            self._number = None
            if self._outer is not None:
                self._outer.forget()

    def _generator(self) -> torch.Generator:
        return torch.default_generator if self._outer is None else self._outer.generator(_CPU)


class Stream:
    """The random numbers of one task, drawn in ``with stream, DRAWING.included()``.

    An interrupt may leave a stream stashed, but without the key it is never read.

    Args:
        seed: the run's seed.
        number: the task's number, unique in its run.
    """

    __slots__ = ("_apart", "_before", "_generators", "_number", "seed")

    def __init__(self, seed: RunSeed, number: int) -> None:
        self.seed = seed
        self._apart: Stream | None = None
        self._number = number
        self._generators: dict[torch.device, torch.Generator] = {}
        self._before: Stream | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of ``device``.

        The caller holds ``_draw_lock``, unless the seed has been used.
        """
        found = self._generators.get(device)
        if found is None:
            seed = _mix(self.seed.get() ^ _mix(self._number))
            found = self._generators[device] = torch.Generator(device).manual_seed(seed)
        return found

    def get_if_drawn(self, device: torch.device) -> torch.Generator | None:
        if not self.seed.used:
            return None
        return self._generators.get(device) or self.generator(device)

    @contextlib.contextmanager
    def exclusive(self, device: torch.device) -> Iterator[torch.Generator]:
        with _compile_lock.current, _draw_lock.current:
            generator = self.generator(device)
            before = generator.get_state()
            try:
                yield generator
            finally:
                with plain_operations():
                    drawn = not torch.equal(before, generator.get_state())
                if drawn:
                    self.seed.use()
                else:
                    self.forget()
        if drawn:
            refuse_nested_checkpoint(DRAWN)

    def apart(self) -> Stream:
        """Return the task's other stream, for numbers that its recomputation does not draw."""
        if self._apart is None:
            self._apart = Stream(self.seed, ~self._number)
        return self._apart

    def forget(self) -> None:
        """Forget generators and seed if nothing has been drawn in the run."""
        if not self.seed.used:
            self._generators.clear()
            self.seed.forget()

    def __enter__(self) -> None:
        self._before = stashed()
        stash(self)

    def __exit__(self, *_: object) -> None:
        stash(self._before)


def apart() -> AbstractContextManager[None]:
    """Let the block draw what the current task's recomputation does not, if it has a stream."""
    stream = stashed() if DRAWING.is_included() else None
    return contextlib.nullcontext() if stream is None else stream.apart()


def next_seed() -> int:
    """Return the seed that the next run will have, without advancing the generator."""
    with _draw_lock.current:
        return RunSeed().get()


def _draw(generator: torch.Generator) -> int:
    with plain_operations():
        number = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return int(number.item())


def _mix(number: int) -> int:
    """Spreads close numbers over 64 bits (splitmix64); the CPU generator uses 32 bits of a seed."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
