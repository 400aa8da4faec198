"""Makes process groups of some of the ranks without the others taking part.

torch puts a number into the name of such a group: that of the groups that the rank has (2.13), or
that of the groups that it ever asked for (2.14). Ranks with different numbers, because some share
weights or because the caller has groups of his own, would wait for each other under different
names. In 2.14 the number is also the name of the next group that all ranks make together. So such a
group gets a name of pipert's own, which depends only on the groups that the same ranks have made.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pipert.errors import UnsupportedTorchError
from pipert.queues.process_lock import ProcessLock

__all__: list[str] = []

_NEEDED = ("_get_default_store", "_process_group_name")


def make_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group with the default group's time limit; called by all of its ranks.

    Raises:
        UnsupportedTorchError: torch lacks what names such a group.
    """
    c10d: Any = dist.distributed_c10d
    if lacking := [name for name in _NEEDED if not hasattr(c10d, name)]:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} lacks {', '.join(lacking)} of torch.distributed, without "
            "which some ranks cannot make a group; README says which versions are tested"
        )
    timeout = c10d._get_default_store().timeout
    world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    counts = _made.setdefault(world, Counter())
    listed = ",".join(map(str, ranks))
    with _named(f"pipert_{counts[listed]}_{hashlib.sha1(listed.encode()).hexdigest()}"):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout, backend, use_local_synchronization=True
        )
    counts[listed] += 1
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Give the process group that this thread makes in the block a name."""
    c10d: Any = dist.distributed_c10d
    with _naming.current:
        if not isinstance(c10d._process_group_name, _Name):
            c10d._process_group_name = _Name(c10d._process_group_name)
    _own.name = name
    try:
        yield
    finally:
        _own.name = None


class _Thread(threading.local):
    name: str | None = None
    """The name of the group that this thread is making."""


class _Name(partial[str]):
    """Takes the place of torch's function that names groups, for those of pipert's."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return super().__call__(*args, **kwargs) if _own.name is None else _own.name


_own = _Thread()
_naming = ProcessLock()
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How many groups of each set of ranks were made under each default group; all of these ranks count
alike."""
