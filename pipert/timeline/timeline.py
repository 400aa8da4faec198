"""``Timeline``: what happened on each device, and when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from pipert.model.devices import assign_workers
from pipert.seeing.event import KINDS, Event
from pipert.timeline.chrome import chrome_trace
from pipert.timeline.picture import save_picture
from pipert.timeline.report import Report, make_report

__all__ = ["Timeline"]


class Timeline:
    """Events of a pipe. :meth:`Pipe.record` makes one; so can you, of events of your own.

    Args:
        events: in any order.
        devices: of each partition.
        workers: which worker serves each partition, counted from 0. Default: as in a pipe, one for
            each CUDA device and each ``'cpu'``.
        layers: for each partition how many seconds its layers take in a forward task; from them
            comes the better balance in the report. Default: unknown.
        chunks: the number of micro-batches that were asked for; a call with fewer had no more rows.
            Default: unknown.
        steps: the calls of ``forward_backward``, by number. Default: none.

    Raises:
        ValueError: what is given does not fit together; the first event that does not is named.
    """

    def __init__(
        self,
        events: Iterable[Event],
        devices: Sequence[torch.device | str],
        workers: Sequence[int] | None = None,
        layers: Sequence[Sequence[float]] | None = None,
        chunks: int | None = None,
        steps: Iterable[int] = (),
    ) -> None:
        self._events = tuple(sorted(events, key=lambda event: (event.start, event.end)))
        self._devices = tuple(torch.device(device) for device in devices)
        self._workers = tuple(assign_workers(list(self._devices)) if workers is None else workers)
        self._layers = layers
        self._chunks = chunks
        self._steps = frozenset(steps)
        n = len(self._devices)
        if len(self._workers) != n or {*self._workers} != {*range(len({*self._workers}))}:
            raise ValueError(
                f"workers must have a number for each of the {n} devices, counted from 0 without "
                f"gaps, got {list(self._workers)}"
            )
        if layers is not None and (len(layers) != n or not all(map(len, layers))):
            raise ValueError(f"layers must have a list of seconds for each of the {n} partitions")
        for event in self._events:
            _check(event, n)

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that is over by now, in the order in which it began.

        If something ran on CUDA, waits until it has.
        """
        return self._events

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of each partition."""
        return self._devices

    @property
    def lanes(self) -> tuple[str, ...]:
        """The workers by name: ``'cuda:0'``, or ``'cpu 0'`` for a logical CPU device."""
        names: dict[int, str] = {}
        for worker, device in zip(self._workers, self._devices, strict=True):
            names[worker] = f"cpu {worker}" if device.type == "cpu" else str(device)
        return tuple(names[worker] for worker in sorted(names))

    def lane(self, event: Event) -> int:
        """Which of :attr:`lanes` an event belongs to; a copy to the one that it goes to."""
        return self._workers[event.j]

    @property
    def steps(self) -> frozenset[int]:
        """The calls of ``forward_backward``, in which workers go backward, too."""
        return self._steps

    @property
    def layer_seconds(self) -> Sequence[Sequence[float]] | None:
        """For each partition how long its layers take in a forward task, the median; if known."""
        return self._layers

    def report(self) -> Report:
        """What the devices did with their time, and what would make better use of it.

        ``print(timeline.report())`` shows it; its fields are the figures.

        Raises:
            ValueError: there is no forward task in the timeline.
        """
        return make_report(
            self.events, self.lanes, self._workers, self._devices, self.layer_seconds,
            self._chunks, self.steps,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write a trace that Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` open.

        One lane for what each device computes and one for its copies, with arrows from task to
        task.
        """
        trace = chrome_trace(self.events, self.lanes, self._workers)
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def plot(self, path: str | Path, title: str | None = None) -> None:
        """Draw it as the paper does: a lane for each device, a box for each task.

        Args:
            path: what it ends with is the format: ``.png``, ``.svg`` or ``.pdf``.
            title: written above.

        Raises:
            ImportError: matplotlib is not there.
        """
        save_picture({title or "": self}, path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self.lanes)}>"  # events may take long


def _check(event: Event, n: int) -> None:
    wrong = ""
    if event.kind not in KINDS:
        wrong = f"a kind that is none of {list(KINDS)}"
    elif not (event.i >= 0 and 0 <= event.j < n):
        wrong = f"no place in {n} partitions"
    elif not (math.isfinite(event.start) and event.start <= event.end < math.inf):
        wrong = "no start, or an end before it"
    if wrong:
        raise ValueError(f"{event} has {wrong}")
