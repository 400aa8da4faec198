"""Makes random numbers independent of thread timing, and repeats them in recomputations.

The standard way is one default generator for each device, which all threads share. Workers that
draw at once would get numbers that depend on timing, and a recomputation cannot rewind it while
others draw. So a task that might draw has the generators to itself, seeded from the run's seed and
the task's action; afterwards they have their old state
(``layers/default_generators.py``):

* **that of its GPU**, always: one worker serves a device, so hardly anybody waits;
* **the CPU's**, for which all partitions would wait, in *turns*: the first task of a kind in each
  partition has it, and shows whether its state moves. If it does, the later ones take turns; if
  not, they do not ask. A first ``F[i,j]`` follows the one in the partition before it, so they wait
  for nobody. What must hold: a layer that draws on the CPU does so the first time it runs.
* A model with its own ``forward`` may choose by what it has drawn which layers it calls next, and
  in which partition. So once it has drawn, all partitions take turns; and what has not run shows
  nothing: neither a partition without calls, nor a layer that is called for the first time later.

``R[i,j]`` takes its turn if ``F[i,j]`` did, and starts with its seed; the loss has its own. If
forwards have drawn on the CPU, ``B[i,j]`` of a step takes turns as well, with a seed of its own:
``torch.utils.checkpoint`` restores the state there, and draws. What else a backward draws comes
from the generators as they are, as without a pipe.

The run's seed is a number drawn from the caller's generator. If nothing in the run has drawn when
it is over, the generator gets its old state back: a model without randomness leaves it untouched, a
random one advances it by one draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipert import _torch
from pipert._torch import (
    WithoutDispatch,
    WithoutFunctions,
    call_after_backward,
    has_hooks,
    have_modules_hooks,
)
from pipert.autograd.engine import (
    get_thread_local,
    remove_thread_local,
    set_thread_local,
)
from pipert.layers.default_generators import default_generator
from pipert.layers.intercepted import compiled_call
from pipert.schedules.action import BACKWARD, WEIGHT, Action

CPU = torch.device("cpu")
_TASK = "pipert_task"
_MASK = (1 << 64) - 1
_OF_TASKS = 0x9E3779B9
"""The upper half of what tasks seed the CPU's generator with, which draws by the lower one."""

Kind = tuple[str, int]
"""The kind of an action, and its partition."""


class Turns:
    """What is known of the tasks that draw on the CPU. Each access is one operation of a set."""

    __slots__ = ("drawing", "seen")

    def __init__(self) -> None:
        self.drawing = set[Kind | str]()
        """The kinds that have drawn; of any model, the phases."""
        self.seen = set[Kind | nn.Module]()
        """The kinds of tasks, and the layers of any model, that have run with the generator."""


def current_task() -> TaskRng | None:
    """Return the task that this thread, or the one whose backward it runs, is inside of."""
    task: TaskRng | None = get_thread_local(_TASK)
    return task


