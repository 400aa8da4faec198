"""Copies tensors between devices on CUDA streams of their own (section 3.2.3 of the paper).

Copies run on separate streams so that they neither block computation nor are blocked by it. There
is one stream per device and micro-batch: micro-batches are independent of each other, and so are
their copies. On CPU there are no streams.

Memory safety: the source of a copy may be dropped while the copy still reads it, and the
result is allocated on the copy stream but read on the compute stream. ``record_stream`` tells the
allocator about both, only for tensors that really change device. Nothing that stays on
its device is ever recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from pipert._typing import Tensors


class CopyStreams:
    """The copy streams of one pipe. Made at first use and kept: streams are a limited resource."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several callers may use one pipe at once
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._begun: dict[torch.device, torch.cuda.Event] = {}  # start of the last run, per device

    def get(self, device: torch.device, i: int) -> torch.cuda.Stream | None:
        """Return the stream for copies of micro-batch ``i`` from or to ``device``; None on CPU."""
        if device.type != "cuda":
            return None
        with self._lock:
            stream = self._streams.get((device, i))
            if stream is None:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                # torch's pool has 32, so the caller may have used this one: see follow_the_caller.
                begun = self._begun.get(device)
                stream.wait_event(begun or torch.cuda.current_stream(device).record_event())
                self._streams[device, i] = stream
            return stream

    def follow_the_caller(self, devices: Iterable[torch.device]) -> None:
        """Make the copy streams wait for all work queued on the caller's streams so far.

        The outputs of a run, and the gradients it left in ``.grad``, may be in memory of a copy
        stream. The allocator knows only that run's streams as its users: if the caller reads such
        a tensor on another stream and drops it, the next run's copies must not overwrite it
        before that read is done. Callers order their own streams but do not know these.
        """
        with self._lock:
            streams = dict(self._streams)
        known = {*devices, *(device for device, _ in streams)}
        events = {device: torch.cuda.current_stream(device).record_event() for device in known}
        for (device, _), copying in streams.items():
            copying.wait_event(events[device])
        with self._lock:
            self._begun.update(events)


def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that the current thread computes on; ``None`` on CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def devices_with_own_streams() -> set[torch.device]:
    """Return the CUDA devices whose current stream in this thread is not the default one.

    Initialises CUDA.
    """
    devices = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    default = torch.cuda.default_stream
    return {device for device in devices if compute_stream(device) != default(device)}


def wait(waiter: torch.cuda.Stream | None, awaited: torch.cuda.Stream | None) -> None:
    """Make later work on ``waiter`` wait for the work now on ``awaited``. A no-op on CPU."""
    if waiter is not None and awaited is not None:
        waiter.wait_stream(awaited)


def copy(
    tensors: Tensors,
    device: torch.device,
    source: torch.cuda.Stream | None,
    target: torch.cuda.Stream | None,
    reader: torch.cuda.Stream | None = None,
) -> Tensors:
    """Copy ``tensors`` to ``device``, reading on stream ``source`` and writing on ``target``.

    The caller must have made ``source`` wait for the tensors' computation, and must make its
    compute stream wait for ``target`` before it reads the results. ``reader`` is the stream that
    will read the results; by default the current one.
    """
    # Between GPUs ``to`` never blocks the host. From and to the CPU it does, and must: the CPU
    # memory may be written next.
    with torch.cuda.stream(source), torch.cuda.stream(target):
        results = [tensor.to(device) for tensor in tensors]
    reader = reader or compute_stream(device)
    for tensor, result in zip(tensors, results, strict=True):
        if source is not None:
            _stored(tensor).record_stream(source)
        if reader is not None:
            result.record_stream(reader)
    return tuple(results)


def record(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that the current streams read ``tensors``, wherever it has put them."""
    for tensor in tensors:
        if tensor.is_cuda and tensor.layout == torch.strided and type(tensor) is Tensor:
            _stored(tensor).record_stream(torch.cuda.current_stream(tensor.device))


def _stored(tensor: Tensor) -> Tensor:
    """Return a tensor with the same storage that is safe to pass to ``record_stream``.

    For a lazy conjugate or negation torch would compute the values, record those, and write them
    back, on the compute stream.
    """
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    stored = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return stored.set_(tensor.untyped_storage())
