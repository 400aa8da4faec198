"""Runs a function in each process of a gloo process group, and collects the results.

The processes are forked from a server that has imported torch, so each starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# Includes matplotlib, which a rank that saves a picture would otherwise import in half a second.
_context.set_forkserver_preload(["pipert.distributed", "matplotlib.figure", __name__])


def in_sweep(*values: Any) -> Any:
    """Makes a case that runs only in the sweep."""
    return pytest.param(*values, marks=pytest.mark.sweep)


class Ended(NamedTuple):
    """The end of one rank."""

    result: Any = None
    """The result of the function; tensors are copies."""
    error: BaseException | None = None
    """The exception of the function, or a ``RuntimeError`` for one that cannot be pickled."""
    text: str = ""
    """The traceback, including notes."""
    exitcode: int | None = 0


def run(
    size: int, function: Callable[..., Any], *args: Any, seconds: float = 30, group: float = 20
) -> list[Any]:
    """Runs ``function(rank, *args)`` on ``size`` ranks; returns the result of each.

    Raises:
        AssertionError: a rank failed.
    """
    ended = endings(size, function, *args, seconds=seconds, group=group)
    failed = [
        f"rank {rank}: {one.exitcode} {one.text}"
        for rank, one in enumerate(ended)
        if one.error is not None or one.exitcode
    ]
    assert not failed, "\n".join(failed)
    return [one.result for one in ended]


def endings(
    size: int, function: Callable[..., Any], *args: Any, seconds: float = 30, group: float = 20
) -> list[Ended]:
    """Runs ``function(rank, *args)`` on ``size`` ranks; returns how each ended.

    Args:
        seconds: the time after which a rank is killed; its exit code is then -9.
        group: the time limit of the process group in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = []
        for rank in range(size):
            receiving, sending = _context.Pipe(duplex=False)
            about = rank, size, store, group, sending, function, args
            process = _context.Process(target=_rank, args=about, daemon=True)
            process.start()
            sending.close()
            ranks.append((process, receiving))
        found = [_ended(process, receiving, seconds) for process, receiving in ranks]
    return found


def _ended(process: Any, receiving: Connection, seconds: float) -> Ended:
    ended = Ended()
    if wait([receiving], seconds):
        try:
            ended = Ended(*pickle.loads(receiving.recv_bytes()))
        except EOFError:
            pass  # the rank was killed, as its exit code shows
    else:
        ended = Ended(text="it did not end")
        process.kill()
    process.join(seconds)
    return ended._replace(exitcode=process.exitcode)


def _rank(
    rank: int,
    size: int,
    store: str,
    group: float,
    sending: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=group),
    )
    dist.barrier()  # a rank that soon ends might do so while others still connect to it
    try:
        result: tuple[Any, ...] = (function(rank, *args),)
    except BaseException as error:  # noqa: B036
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            result = (None, RuntimeError(f"{type(error).__name__}: {error}"), text)
        else:
            result = (None, error, text)
    sending.send_bytes(pickle.dumps(result))
    sending.close()
    if dist.is_initialized() and result[1:] == ():
        dist.destroy_process_group()
    os._exit(0)  # does not wait for a group in which other ranks have died
