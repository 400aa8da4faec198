"""A test's own streams, used as a program must use them; and work that keeps one busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["own_streams", "sleep"]


@contextlib.contextmanager
def own_streams(*devices: str) -> Iterator[list[Any]]:
    """Compute on a new stream of each device, as the part of a program that is in the block.

    It waits for what the default streams have begun, and they wait for it at the end: weights come
    from the one and are used by the other, and when they are freed their memory is given out again
    at once, since nobody has told the allocator (``record_stream``) of the stream that reads them.
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
    """Keep the current stream busy for some 20 ms, so that whoever does not wait is found out."""
    sleep_for_cycles: Any = torch.cuda._sleep
    sleep_for_cycles(40_000_000)
