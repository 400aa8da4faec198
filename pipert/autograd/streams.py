"""CUDA streams for copies, or nothing at all on CPU (section 3.2.3 of the paper).

Copies between devices run on streams of their own, so that they neither block computation nor are
blocked by it. There is one for each device and micro-batch: micro-batches do not depend on each
other, so their copies need not either.

What keeps memory safe: the source of a copy may be dropped while the copy still reads it, and the
result is allocated on the copy stream but read on the compute stream. Both are told to the
allocator with ``record_stream``, for tensors that really change device only. Nothing that stays on
its device is ever recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from pipert._typing import Tensors

__all__: list[str] = []


class CopyStreams:
    """The copy streams of one pipe, made at first use and kept: streams are a limited resource."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # callers of one pipe may ask at once
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._begun: dict[torch.device, torch.cuda.Event] = {}  # the last run, on each device

    def get(self, device: torch.device, i: int) -> torch.cuda.Stream | None:
        """The stream for copies of micro-batch ``i`` from or to ``device``; ``None`` on CPU."""
        if device.type != "cuda":
            return None
        with self._lock:
            stream = self._streams.get((device, i))
            if stream is None:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                # The pool has 32: it may be one that the caller had, see follow_the_caller.
                begun = self._begun.get(device)
                stream.wait_event(begun or torch.cuda.current_stream(device).record_event())
                self._streams[device, i] = stream
            return stream

    def follow_the_caller(self, devices: Iterable[torch.device]) -> None:
        """Let what they do next come after all that the caller's streams have been given so far.

        What a run has returned, or left in ``.grad``, may be in memory of a copy stream. The
        allocator knows that the streams of that run have used it, and no others: if the caller
        reads it on another one and drops it, the copies of the next run must not be written there
        before that is done. He orders his own streams; these he does not know.
        """
        with self._lock:
            streams = dict(self._streams)
        known = {*devices, *(device for device, _ in streams)}
        events = {device: torch.cuda.current_stream(device).record_event() for device in known}
        for (device, _), copying in streams.items():
            copying.wait_event(events[device])
        with self._lock:
            self._begun.update(events)

    def __repr__(self) -> str:
        return f"<CopyStreams, {len(self._streams)} made>"


def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that the current thread computes on; ``None`` on CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def devices_with_own_streams() -> set[torch.device]:
    """The CUDA devices that the current thread computes on by other streams than the default."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # asking would do it
        return set()
    devices = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    default = torch.cuda.default_stream
    return {device for device in devices if compute_stream(device) != default(device)}


def wait(waiter: torch.cuda.Stream | None, awaited: torch.cuda.Stream | None) -> None:
    """Make what comes next on ``waiter`` wait for what is on ``awaited`` now. CPU: no-op."""
    if waiter is not None and awaited is not None:
        waiter.wait_stream(awaited)


def copy(
    tensors: Tensors,
    device: torch.device,
    source: torch.cuda.Stream | None,
    target: torch.cuda.Stream | None,
    reader: torch.cuda.Stream | None = None,
) -> Tensors:
    """Copy ``tensors`` to ``device``; reading on stream ``source``, writing on ``target``.

    The caller has made ``source`` wait for what computes the tensors, and makes its compute stream
    wait for ``target`` before it reads the results.
    ``reader`` is the stream that will read the results; by default the current one.
    """
    # Between GPUs ``to`` never lets the host wait. From and to the CPU it does, and must: memory of
    # the CPU may be written next.
    with torch.cuda.stream(source), torch.cuda.stream(target):
        results = [tensor.to(device) for tensor in tensors]
    reader = reader or compute_stream(device)
    for tensor, result in zip(tensors, results, strict=True):
        if source is not None:
            tensor.record_stream(source)
        if reader is not None:
            result.record_stream(reader)
    return tuple(results)
