"""Shows how long work goes on, where a person waits: with tqdm, if it is there, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


@contextlib.contextmanager
def counting(what: str, measure: Callable[[A], R]) -> Iterator[Callable[[A], R]]:
    """Yield ``measure``, whose calls are counted in a bar that is removed at the end."""
    if sys.stderr is None or not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield measure
        return
    with import_module("tqdm").tqdm(desc=what, unit=" layers", leave=False) as bar:

        def counted(call: A) -> R:
            found = measure(call)
            bar.update()
            return found

        yield counted
