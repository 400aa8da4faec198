"""Layers that stash and pop, for tests that need skips and are not about declaring them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from pipert.skip import Skippable, pop, skippable, stash

__all__ = ["Forward", "Pop", "PopAdd", "Stash", "declaring", "identity", "popping", "stashing"]

M = TypeVar("M", bound=nn.Module)

Forward = Generator[Any, Any, Any]
"""What the forward of a layer is that stashes or pops."""


def identity(value: Any) -> Any:
    return value


def declaring(
    kind: type[M], stash: Iterable[str] | Mapping[str, int] = (), pop: Iterable[str] = ()
) -> type[M]:
    """A subclass of ``kind``, under its name, that stashes and pops these."""
    subclass: type[M] = type(kind.__name__, (kind,), {})
    return skippable(stash=stash, pop=pop)(subclass)


class Stash(Skippable):
    """Stashes under each name it declares; made by :func:`stashing`."""

    def __init__(
        self,
        make: Callable[[Any], Any],
        before: Callable[[Any], Any],
        after: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        self.make, self.before, self.after = make, before, after

    def forward(self, x: Any) -> Forward:
        y = self.before(x)
        for name in self.skip_stashes:
            yield stash(name, self.make(y))
        return self.after(y)


class Pop(Skippable):
    """Pops each name it declares; made by :func:`popping`."""

    def __init__(self, take: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.take = take

    def forward(self, x: Any) -> Forward:
        for name in sorted(self.skip_pops):
            x = self.take(x, (yield pop(name)))
        return x


def stashing(
    *names: str,
    make: Callable[[Any], Any] = identity,
    before: Callable[[Any], Any] = identity,
    after: Callable[[Any], Any] = identity,
    count: int = 1,
) -> Stash:
    """A layer that stashes ``make(y)``, ``y`` being ``before(x)``, and returns ``after(y)``.

    Args:
        names: of what it stashes; ``"skip"`` if nothing is named.
        make: functions or layers, whose parameters are then the layer's.
        before: as ``make``.
        after: as ``make``.
        count: how often each is popped.
    """
    declared = dict.fromkeys(names or ["skip"], count)
    return declaring(Stash, stash=declared)(make, before, after)


def popping(*names: str, take: Callable[[Any, Any], Any] = operator.add) -> Pop:
    """A layer that makes ``take(x, skip)`` of ``x``, for each of the names in their order."""
    return declaring(Pop, pop=names or ["skip"])(take)


@skippable(pop=["a"])
class PopAdd(nn.Module):
    """The shortest way to write a layer that pops."""

    def forward(self, x: Any) -> Forward:
        a = yield pop("a")
        return x + a
