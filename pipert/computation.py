"""What ``F[i,j]`` and ``R[i,j]`` both do: the layers of partition *j* on micro-batch *i*.

A computation outlives its run, in the graph, when it may have to be repeated. It therefore
references the partition and what must be the same the second time, but neither the run nor a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.autograd.random_state import TaskRandom, call_layer
from pipert.autograd.running_stats import KeepRunningStats, may_update_running_stats
from pipert.microbatch import Arguments
from pipert.value import describe
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

    __slots__ = ("_parameters", "updates_stats")

    def __init__(self, partition: nn.Sequential) -> None:
        # By where they are looked up: walking the modules again for each R would cost more than
        # the rest of it for small ones.
        self._parameters = [
            (module._parameters, name, p, _version(p))
            for module in partition.modules()
            for name, p in module._parameters.items()
        ]
        self.updates_stats = may_update_running_stats(partition)

    def is_current(self) -> bool:
        """Whether the parameters are still the same, and unchanged."""
        return all(
            home.get(name) is p and _version(p) == version
            for home, name, p, version in self._parameters
        )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


class Computation:
    """One partition on one micro-batch.

    Args:
        partition: its layers.
        i, j, m: which micro-batch of how many, and which partition.
        place: where the partition computes, for errors.
        context: the caller's.
        random: the task's random numbers; ``None`` when no layer draws any.
        snapshot: of the partition, if it is to be recomputed.
    """

    __slots__ = ("_context", "_partition", "_place", "_random", "_snapshot", "i", "j", "m")

    def __init__(
        self,
        partition: nn.Sequential,
        i: int,
        j: int,
        m: int,
        place: torch.device,
        context: CallerContext,
        random: TaskRandom | None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._partition = partition
        self.i = i
        self.j = j
        self.m = m
        self._place = place
        self._context = context
        self._random = random
        self._snapshot = snapshot

    def forward(self, value: Value) -> Value:
        """``F[i,j]``, under the caller's context already."""
        return self._compute(value)

    def checkpointed_forward(self, value: Value) -> Value:
        """``F[i,j]`` that will be recomputed."""
        _checkpointing.set(True)
        return self._compute(value)

    def recompute(self, get_value: Callable[[], Value]) -> Value:
        """``R[i,j]``, on the thread of a backward; the value is made under the context, too."""
        return self._context.run_recomputation(self._recompute, get_value)

    def _recompute(self, get_value: Callable[[], Value]) -> Value:
        assert self._snapshot is not None
        if not self._snapshot.is_current():
            raise RuntimeError(
                f"a parameter of partition {self.j} was modified between a forward and its "
                "recomputation; call the optimizer after the backward, or use checkpoint='never'"
            )
        _recomputing.set(True)
        if not self._snapshot.updates_stats:
            return self._compute(get_value())
        with KeepRunningStats(self._partition):
            return self._compute(get_value())

    def _compute(self, value: Value) -> Value:
        if self._random is None:
            return self._run_layers(value)
        return self._random.run(self._run_layers, value)

    def _run_layers(self, value: Value) -> Value:
        done = 0
        try:
            for layer in self._partition:
                call = layer if self._random is None else partial(call_layer, layer)
                if isinstance(value, Arguments):
                    value = call(*value.args, **value.kwargs)
                else:
                    value = call(value)
                done += 1
        except BaseException as error:
            error.add_note(self._note(done, value))
            raise
        return value

    def _note(self, index: int, value: Value) -> str:
        task, phase = ("R", "recomputation") if is_recomputing() else ("F", "forward")
        name, layer = list(self._partition._modules.items())[index]
        return (
            f"in {phase} {task}[{self.i},{self.j}]: partition {self.j} on {self._place}, layer "
            f"{name!r} ({type(layer).__qualname__}), micro-batch {self.i} of {self.m}, input "
            f"{describe(value)}"
        )

    def __repr__(self) -> str:
        return f"<Computation [{self.i},{self.j}] of {self.m} micro-batches on {self._place}>"
