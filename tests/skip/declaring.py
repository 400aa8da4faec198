"""Layers of one body that declare different skips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from pipert.skip import skippable

M = TypeVar("M", bound=nn.Module)


def declaring(
    kind: type[M], stash: Iterable[str] | Mapping[str, int] = (), pop: Iterable[str] = ()
) -> type[M]:
    """A subclass of ``kind``, under its name, that stashes and pops these."""
    subclass: type[M] = type(kind.__name__, (kind,), {})
    return skippable(stash=stash, pop=pop)(subclass)
