"""Holds what the stages of a run share: one mini-batch on its way through the pipeline.

:class:`Outcome` tracks which actions may start, what has failed, and whether all is settled:

* **R2** ``wait`` returns when each action of the run has run, failed or been left out.
* **R3** of several failures the one that comes first in the plan is raised, whatever the timing.
* **R4** after a failure nothing later in the plan starts. What comes earlier still does: it might
  fail too, and then it is the failure to raise. So the actions before the first failing one always
  run, which makes R3 hold for every timing.

``failed_at`` only decreases, under the lock; workers read it without the lock.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pipert._torch import node_count
from pipert._typing import Value
from pipert.autograd.streams import CopyStreams, compute_stream, wait
from pipert.layers.random_numbers import RunSeed
from pipert.observe.run_trace import RunTrace
from pipert.queues.locks import Latch
from pipert.recompute.effects import Effects
from pipert.schedules.plan import Plan
from pipert.skip.store import Key, Stashed
from pipert.workers.context import CallerContext


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """One mini-batch on its way. Created by the caller; gone when the call returns."""

    plan: Plan
    devices: Sequence[torch.device]
    """The device of each partition."""
    context: CallerContext
    streams: CopyStreams
    trace: RunTrace
    seed: RunSeed
    function: Callable[..., Value] | None = None
    """What runs for each micro-batch in place of the whole of any model."""
    number: int = field(init=False)
    outcome: Outcome = field(init=False)
    effects: Effects = field(init=False)
    skips: dict[int, dict[Key, Stashed]] = field(default_factory=lambda: defaultdict(dict))
    """The skips on their way, by micro-batch. A stage puts them here before it sends its output."""
    outputs: list[Value] = field(default_factory=list)
    sources: dict[tuple[torch.device, int], torch.cuda.Stream] = field(default_factory=dict)
    """The copy streams on which tensors were read, by device and micro-batch."""
    at_end: Callable[[], None] | None = None
    """Called by the caller when the run is over, however it ended."""
    first_node: int = field(default_factory=node_count)
    """The caller's nodes have lower numbers."""

    def __post_init__(self) -> None:
        self.number = self.trace.run.number
        self.outcome = Outcome(self.plan)
        self.effects = Effects(self.plan.goes_back, self.streams)

    def return_what_was_read(self) -> None:
        """D1: make the caller's streams wait for all reads on the devices' copy streams.

        Called by the caller when the run is over, however it ended. Afterwards the caller may
        overwrite arguments, targets and parameters, and what layers returned unchanged.

        A device that has failed accepts no wait; then the run's own failure is the one to raise. An
        interrupt cannot cut this short, and is raised instead of the failure.
        """
        try:
            self._wait_for_sources()
        except RuntimeError:
            if not self.outcome.has_failed():
                raise
        except BaseException:
            self.outcome.cancel()  # otherwise its errors would keep their frames alive
            self._wait_for_sources()
            raise

    def _wait_for_sources(self) -> None:
        for (device, _), source in list(self.sources.items()):
            wait(compute_stream(device), source)

    def end(self) -> None:
        """Call ``at_end``, however the run ended. For the caller; an interrupt cannot skip it."""
        at_end = self.at_end
        if at_end is None:
            return
        try:
            at_end()
        except BaseException:
            at_end()
            raise
        finally:
            self.at_end = None

    def drop(self) -> None:
        """Drop all values, since nobody waits for them; an action may still be executing."""
        self.skips.clear()
        self.outputs.clear()


_NEVER = 1 << 62
_CANCELLED = -1


class Outcome:
    """The outcome of one run. Thread-safe.

    References neither stages nor values, so that whoever watches the run may keep it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed_at = _NEVER
        self._lock = threading.RLock()  # a signal handler may close the pipe inside cancel
        self._errors: dict[int, BaseException] = {}
        self._latch = Latch(len(plan))
        self.settle = self._latch.arrive  # call it once per action

    def fail(self, position: int, error: BaseException) -> None:
        """Note that the action at ``position`` of the plan failed."""
        with self._lock:
            if self.failed_at != _CANCELLED:
                self._errors.setdefault(position, error)
                self.failed_at = min(self.failed_at, position)

    def cancel(self) -> None:
        """Let no further action start, and forget all failures, later ones included."""
        with self._lock:
            self.failed_at = _CANCELLED
            self._errors = {}

    def has_failed(self) -> bool:
        """Return whether an action has failed, or the run was cancelled."""
        return self.failed_at != _NEVER

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all is settled; return whether it is."""
        return self._latch.wait(timeout)

    def is_settled(self) -> bool:
        """Return whether no action of the run is queued or executing."""
        return self._latch.is_open()

    def take_error(self) -> BaseException | None:
        """Return the failure to raise, if any; forget all, so that no cycle keeps their frames."""
        with self._lock:
            errors, self._errors = self._errors, {}
        return errors[min(errors)] if errors else None
