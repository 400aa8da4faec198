"""Calls the layers of one partition, in ``F[i,j]`` and in ``R[i,j]``.

:class:`Layers` outlives its run, in the graph, if it may have to recompute. So it references the
partition and whatever must be the same the second time, but neither the run nor a queue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from pipert._typing import Value
from pipert.autograd.order import begin_numbers
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import describe
from pipert.errors import add_note
from pipert.layers.compiling import call_compiled, is_compiled
from pipert.layers.parameter_copies import ParameterCopies
from pipert.layers.place import Place, describe_layer
from pipert.layers.random_numbers import RunSeed, TaskRng
from pipert.observe.run_trace import RunTrace
from pipert.recompute.effects import Effects
from pipert.recompute.public import is_recomputing, microbatch, recompute_here
from pipert.recompute.segment import Segments
from pipert.recompute.snapshot import ParameterVersions
from pipert.schedules.action import FORWARD, RECOMPUTE, Action
from pipert.skip.store import Carried, Store, of_task
from pipert.workers.context import NOTHING, CallerContext

Compute = Callable[[Value], Value]
Watch = Callable[[Compute, Value], Value]


class Layers:
    """The layers of one partition, as one run calls them.

    Args:
        partition: the layers.
        place: where they run, for errors, random numbers and observers.
        context: the caller's.
        has_skips: whether the partition stashes or pops any. If so, values are ``Carried``.
        trace: counts and shows recomputations.
        effects: gets what recomputations return.
        seed: the run's, if any of the layers might draw: tasks have random numbers of their own.
    """

    __slots__ = (
        "_calls", "_context", "_effects", "_layers", "_partition", "_place", "_seed", "_snapshot",
        "_trace", "copies", "has_skips",
    )  # fmt: skip

    def __init__(
        self,
        partition: nn.Sequential,
        place: Place,
        context: CallerContext,
        has_skips: bool,
        trace: RunTrace,
        effects: Effects,
        seed: RunSeed | None = None,
    ) -> None:
        self._partition = partition
        self._layers = list(partition)
        self._place = place
        self._context = context
        self.has_skips = has_skips
        self._trace = trace
        self._effects = effects
        self._seed = seed
        if seed is not None:
            seed.draw()
        self.copies: ParameterCopies | None = None
        """The copies that layers compute with, of parameters that live on other devices."""
        self._snapshot: ParameterVersions | None = None
        self._calls: list[Any] = self._layers
        if "torch._dynamo" in sys.modules:
            self._calls = [
                partial(call_compiled, layer) if is_compiled(layer) else layer
                for layer in partition
            ]

    def segments(self, i: int, first_node: int = 0) -> Segments:
        """Begin to checkpoint micro-batch ``i`` in its forward.

        Before the first one, the thread's nodes get numbers from ``first_node`` on (**V2**).
        """
        if self._snapshot is None:
            self._snapshot = ParameterVersions(self._partition)
            begin_numbers(first_node)
        compare, copies = partial(self._effects.compare, self._place, i), self.copies
        used = tuple if copies is None else partial(copies.of_partition, self._place.j)
        return Segments(partial(self._replay, i), compare, used)

    def forward(
        self, i: int, segments: Segments | None, value: Value, watch: Watch | None = None
    ) -> Value:
        """Compute micro-batch ``i``. The caller's context must be in place.

        Args:
            i: the micro-batch.
            segments: records what ``R[i,j]`` repeats; ``None`` if it is not checkpointed.
            value: the input.
            watch: calls its first argument, which computes layers, with the second.
        """
        rng = None
        if self._seed is not None:
            action = Action(FORWARD, i, self._place.j)
            rng = TaskRng(self._seed, action, self._place.device)
        elif segments is None and watch is None:
            return self._compute(i, 0, None, value)
        with NOTHING if rng is None else rng:
            exempt = self._snapshot.exempt if segments is not None and self._snapshot else set()
            for start, stop in self._parts(exempt) if exempt else ((0, len(self._layers)),):
                compute: Compute = partial(self._compute, i, start, stop)
                first = compute if watch is None else partial(watch, compute)
                watch = None  # what later layers get is another value
                if segments is None or self._layers[start] in exempt:
                    value = first(value)
                else:
                    drawing = None if rng is None else rng.replay_from_here()
                    rest = list(self._partition._modules.items())[stop:]
                    name = f"the input of {describe_layer(*rest[0])}" if rest else ""
                    value = segments.call(name, first, compute, drawing, value, copies=True)
            return value

    def _parts(self, exempt: set[nn.Module]) -> Iterator[tuple[int, int]]:
        """Yield from which layer to which chains go that are exempt as a whole, or are not."""
        start = 0
        for _, found in groupby([layer in exempt for layer in self._layers]):
            stop = start + len(list(found))
            yield start, stop
            start = stop

    def _compute(self, i: int, start: int, stop: int | None, value: Value) -> Value:
        """Compute some of the layers, one after the other."""
        buffers = self._snapshot.buffers if self._snapshot and recompute_here.get() else {}
        if self.has_skips:
            value, skips = value
            of_task.set(store := Store(skips))
        done = start
        try:
            for layer, call in zip(self._layers[start:stop], self._calls[start:stop], strict=True):
                if self.copies is not None:
                    call = self.copies.wrap(self._place.j, [layer], call)
                if layer in buffers:
                    call = partial(buffers[layer].put_aside, call)
                if isinstance(value, Arguments):
                    value = call(*value.args, **value.kwargs)
                else:
                    value = call(value)
                done += 1
            return Carried(value, store.skips()) if self.has_skips else value
        except BaseException as error:
            add_note(error, partial(self._note_of_layer, i, done, value))
            raise

    def recomputes(self, layer: nn.Module) -> bool:
        """Whether ``layer``, maybe of another partition, is recomputed; if so, record it."""
        assert self._snapshot is not None
        return self._snapshot.recomputes(layer)

    def _replay(self, i: int, compute: Callable[[], None], on_worker: bool) -> None:
        """Compute ``R[i,j]``.

        Args:
            i: the micro-batch.
            compute: computes its segments again; called under the caller's context.
            on_worker: whether this thread is a worker, under the caller's context already, rather
                than a thread of autograd.
        """
        trace, context = self._trace, self._context
        action = Action(RECOMPUTE, i, self._place.j)
        trace.count_recomputation()
        with trace.task(action, self._place.device) if trace.is_watched else NOTHING:
            try:
                if on_worker:  # as a task, under the caller's context already
                    self._compute_again(compute)
                else:
                    with context.on_any_thread(), microbatch(i):
                        context.variables.copy().run(self._compute_again, compute)
            except BaseException as error:
                self._place.note(error, action)
                raise

    def _compute_again(self, compute: Callable[[], None]) -> None:
        assert self._snapshot is not None
        self._snapshot.refuse_changes()
        recompute_here.set(True)
        compute()

    def call_layer(
        self, i: int, layer: nn.Module, name: str, call: Callable[..., Value], value: Value
    ) -> Value:
        """Call a layer of any model, in ``F`` or ``R``."""
        assert self._snapshot is not None
        args, kwargs = value
        if not is_recomputing():
            return call(*args, **kwargs)
        try:
            return self._snapshot.buffers[layer].put_aside(call, *args, **kwargs)
        except BaseException as error:
            add_note(error, partial(self.note_of_call, i, name, args, kwargs))
            raise

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the layers."""
        return self._partition.parameters()

    def note_of_call(self, i: int, layer: str, args: Any, kwargs: dict[str, Any]) -> str:
        """Return the note for an error that ``layer`` raised: where it was, and its input."""
        given = args[0] if len(args) == 1 and not kwargs else (*args, kwargs) if kwargs else args
        where = self._place.describe(self._current_action(i), f", {layer}")
        return f"{where}, input {describe(given)}"

    def _current_action(self, i: int) -> Action:
        return Action(RECOMPUTE if is_recomputing() else FORWARD, i, self._place.j)

    def _note_of_layer(self, i: int, done: int, value: Value) -> str:
        layers = [*self._partition._modules.items()]
        if done == len(layers):  # an interrupt after the last one
            return self._place.describe(self._current_action(i))
        return self.note_of_call(i, describe_layer(*layers[done]), (value,), {})
