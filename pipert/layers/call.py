"""What ``F[i,j]`` and ``R[i,j]`` both do: the layers of partition *j* on micro-batch *i*.

A computation outlives its run, in the graph, when it may have to be repeated. It therefore
references the partition and what must be the same the second time, but neither the run nor a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipert._typing import Value
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import describe, differentiable, version
from pipert.errors import add_note
from pipert.layers.buffers import Buffers, KeepBuffers, may_change_buffers
from pipert.layers.compiled_backward import give_own_contexts
from pipert.layers.drawing import is_compiled
from pipert.layers.random_numbers import RunSeed, call_layer, run_seeded
from pipert.layers.tied import Substitute, Weights
from pipert.schedules.clock_cycle import Schedule
from pipert.seeing.ledger import Account
from pipert.skip.routes import Carried, PartitionSkips
from pipert.skip.store import of_task
from pipert.status import FORWARD, LETTERS, RECOMPUTATION, task_name
from pipert.workers.context import CallerContext

__all__ = ["is_checkpointing", "is_recomputing"]

# Set in the task's own copy of the caller's context variables, so there is nothing to reset.
_checkpointing: ContextVar[bool] = ContextVar("pipert_checkpointing", default=False)
_recomputing: ContextVar[bool] = ContextVar("pipert_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether this code runs in a forward that will be recomputed (section 3.2.4 of the paper).

    True inside a layer during ``F[i,j]`` of a checkpointed micro-batch, False elsewhere.
    """
    return _checkpointing.get()


def is_recomputing() -> bool:
    """Whether this code runs in a recomputation, i.e. inside a layer during ``R[i,j]``.

    A layer with side effects, such as counting its calls, can skip them here.
    """
    return _recomputing.get()


class Snapshot:
    """What a partition was like when it computed, for its recomputations. One for a lane."""

    __slots__ = ("_parameters", "buffers")

    def __init__(self, partition: nn.Sequential) -> None:
        # Walking the modules again for each R would cost more than the rest of it for small ones.
        # A parameter that is still uninitialised is about to change.
        self._parameters = [
            (home, name, p, version(p))
            for home, name, p in _places(partition)
            if p is None or not is_lazy(p)
        ]
        self.buffers = Buffers(partition) if may_change_buffers(partition) else None

    def is_current(self) -> bool:
        """Whether the parameters are still the same, and unchanged."""
        return all(
            home.get(name) is p and version(p) == before
            for home, name, p, before in self._parameters
        )


def _places(
    module: nn.Module,
) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]]:
    """The parameters of a module by where they are looked up, which is quick to do again.

    A scripted module cannot be looked up in.
    """
    return [
        (home if isinstance(home, dict) else {name: parameter}, name, parameter)
        for home in (child._parameters for child in module.modules())
        for name, parameter in home.items()
    ]


