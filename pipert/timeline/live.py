"""A timeline that fills while a pipe runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from pipert.seeing.counters import Counters
from pipert.seeing.event import Event
from pipert.seeing.recorder import Recording
from pipert.timeline.timeline import Timeline

__all__: list[str] = []


class LiveTimeline(Timeline):
    """The events recorded so far. References neither the pipe nor its threads."""

    def __init__(
        self,
        recording: Recording,
        devices: Sequence[torch.device],
        workers: Sequence[int],
        balance: Sequence[int],
        chunks: int,
    ) -> None:
        super().__init__((), devices, workers, chunks=chunks)
        self._recording = recording
        self._balance = tuple(balance)
        self._final: tuple[Event, ...] | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        if self._final is not None:
            return self._final
        is_over = not self._recording.is_open
        events = tuple(self._recording.events())
        if is_over:
            self._final = events
        return events

    @property
    def steps(self) -> frozenset[int]:
        return frozenset(self._recording.steps)

    @property
    def layer_seconds(self) -> Sequence[Sequence[float]] | None:
        layers = []
        seconds = self._recording.layer_seconds()
        for j, count in enumerate(self._balance):
            # A failed task did not reach its last layer.
            whole = [took for took in seconds.get(j, ()) if len(took) == count]
            if not whole:
                return None
            layers.append([median(of_layer) for of_layer in zip(*whole, strict=True)])
        return layers


class Record:
    """``pipe.record()``: a reusable context; each entry yields a new timeline."""

    def __init__(
        self,
        counters: Counters,
        devices: Sequence[torch.device],
        workers: Sequence[int],
        balance: Sequence[int],
        chunks: int,
    ) -> None:
        self._counters = counters
        self._of_pipe = devices, workers, balance, chunks
        self._open: list[Recording] = []

    def __enter__(self) -> Timeline:
        devices, workers, balance, chunks = self._of_pipe
        recording = Recording(devices)
        self._open.append(recording)
        self._counters.start_recording(recording)
        return LiveTimeline(recording, devices, workers, balance, chunks)

    def __exit__(self, *_: object) -> None:
        self._counters.stop_recording(self._open.pop())

    def __repr__(self) -> str:
        return f"<Record, {'open' if self._open else 'not open'}>"
