"""Objects among the arguments of a recorded call, such as a cache of keys and values.

A call that is computed again would change them again, and find them changed: attention would see
each key twice. So a layer that changes one is refused when it does so for the first time. Lists and
dicts are no such objects: a repetition gets others, as they were before the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from pipert.batch.hidden import CLOSED, versions
from pipert.batch.trees import ORDINARY

__all__: list[str] = []


class Objects:
    """What objects are like before a call.

    Args:
        values: the arguments of the call.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._before = [(one, versions(one)) for one in _objects(values)]

    def refuse_changes(self) -> None:
        """Look at them after the call.

        Raises:
            RuntimeError: a tensor in one of them has been changed, replaced, added or removed.
        """
        for one, before in self._before:
            if not _alike(before, versions(one)):
                raise RuntimeError(
                    f"a layer changes its argument, a {type(one).__qualname__}, and would do so "
                    "again when it is recomputed; leave that out (a model of transformers takes "
                    "use_cache=False), or use checkpoint='never'"
                )


def _alike(before: list[tuple[Tensor, int]], after: list[tuple[Tensor, int]]) -> bool:
    return len(before) == len(after) and all(
        x is y and old == new for (x, old), (y, new) in zip(before, after, strict=True)
    )


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        kind = type(value)
        if kind in ORDINARY:
            continue
        if kind is tuple or kind is list:
            yield from _objects(value)
        elif kind is dict:
            yield from _objects(value.values())
        elif not isinstance(value, CLOSED):
            yield value
