"""Calls the layers of one partition, in ``F[i,j]`` and in ``R[i,j]``.

:class:`Layers` outlives its run, in the graph, if it may have to recompute. So it references the
partition and whatever must be the same the second time, but neither the run nor a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from pipert._typing import Value
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import Carried, describe
from pipert.errors import add_note
from pipert.layers.buffers import has_buffers, locked
from pipert.layers.compiled_backward import call_compiled
from pipert.layers.compiling import is_compiled
from pipert.layers.effects import Effect, Effects
from pipert.layers.never_recompute import FromForward
from pipert.layers.parameter_copies import ParameterCopies
from pipert.layers.phase import checkpoint_here, is_recomputing, microbatch, recompute_here
from pipert.layers.place import Place, describe_layer
from pipert.layers.random_numbers import Draws, RunSeed
from pipert.layers.snapshot import Snapshot
from pipert.observe.notifier import Notifier
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, Action
from pipert.skip.routes import PartitionSkips
from pipert.skip.store import of_task
from pipert.workers.context import NOTHING, CallerContext


class Layers:
    """The layers of one partition, as one run calls them.

    Args:
        partition: the layers.
        place: where they run, for errors, random numbers and observers.
        context: the caller's.
        skips: those that the partition stashes and pops. If there are any, values are ``Carried``.
        notifier: counts and observes recomputations.
        effects: gets what recomputations return.
    """

    draws = False
    """Whether tasks have random numbers of their own."""

    __slots__ = (
        "_compiled", "_context", "_effects", "_notifier", "_partition", "_place", "_skips",
        "_snapshot", "_with_buffers", "copies",
    )  # fmt: skip

    def __init__(
        self,
        partition: nn.Sequential,
        place: Place,
        context: CallerContext,
        skips: PartitionSkips,
        notifier: Notifier,
        effects: Effects,
    ) -> None:
        self._partition = partition
        self._place = place
        self._context = context
        self._skips = skips if skips.pops else None
        self._notifier = notifier
        self._effects = effects
        self.copies: ParameterCopies | None = None
        """The copies that layers compute with, of parameters that live on other devices."""
        self._snapshot: Snapshot | None = None
        self._with_buffers: set[nn.Module] | None = None
        """The layers that have buffers; known once :meth:`forward` begins."""
        # On CPU one thread runs the backward of all partitions.
        on_gpu = context.grad_enabled and place.device.type == "cuda"
        self._compiled = {layer for layer in partition if is_compiled(layer)} if on_gpu else set()

    def to_recompute(self, i: int) -> FromForward:
        """Begin to checkpoint a micro-batch, in its forward; return what keeps what it returns."""
        checkpoint_here.set(True)
        self.take_snapshot()
        assert self._snapshot is not None
        effect = partial(Effect, self._effects, self._place, i)
        return FromForward(effect, self._snapshot.exempt)

    def forward(self, i: int, kept: FromForward | None, value: Value) -> Value:
        """Compute micro-batch ``i``. The caller's context must be in place.

        Args:
            i: the micro-batch.
            kept: keeps what ``R[i,j]`` needs, or has it; ``None`` if it is not checkpointed.
            value: the input.
        """
        buffers = self._snapshot.buffers if self._snapshot and is_recomputing() else {}
        if self._with_buffers is None:
            self._with_buffers = {layer for layer in self._partition if has_buffers(layer)}
        store = None
        if self._skips is not None:
            value, arriving = value
            store = self._skips.store(arriving)
            of_task.set(store)
        done = 0
        try:
            for name, layer in self._partition._modules.items():
                call: Any = layer
                if layer in self._compiled:
                    call = partial(call_compiled, call)
                if self.copies is not None:
                    call = self.copies.wrap(self._place.j, [layer], call)
                if layer in buffers:
                    call = partial(buffers[layer].put_aside, call)
                if kept is not None and layer in kept.exempt:
                    call = partial(kept.call, describe_layer(name, layer), call)
                with self.locked(layer) if layer in self._with_buffers else NOTHING:
                    if isinstance(value, Arguments):
                        value = call(*value.args, **value.kwargs)
                    else:
                        value = call(value)
                done += 1
            if self._skips is not None and store is not None:
                skips = [store.send(key) for key, _ in self._skips.leaving]
                value = Carried(value, tuple(skips))
            if kept is not None:
                kept.returned.note(value)
            return value
        except BaseException as error:
            add_note(error, partial(self._note_of_layer, i, done, value))
            raise
        finally:
            if store is not None:
                store.clear()

    def take_snapshot(self) -> None:
        """Record, before the first forward, what must be the same in a recomputation."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self._partition)

    def recomputes(self, layer: nn.Module) -> bool:
        """Whether ``layer``, maybe of another partition, is recomputed; if so, record it."""
        assert self._snapshot is not None
        self._snapshot.add(layer)
        return layer not in self._snapshot.exempt

    def refuse_replaced(self, layer: nn.Module) -> None:
        """Refuse a layer whose parameters are replaced by others while it is called."""
        assert self._snapshot is not None
        self._snapshot.refuse_replaced(layer)

    def recompute(
        self,
        i: int,
        kept: FromForward,
        get_value: Callable[[], Value],
        check: Callable[[Value], None],
        on_worker: bool,
    ) -> None:
        """Compute micro-batch ``i`` again: all of ``R[i,j]``.

        Args:
            i: the micro-batch.
            kept: what its forward has kept.
            get_value: makes the input; called under the caller's context.
            check: called with the output at the end; may raise.
            on_worker: whether this thread is a worker, under the caller's context already, rather
                than a thread of autograd.
        """
        self.replay(i, lambda: partial(self.forward, i, kept, get_value()), check, on_worker)

    def replay(
        self,
        i: int,
        begin: Callable[[], Callable[[], Value]],
        check: Callable[[Value], None],
        on_worker: bool,
    ) -> None:
        """Like :meth:`recompute`, but ``begin`` returns the function that computes the output."""
        notifier, context = self._notifier, self._context
        action = Action(RECOMPUTE, i, self._place.j)
        notifier.count_recomputation()
        with notifier.recomputing(action, self._place.device) if notifier.is_watched else NOTHING:
            try:
                if on_worker:  # as a task, under the caller's context already
                    self._compute_again(begin, check)
                else:
                    with context.on_any_thread(), microbatch(i):
                        context.variables.copy().run(self._compute_again, begin, check)
            except BaseException as error:
                self._place.note(error, action)
                if self._snapshot is not None:
                    add_note(error, self._snapshot.other_settings)
                raise

    def _compute_again(
        self, begin: Callable[[], Callable[[], Value]], check: Callable[[Value], None]
    ) -> None:
        assert self._snapshot is not None
        self._snapshot.refuse_changes()
        recompute_here.set(True)
        check(begin()())

    def checkpointed(
        self, i: int, layer: nn.Module, name: str, call: Callable[..., Value]
    ) -> Callable[..., Value]:
        """Return ``call``, of a layer of any model, as it is called in ``F`` and in ``R``."""
        return partial(self._call_layer, layer, Effect(self._effects, self._place, i, name), call)

    def _call_layer(
        self, layer: nn.Module, effect: Effect, call: Callable[..., Any], /, *args: Any,
        **kwargs: Any,
    ) -> Value:  # fmt: skip
        assert self._snapshot is not None
        if is_recomputing():
            call = partial(self._snapshot.buffers[layer].put_aside, call)
        with self.locked(layer):
            y = call(*args, **kwargs)
        effect.note(y)
        return y

    def locked(self, layer: nn.Module) -> AbstractContextManager[object]:
        """Return the block in which ``layer`` is called."""
        return locked(layer, self._effects)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the layers."""
        return self._partition.parameters()

    def backward(
        self, i: int, differentiate: Callable[..., Value], *args: Any, kind: str = BACKWARD
    ) -> Value:
        """Call ``differentiate(*args)``: ``B[i,j]`` of a step, or ``W[i,j]``."""
        return differentiate(*args)

    def note_of_call(self, i: int, layer: str, args: Any, kwargs: dict[str, Any]) -> str:
        """Return the note for an error that ``layer`` raised: where it was, and its input."""
        given = args[0] if len(args) == 1 and not kwargs else (*args, kwargs) if kwargs else args
        where = self._place.describe(self._current_action(i), f", {layer}")
        return f"{where}, input {describe(given)}"

    def _current_action(self, i: int) -> Action:
        return Action(RECOMPUTE if is_recomputing() else FORWARD, i, self._place.j)

    def _note_of_layer(self, i: int, done: int, value: Value) -> str:
        layers = [describe_layer(*item) for item in self._partition._modules.items()]
        if done == len(layers):  # an interrupt after the last one
            return self._place.describe(self._current_action(i))
        note = self.note_of_call(i, layers[done], (value,), {})
        before = layers[done - 1] if done else self._place.before
        if value is not None or not before:
            return note
        return f"{note}, because {before} returned None; does it lack a return?"

    def __repr__(self) -> str:
        return f"<Layers of {self._place}>"


class RandomLayers(Layers):
    """Layers that might draw, in a run whose tasks have random numbers of their own."""

    draws = True

    __slots__ = ("_seed",)

    def __init__(self, seed: RunSeed, *args: Any) -> None:
        super().__init__(*args)
        self._seed = seed
        seed.draw()

    def forward(self, i: int, kept: FromForward | None, value: Value) -> Value:
        place = self._place
        with Draws(self._seed, place.number(i), place.device, (FORWARD, place.j)):
            return super().forward(i, kept, value)

    def backward(
        self, i: int, differentiate: Callable[..., Value], *args: Any, kind: str = BACKWARD
    ) -> Value:
        place, number = self._place, self._place.number_of_backward(i)
        with Draws(self._seed, number, place.device, (kind, place.j), is_backward=True):
            return differentiate(*args)
