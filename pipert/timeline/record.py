"""A timeline that fills while a pipe runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from statistics import median

from pipert.recording.event import Event
from pipert.recording.recorder import Recording
from pipert.runtime import Runtime
from pipert.timeline.timeline import Timeline

__all__: list[str] = []


class _Recorded(Timeline):
    """What a recording has seen so far."""

    def __init__(self, recording: Recording, runtime: Runtime, balance: Sequence[int]) -> None:
        super().__init__((), runtime.devices, runtime.workers)
        self._recording = recording
        self._balance = tuple(balance)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._recording.events())

    @property
    def layer_seconds(self) -> Sequence[Sequence[float]] | None:
        layers = []
        seconds = self._recording.layer_seconds()
        for j, count in enumerate(self._balance):
            # A task that failed did not come to its last layer.
            whole = [took for took in seconds.get(j, ()) if len(took) == count]
            if not whole:
                return None
            layers.append([median(of_layer) for of_layer in zip(*whole, strict=True)])
        return layers


@contextlib.contextmanager
def record(runtime: Runtime, balance: Sequence[int]) -> Iterator[Timeline]:
    """Record the runs of ``runtime`` that begin inside of the block."""
    recording = Recording(runtime.devices)
    runtime.ledger.start_recording(recording)
    try:
        yield _Recorded(recording, runtime, balance)
    finally:
        runtime.ledger.stop_recording(recording)
