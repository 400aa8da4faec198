"""Provides streams that a test uses as a program must, and work that keeps a stream busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["own_streams", "sleep"]


@contextlib.contextmanager
def own_streams(*devices: str) -> Iterator[list[Any]]:
    """Makes the block compute on a new stream of each device, and yields these streams.

    At the start they wait for the streams that were current, and at the end these wait for them.
    Both waits are needed: weights made on the current stream are read on the new one, and when they
    are freed, their memory is reused at once, since nobody has told the allocator
    (``record_stream``) about the stream that reads them.
    """
    make: Any = torch.cuda.Stream
    streams = [make(device) for device in devices]
    with contextlib.ExitStack() as stack:
        for stream in streams:
            before = torch.cuda.current_stream(stream.device)
            stream.wait_stream(before)
            stack.callback(before.wait_stream, stream)
            stack.enter_context(torch.cuda.stream(stream))
        yield streams


def sleep() -> None:
    """Keeps the current stream busy for some 20 ms, so that a missing wait shows."""
    sleep_for_cycles: Any = torch.cuda._sleep
    sleep_for_cycles(40_000_000)
