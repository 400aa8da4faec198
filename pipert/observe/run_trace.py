"""Counts the runs of a pipe, and shows observers, recordings and profilers what each run does.

Whether anybody watches is decided when a run begins. If nobody does, nothing is measured or made.

``B[i,j]`` of a call is no function but autograd's walk through the nodes that ``F[i,j]`` made. It
lasts from before the last of them until after the first, since autograd goes through the nodes of a
thread in the reverse order, and begins no task before it is done with the one before
(``autograd.order``). Hooks change nothing in the graph, and so nothing in what is computed.

Counters change under a lock that a signal handler may take again and a forked child finds free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.autograd.profiler import record_function

from pipert._torch import backward_id, node_count, outputs_of, profiler_is_on, sequence_nr
from pipert.autograd.leaves import find_leaves, is_cast_of_leaf
from pipert.observe.event import BACKWARD, Event, Observer, RunInfo
from pipert.observe.timeline import Origin, Span, Timeline, stamp
from pipert.queues.locks import ProcessLock
from pipert.schedules.action import RECOMPUTE, Action
from pipert.schedules.plan import Plan
from pipert.status import Statistics, TaskInfo, WorkerStatistics
from pipert.workers.context import NOTHING

_log = logging.getLogger("pipert")

_counting = ProcessLock(reentrant=True)

_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ


class RunTrace:
    """What is seen of one run, from any thread.

    References neither the run nor the pipe: recomputations outlive the run, and maybe the pipe.
    """

    def __init__(self, trace: Trace, run: RunInfo, is_step: bool, profiled: bool) -> None:
        self.run = run
        """What observers are told about the run."""
        self.outcome = "cancelled"
        """``'cancelled'`` until the run has succeeded or failed."""
        self._trace = trace
        self._is_step = is_step
        self._observers = tuple(trace.observers.values())
        self.recordings = trace.recordings
        self._is_profiled = profiled
        self.is_recorded = profiled or bool(self.recordings)
        """Whether tasks are recorded, or shown to a profiler."""
        self.is_watched = self.is_recorded or bool(self._observers)
        """Whether anybody is told of tasks."""

    def count_recomputation(self) -> None:
        """Count a recomputation of the run."""
        with _counting.current:
            self._trace.recomputations += 1

    def tell(self, about: Callable[[Observer], None]) -> None:
        """Call ``about`` with each observer; drop an observer for which it raises."""
        present = self._trace.observers
        for observer in self._observers:
            if id(observer) not in present:
                continue  # removed meanwhile, or dropped
            try:
                about(observer)
            except Exception:
                present.pop(id(observer), None)
                text = traceback.format_exc()  # not the exception, which may keep tensors alive
                _log.error("%r raised and is told nothing more: %s", observer, text)

    def failed(self, action: Action, device: torch.device, error: BaseException) -> None:
        """Tell observers that ``error`` of an action is about to be raised."""
        task = self._task(action, device)
        self.tell(lambda observer: observer.failed(task, error))

    @contextlib.contextmanager
    def task(self, action: Action, device: torch.device) -> Iterator[None]:
        """Show all who watch that the block is a task."""
        task, began = self._task(action, device), perf_counter()
        shown = _range(str(action), device) if self._is_profiled else NOTHING
        event = NOTHING
        if self.recordings:
            event = self.during(action.phase, action.i, action.j, device)
        self.tell(lambda observer: observer.task_started(task))
        try:
            with event, shown:
                yield
        except BaseException as error:
            if action.kind == RECOMPUTE and not self._is_step:  # else told when the call raises it
                self.failed(action, device, error)
            raise
        finally:
            seconds = perf_counter() - began
            self.tell(lambda observer: observer.task_finished(task, seconds))

    def _task(self, action: Action, device: torch.device) -> TaskInfo:
        return TaskInfo(self.run.number, action.phase, action.j, action.i, device)

    def begin(
        self, kind: str, i: int, j: int, device: torch.device,
        clock: torch.device | None = None, stream: torch.cuda.Stream | None = None, **about: Any,
    ) -> Span:  # fmt: skip
        """Begin an event, which is shown once it has finished.

        Args:
            kind, i, j, device, about: the fields of the event.
            clock: the device whose clock times it, by default ``device``.
            stream: the stream that reads the clock, by default the current one.
        """
        event = Event(kind, i, j, device, 0.0, 0.0, self.run.number, **about)
        clock = clock or device
        span = Span(event, clock, stream, stamp(clock, stream))
        for recording in self.recordings:
            if recording._is_open:
                recording._spans.append(span)
        return span

    @contextlib.contextmanager
    def during(self, *event: Any, **about: Any) -> Iterator[None]:
        """Record the block as an event, unless it fails; arguments are those of :meth:`begin`."""
        span = self.begin(*event, **about)
        yield
        span.finish()

    def watch_node(self, node: Node | None, *event: Any, **about: Any) -> None:
        """Record the backward of one node as an event; arguments are those of :meth:`begin`."""
        if node is not None:
            _watch(node, node, partial(self.begin, *event, **about))

    def watch_backward(
        self, i: int, ys: Sequence[Tensor], parts: Sequence[tuple[int, int, torch.device]],
        xs: Sequence[Node] = (),
    ) -> None:  # fmt: skip
        """Record ``B[i,j]`` of a call in each of the ``parts``.

        Args:
            i: the micro-batch.
            ys: the outputs of the last part, just computed.
            parts: for each partition the number of the first node made there, *j* and its device.
            xs: the nodes that made the inputs of the first part.
        """
        ends = {y.grad_fn for y in ys if y.grad_fn is not None}.difference(xs)
        found = [node for node in find_leaves(ends, stop=xs).nodes if not is_cast_of_leaf(node)]
        nodes = {sequence_nr(node): node for node in found}
        stops = [*[first for first, *_ in parts[1:]], node_count()]
        for (first, j, device), stop in zip(parts, stops, strict=True):
            made = range(first, stop)  # not by the caller, whose numbers are lower
            own = [k for k, node in nodes.items() if k in made and _runs_on(node, device)]
            if own:
                begin = partial(self._begin_backward, i, j, device)
                _watch(nodes[max(own)], nodes[min(own)], begin)

    def _begin_backward(self, i: int, j: int, device: torch.device) -> Span:
        # A mark alone: a range cannot end in another node.
        with _range(str(Action("B", i, j)), device) if self._is_profiled else NOTHING:
            return self.begin(BACKWARD, i, j, device)


@contextlib.contextmanager
def _range(name: str, device: torch.device) -> Iterator[None]:
    """Show the block in ``torch.profiler`` and, by NVTX, in Nsight Systems."""
    nvtx = torch.cuda.nvtx.range(name) if device.type == "cuda" else NOTHING
    with nvtx, record_function(name):
        yield


def _runs_on(node: Node, device: torch.device) -> bool:
    """Whether ``device`` runs a node; one that copies a tensor runs where the tensor comes from."""
    outputs = outputs_of(node)
    return not outputs or any(output.device == device for output in outputs)


def _watch(first: Node, last: Node, begin: Callable[[], Span]) -> None:
    """Record what ``begin`` begins, from before the ``first`` node to after the ``last``.

    The hooks reference no tensors and no nodes.
    """
    spans: dict[int, Span] = {}  # by the number of the backward

    def begins(*_: Any) -> None:
        spans[backward_id()] = begin()

    def ends(*_: Any) -> None:
        span = spans.pop(backward_id(), None)
        if span is not None:  # the backward begins in the middle, as torch.autograd.grad may
            span.finish()

    first.register_prehook(begins)
    last.register_hook(ends)


class Trace:
    """The counters, observers and recordings of one pipe. Thread-safe."""

    def __init__(self) -> None:
        self.observers: dict[int, Observer] = {}
        """By ``id``, since they may define equality. Safe for any thread and signal handler:
        operations of a dict on one item are atomic."""
        self.recordings: tuple[Timeline, ...] = ()
        self.runs = 0
        self.recomputations = 0
        self._ended: Counter[str] = Counter()  # by outcome
        self.live: weakref.WeakSet[RunTrace] = weakref.WeakSet()

    def statistics(self, workers: tuple[WorkerStatistics, ...] = ()) -> Statistics:
        """Return the counts so far, with those of ``workers``.

        An interrupt may keep the end of a run from being counted. Nobody holds its ``RunTrace``
        then; so a run that is neither live nor ended in another way was cancelled.
        """
        with _counting.current:
            runs, live, again = self.runs, len(self.live), self.recomputations
            good, bad = self._ended["succeeded"], self._ended["failed"]
        return Statistics(runs, live, good, bad, runs - live - good - bad, again, workers)

    @contextlib.contextmanager
    def open(self, plan: Plan) -> Iterator[RunTrace]:
        """Count a run of ``plan``, and tell observers when it begins and ends."""
        profiled = _UNDER_NSIGHT or profiler_is_on()
        with _counting.current:
            info = RunInfo(self.runs, plan.m, plan.n)
            run = RunTrace(self, info, plan.goes_back, profiled)
            self.runs += 1
            self.live.add(run)
        began = perf_counter()
        try:
            if run.is_watched:
                run.tell(lambda observer: observer.run_started(info))
            yield run
        finally:
            seconds, outcome = perf_counter() - began, run.outcome
            with _counting.current:
                self.live.discard(run)
                self._ended[outcome] += 1
            for recording in run.recordings if outcome != "succeeded" else ():
                recording.failed.add(info.number)
            if run.is_watched:
                run.tell(lambda observer: observer.run_finished(info, seconds, outcome))

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` about all runs that begin from now on."""
        if not isinstance(observer, Observer):
            raise TypeError(f"an observer must be a pipert.Observer, got {observer!r}")
        self.observers[id(observer)] = observer

    def remove_observer(self, observer: Observer) -> None:
        """Stop telling ``observer`` about runs."""
        self.observers.pop(id(observer), None)

    @contextlib.contextmanager
    def record(
        self, devices: Iterable[torch.device], workers: Sequence[int]
    ) -> Iterator[Timeline]:
        """Record the runs that begin inside the block, and what of them happens there."""
        timeline = Timeline((), [*devices], workers)
        timeline._origin, timeline._is_open = Origin(devices), True
        with _counting.current:
            self.recordings = (*self.recordings, timeline)
        try:
            yield timeline
        finally:
            with _counting.current:
                self.recordings = tuple(one for one in self.recordings if one is not timeline)
            timeline._is_open = False
            timeline._spans = [span for span in timeline._spans if span.end is not None]