class RunSeed:
    """The seed of one run. The caller draws it, from the generator of a task that he is inside of.

    Args:
        of_all: that of several runs, of which this is one. The state is put back when ``of_all``
            is settled, if none of them has drawn.
    """

    __slots__ = (
        "_of_all", "_outer", "_states", "is_concurrent", "is_over", "number", "turns", "used",
    )  # fmt: skip

    def __init__(self, of_all: RunSeed | None = None) -> None:
        self._outer: TaskRng | None = current_task() if of_all is None else of_all._outer
        self._of_all = of_all
        self.number: int | None = None
        self._states: tuple[Tensor, Tensor] | None = None  # before and after the seed was drawn
        self.used = False
        """Whether any task has drawn."""
        self.turns = Turns()
        """May be shared with runs of the same layers that overlap."""
        self.is_over = False
        """Whether the caller no longer waits for the run."""
        self.is_concurrent = False
        """Whether several workers may compute at once."""

    def draw(self, agreed: int | None = None) -> None:
        """Draw the seed, unless that has been done. Called if any layer might draw.

        If processes have ``agreed`` on one, it takes the place of the drawn one: the generators of
        all processes move alike.
        """
        if self.number is None:
            drawn = (self._of_all or self)._draw()
            self.number = drawn if agreed is None else agreed

    def _draw(self) -> int:
        if self._outer is not None and CPU not in self._outer._held:
            return self._outer.seed_of_inner_run()
        with self._generator() as generator, WithoutFunctions(), WithoutDispatch():
            before = generator.get_state()
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            if self._states is not None and torch.equal(before, self._states[1]):
                before = self._states[0]  # nobody else has drawn since another run of these did
            self._states = before, generator.get_state()
            return int(drawn.item())

    def settle(self) -> None:
        """Put the generator's state back if nothing was drawn. Called when the run is over.

        A ``torch.utils.checkpoint`` in a layer that does not draw on the CPU saves the state
        anyway, and puts it back in ``B[i,j]``; so does a ``fork_rng`` in ``F[i,j]``. Meanwhile a
        task in another partition may have had the generator, whose state they then leave.
        """
        self.is_over = True
        states, self._states = self._states, None
        if self.used and (around := self._of_all or self._outer and self._outer.run):
            around.used = True
        if states is not None:
            self._put_back(states[self.used], states[1])

    def _put_back(self, state: Tensor, if_still: Tensor) -> None:
        """Set the generator's state, unless somebody else has drawn, such as the user's thread."""
        with self._generator() as generator, WithoutFunctions(), WithoutDispatch():
            is_ours = generator.initial_seed() >> 32 == _OF_TASKS  # a layer may have saved it
            if is_ours or torch.equal(generator.get_state(), if_still):
                generator.set_state(state)

    def guard_backward(self, nodes: Iterable[Node]) -> None:
        """Let a call's backwards, which begin at ``nodes``, leave the state as it was, likewise."""
        for node in nodes if self.number is not None and self._outer is None else ():
            node.register_prehook(self._note_state)

    def _note_state(self, _: object) -> None:
        with self._generator() as generator, WithoutFunctions(), WithoutDispatch():
            state = generator.get_state()
            call_after_backward(partial(self._put_back, state, state))

    def _generator(self) -> AbstractContextManager[torch.Generator]:
        default = default_generator(CPU)
        if self._outer is None:
            return default.outside()
        return contextlib.nullcontext(default.generator)


