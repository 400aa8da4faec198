"""Makes random numbers independent of thread timing, and repeats them in recomputations.

The CPU's default generator is shared by the process. Workers drawing from it at once would divide
its numbers by timing, and a recomputation cannot rewind it under the others. So each task has
generators of its own, one for each device that it draws on:

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
_drawing = ProcessLock(reentrant=True)
# Held around it: a compilation restores the default generators.
_compiling = CompileLock()


class RunSeed:
    """The seed of one run, drawn when first needed.

    Made in the caller. A run inside a task of another one draws from that task's generator.
    """

    __slots__ = ("_before", "_number", "_outer", "used")

    def __init__(self) -> None:
        self._outer: Stream | None = stashed() if DRAWING.is_included() else None
        self._number: int | None = None
        self._before: torch.Tensor | None = None  # the state of the generator
        self.used = False

    def get(self) -> int:
        """Return the number that the next draw would give; the caller holds ``_drawing``."""
        if self._number is None:
            self._number = _draw(self._generator().clone_state())
        return self._number

    def use(self) -> None:
        """Advance the generator, once, after random numbers have been drawn."""
        if not self.used:
            self._before = self._generator().get_state()
            _draw(self._generator())
            self.used = True
            if self._outer is not None:
                self._outer.seed.use()

    def settle(self) -> None:
        """Advance the generator again if a layer has put it back. When the run is over.

        ``fork_rng`` saves and restores the state of the process, as ``torch.utils.checkpoint`` does
        in a backward. Where two threads do that at once, one may save what the other has put on,
        and restore that in the end: the state in which the run began.
        """
        before, self._before = self._before, None
        if before is not None and self._outer is None:
            with _drawing.current, plain_operations():
                if torch.equal(before, torch.default_generator.get_state()):
                    _draw(torch.default_generator)

    def forget(self) -> None:
        """Release the number if nothing has been drawn with it."""
        if not self.used:
            self._number = None
            if self._outer is not None:
                self._outer.forget()

    def _generator(self) -> torch.Generator:
        return torch.default_generator if self._outer is None else self._outer.generator(_CPU)


class Stream:
    """The random numbers of one task, drawn in ``with stream, DRAWING.included()``.

    What an interrupt leaves stashed nobody reads without the key.

    Args:
        seed: the run's.
        number: the task's, unique in its run.
    """

    __slots__ = ("_before", "_generators", "_number", "seed")

    def __init__(self, seed: RunSeed, number: int) -> None:
        self.seed = seed
        self._number = number
        self._generators: dict[torch.device, torch.Generator] = {}
        self._before: Stream | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """Return that of ``device``; the caller holds ``_drawing``, or the seed is used."""
        found = self._generators.get(device)
        if found is None:
            seed = _mix(self.seed.get() ^ _mix(self._number))
            found = self._generators[device] = torch.Generator(device).manual_seed(seed)
        return found

    def settled(self, device: torch.device) -> torch.Generator | None:
        return self.generator(device) if self.seed.used else None

    @contextlib.contextmanager
    def alone(self, device: torch.device) -> Iterator[torch.Generator]:
        with _compiling.current, _drawing.current:
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

    def forget(self) -> None:
        """Begin anew if nothing has been drawn in the run."""
        if not self.seed.used:
            self._generators.clear()
            self.seed.forget()

    def __enter__(self) -> None:
        self._before = stashed()
        stash(self)

    def __exit__(self, *_: object) -> None:
        stash(self._before)


def next_seed() -> int:
    """Return the seed that the next run has, without advancing the generator."""
    with _drawing.current:
        return RunSeed().get()


class GivenSeed(RunSeed):
    """A seed that was agreed on with other processes; drawing advances the generator all the same.

    Args:
        number: the seed.
    """

    __slots__ = ()

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def forget(self) -> None:
        """Keep the number, which is not this process's to choose."""


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