class Computation:
    """What one partition computes in one run.

    Args:
        partition: its layers.
        j: its index.
        schedule: the run's.
        place: where the partition computes, for errors.
        context: the caller's.
        seed: of the run's random numbers; ``None`` when no layer draws any.
        skips: which the partition stashes and pops. If any, it gets and returns ``Carried``.
        account: where recomputations are told.
    """

    __slots__ = (
        "_account", "_compiled", "_context", "_j", "_partition", "_place", "_schedule", "_seed",
        "_skips", "_snapshot", "_substitutes", "after_layer", "layers_took", "on_worker",
    )  # fmt: skip

    def __init__(
        self,
        partition: nn.Sequential,
        j: int,
        schedule: Schedule,
        place: torch.device,
        context: CallerContext,
        seed: RunSeed | None,
        skips: PartitionSkips,
        account: Account,
    ) -> None:
        self._account = account
        self._substitutes: dict[nn.Module, Substitute] = {}
        self._partition = partition
        self._j = j
        self._schedule = schedule
        self._place = place
        self._context = context
        self._seed = seed
        self._skips = skips
        self._snapshot: Snapshot | None = None
        # On CPU one thread goes backward, whatever the partition.
        on_gpu = context.grad_enabled and place.type == "cuda"
        self._compiled = {layer for layer in partition if is_compiled(layer)} if on_gpu else set()
        self.layers_took = 0.0  # s, the last time
        self.on_worker = False  # whether a recomputation is a worker's task
        self.after_layer: Callable[[], None] | None = None  # if anybody wants to know

    def lend(self, weights: Weights, copies: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Let the layers compute with ``copies`` of parameters that live on other devices.

        ``versions`` are those of the parameters when the run began.
        """
        lent = list(zip(weights, copies, versions, strict=True))
        for layer in self._partition:
            used = set(layer.parameters())
            of_layer = [one for one in lent if one[0] in used]
            if of_layer:
                self._substitutes[layer] = Substitute(*zip(*of_layer, strict=True))

    def forward(self, i: int, value: Value) -> Value:
        """``F[i,j]``, under the caller's context already."""
        return self._compute(i, value)

    def checkpointed_forward(self, i: int, value: Value) -> Value:
        """``F[i,j]`` that will be recomputed."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self._partition)
        _checkpointing.set(True)
        return self._compute(i, value)

    def recompute(
        self, i: int, get_value: Callable[[], Value], check: Callable[[], None]
    ) -> None:
        """``R[i,j]``, on the thread of a backward; the value is made under the context, too.

        ``check`` is called at the end, and may raise.
        """
        recompute = self._recompute_in_context
        self._account.recomputation(i, self._j, self._place, recompute, i, get_value, check)

    def _recompute_in_context(
        self, i: int, get_value: Callable[[], Value], check: Callable[[], None]
    ) -> None:
        try:
            context = self._context
            run = context.run_forward if self.on_worker else context.run_recomputation
            run(self._recompute, i, get_value)
            check()
        except BaseException as error:
            self.note_task(error, i, RECOMPUTATION)
            raise

    def _recompute(self, i: int, get_value: Callable[[], Value]) -> None:
        assert self._snapshot is not None
        if not self._snapshot.is_current():
            raise RuntimeError(
                f"a parameter of partition {self._j} was modified between a forward and its "
                "recomputation, or is another tensor, as with torch.func.functional_call; call the "
                "optimizer after the backward, or use checkpoint='never'"
            )
        _recomputing.set(True)
        if self._snapshot.buffers is None:
            self._compute(i, get_value())
            return
        with KeepBuffers(self._snapshot.buffers):
            self._compute(i, get_value())

    def _compute(self, i: int, value: Value) -> Value:
        compute = self._run_layers_with_skips if self._skips else self._run_layers
        if self._seed is None:
            return compute(i, value)
        position = self._schedule.position(i, self._j)
        return run_seeded(self._seed, position, self._place, compute, i, value)

    def _run_layers_with_skips(self, i: int, carried: Carried) -> Carried:
        store = self._skips.store(carried.skips)
        of_task.set(store)
        try:
            value = self._run_layers(i, carried.value)
            return Carried(value, tuple([store.send(key) for key, _ in self._skips.leaving]))
        finally:
            store.clear()

    def _run_layers(self, i: int, value: Value) -> Value:
        done = 0
        started = perf_counter()
        try:
            for layer in self._partition:
                call = layer if self._seed is None else partial(call_layer, layer)
                if self._substitutes and layer in self._substitutes:
                    call = partial(self._substitutes[layer].during, call)
                compiled = bool(self._compiled) and layer in self._compiled
                given = [x.grad_fn for x in differentiable(value)[0]] if compiled else []
                if isinstance(value, Arguments):
                    value = call(*value.args, **value.kwargs)
                else:
                    value = call(value)
                if compiled:
                    give_own_contexts(differentiable(value)[0], given)
                if self.after_layer is not None:
                    self.after_layer()
                done += 1
        except BaseException as error:
            add_note(error, partial(self._note_of_layer, i, done, value))
            raise
        self.layers_took = perf_counter() - started
        return value

    def _note_of_layer(self, i: int, done: int, value: Value) -> str:
        # An interrupt may come when all are done.
        phase = RECOMPUTATION if is_recomputing() else FORWARD
        for name, layer in list(self._partition._modules.items())[done : done + 1]:
            where = f", layer {name!r} ({type(layer).__qualname__})"
            return f"{self._note(i, phase, where)}, input {describe(value)}"
        return self._note(i, phase)

    def note_task(self, error: BaseException, i: int, phase: str) -> None:
        """Say which task ``error`` was raised in, unless a layer was named already."""
        add_note(error, partial(self._note_if_new, error, i, phase))

    def _note_if_new(self, error: BaseException, i: int, phase: str) -> str:
        note = self._note(i, phase)
        start = note[: note.index(",", note.index("]"))]
        notes = getattr(error, "__notes__", ())
        return "" if any(str(other).startswith(start) for other in notes) else note

    def _note(self, i: int, phase: str, where: str = "") -> str:
        return (
            f"in {phase} {task_name(LETTERS[phase], i, self._j)}: partition {self._j} on "
            f"{self._place}{where}, micro-batch {i} of {self._schedule.m}"
        )

    def __repr__(self) -> str:
        return f"<Computation of partition {self._j} on {self._place}>"
