"""What ``F[i,j]`` and ``R[i,j]`` both do: the layers of partition *j* on micro-batch *i*.

A computation outlives its run, in the graph, when it may have to be repeated. It therefore
references the partition and what must be the same the second time, but neither the run nor a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial

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


Parameters = Sequence[tuple[Tensor, int]]


def parameters_of(partition: nn.Sequential) -> Parameters:
    """The parameters with their versions, to find out later whether they have changed."""
    return [(p, -1 if p.is_inference() else p._version) for p in partition.parameters()]


class Computation:
    """One partition on one micro-batch.

    Args:
        partition: its layers.
        i, j, m: which micro-batch of how many, and which partition.
        place: where the partition computes, for errors.
        context: the caller's.
        random: the task's random numbers; ``None`` when no layer draws any.
        parameters: those of the partition with their versions, if it is to be recomputed.
    """

    __slots__ = ("_context", "_parameters", "_partition", "_place", "_random", "i", "j", "m")

    def __init__(
        self,
        partition: nn.Sequential,
        i: int,
        j: int,
        m: int,
        place: str,
        context: CallerContext,
        random: TaskRandom | None,
        parameters: Parameters = (),
    ) -> None:
        self._partition = partition
        self.i = i
        self.j = j
        self.m = m
        self._place = place
        self._context = context
        self._random = random
        self._parameters = parameters

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
        self._check_parameters()
        _recomputing.set(True)
        if not may_update_running_stats(self._partition):
            return self._compute(get_value())
        with KeepRunningStats(self._partition):
            return self._compute(get_value())

    def _check_parameters(self) -> None:
        now = parameters_of(self._partition)
        if len(now) != len(self._parameters) or any(
            new[0] is not old[0] or new[1] != old[1]
            for new, old in zip(now, self._parameters, strict=True)
        ):
            raise RuntimeError(
                f"a parameter of partition {self.j} was modified between a forward and its "
                "recomputation; call the optimizer after the backward, or use checkpoint='never'"
            )

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