class TaskRng:
    """The random number generators of one task, in a ``with`` block.

    Args:
        run: the run's seed.
        action: unique in its run. The first of a kind shows whether the others draw on the CPU. One
            that goes backward has the CPU's generator alone.
        device: where its partition is.
        states: those of the generators to begin with, instead of seeded ones.
        inner_runs: the number of runs before, of a pipe in a layer.
    """

    __slots__ = (
        "_action", "_held", "_initial_states", "_inner_runs", "_kind", "_released", "_states",
        "_was_over", "called", "device", "is_backward", "outer", "run",
    )  # fmt: skip

    def __init__(
        self, run: RunSeed, action: Action, device: torch.device,
        states: dict[torch.device, Tensor] | None = None, inner_runs: int = 0,
    ) -> None:  # fmt: skip
        self.run = run
        self.device = device
        self.is_backward = action.kind in (BACKWARD, WEIGHT)
        self.outer: TaskRng | None = current_task()
        """The task that it is inside of."""
        self._action = action
        self._kind: Kind = action.kind, action.j
        self._was_over = run.is_over  # as in a recomputation of a call
        self._held: list[torch.device] = []  # the devices whose generators it has
        self._released: list[tuple[TaskRng, torch.device]] = []  # those of outer tasks meanwhile
        self._initial_states: dict[torch.device, Tensor] = {}  # the state that each began with
        self._states = dict(states or {})  # the one it is to begin or go on with
        self._inner_runs = inner_runs
        self.called: set[nn.Module] | None = None
        """The layers of any model that it has called. Without one it shows nothing."""

    @property
    def is_given_up(self) -> bool:
        """Whether the run is over, though it was not when the task began."""
        return self.run.is_over and not self._was_over

    def __enter__(self) -> None:
        """Make this the current task, which has the default generators that it needs to itself."""
        turns, kind = self.run.turns, self._kind
        drawing = kind in turns.drawing or kind[0] in turns.drawing
        in_turns = drawing or kind not in turns.seen or self.is_backward
        devices = [*self._states] or [CPU] if self.is_backward else [CPU, self.device]
        try:
            if self.outer is not None:  # for no generator is waited out of order
                _release(self.outer, self._released)
            set_thread_local(_TASK, self)
            for device in dict.fromkeys(devices):
                if device.type == "cuda" or in_turns:
                    self._held.append(device)
                    self._enter(device)
        except BaseException:  # such as an interrupt while it waits
            self.__exit__(BaseException)
            raise

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            self._exit(error is None)
        except BaseException:  # an interrupt, or no other task would ever have the generators
            self._exit(error is None)
            raise

    def _exit(self, is_done: bool) -> None:
        for device in reversed(self._held):
            if self._leave(device):
                self._note_draws(device, is_done)
        if self.outer is not None:
            set_thread_local(_TASK, self.outer)
            _reacquire(self._released)
        elif _torch.has_object(_TASK):
            remove_thread_local(_TASK)

    def _enter(self, device: torch.device) -> None:
        """Acquire the generator of ``device``; seed it, or resume the state that the task left."""
        default = default_generator(device)
        default.enter(self)
        if device in self._states:
            default.generator.set_state(self._states[device])
        else:
            seed = self._seed()
            seed = _OF_TASKS << 32 | seed & 0xFFFFFFFF if device == CPU else seed
            default.generator.manual_seed(seed)
            self._states[device] = default.generator.get_state()
        self._initial_states.setdefault(device, self._states[device])

    def _leave(self, device: torch.device) -> bool:
        """Put the default generator of ``device`` back; return whether the task had it."""
        state = default_generator(device).leave(self)
        if state is None:
            return False
        self._states[device] = state
        return True

    def _note_draws(self, device: torch.device, is_done: bool) -> None:
        if (initial := self._initial_states.get(device)) is None:  # an exception from outside
            return
        if self.run.used and device != CPU:
            return
        with WithoutFunctions(), WithoutDispatch():
            has_drawn = not torch.equal(self._states[device], initial)
        if has_drawn:
            self.run.used = True  # in one operation, as other workers do
        if device == CPU and has_drawn:
            self.run.turns.drawing.add(self._kind if self.called is None else self._kind[0])
        if device == CPU and is_done and self.called != set():
            self.run.turns.seen.update((self._kind, *(self.called or ())))

    def replay_from_here(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes a block in which the numbers are drawn again that are drawn next."""
        states = {each: default_generator(each).generator.get_state() for each in self._held}
        about = self.run, self._action, self.device
        return partial(TaskRng, *about, states, self._inner_runs)

    def note_call(self, layer: nn.Module) -> None:
        """Note the call of a layer of any model; take a turn if none has called it before."""
        assert self.called is not None
        self.called.add(layer)
        if CPU not in self._held and layer not in self.run.turns.seen:
            with paused():  # no generator is waited for out of order
                self._held.insert(0, CPU)
                self._enter(CPU)

    def seed_of_inner_run(self) -> int:
        """Return the seed of a run of a pipe that the task calls without the CPU's generator."""
        self._inner_runs += 1
        return _mix(self._seed() ^ _mix(self._inner_runs)) >> 1

    def _seed(self) -> int:
        assert self.run.number is not None
        kind, i, j = self._action
        return _mix(self.run.number ^ _mix(i << 32 | j << 8 | ord(kind[0])))


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Let others draw while this thread waits for a run in the block, if it is inside of tasks."""
    released: list[tuple[TaskRng, torch.device]] = []
    try:
        _release(current_task(), released)
        yield
    finally:
        _reacquire(released)


def _release(rng: TaskRng | None, released: list[tuple[TaskRng, torch.device]]) -> None:
    while rng is not None:
        for device in reversed(rng._held):
            if rng._leave(device):
                released.append((rng, device))
        rng = rng.outer


def _reacquire(released: list[tuple[TaskRng, torch.device]]) -> None:
    while released:
        rng, device = released[-1]
        rng._enter(device)
        released.pop()


def next_seed() -> int:
    """Return the seed that the next run will have, without advancing the generator."""
    seed = RunSeed()
    seed.draw()
    seed.settle()
    assert seed.number is not None
    return seed.number


def _mix(number: int) -> int:
    """Spreads close numbers over 64 bits (splitmix64); the CPU generator uses 32 bits of a seed."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer could draw random numbers. True unless it is known not to."""
    kind = type(layer)
    # A compilation saves and restores the generators.
    if has_hooks(layer) or "forward" in layer.__dict__ or compiled_call(layer) is not None:
        return True
    if kind in _DROPOUTS:
        return layer.training
    if kind is nn.Sequential:
        return any(map(may_draw, layer.children()))
    if kind in _OTHERS:
        return True
    return kind.__module__ not in _DETERMINISTIC


def draws(partition: nn.Sequential) -> bool:
    """Whether a layer of the partition could draw random numbers, in its current mode.

    Any layer could if there are global module hooks.
    """
    return have_modules_hooks() or any(map(may_draw, partition))


_DROPOUTS = {
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.RReLU,
}  # fmt: skip
_OTHERS = {nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention}
# All other layers in these files of torch.nn.modules do not draw, once they have parameters.
_DETERMINISTIC = {
    f"torch.nn.modules.{name}"
    for name in (
        "activation", "batchnorm", "conv", "flatten", "instancenorm", "linear", "normalization",
        "padding", "pixelshuffle", "pooling", "sparse", "upsampling",
    )
}  # fmt: skip
