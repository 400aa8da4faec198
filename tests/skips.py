"""Layers that stash and pop, and models of them, for tests that are not about declaring skips."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash
from tests.layers import Apply

__all__ = [
    "MODELS", "Forward", "Pop", "PopAdd", "Stash", "declaring", "identity", "p", "popping", "s",
    "stashing",
]  # fmt: skip

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


# Models of seven layers ---------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


class Times(nn.Module):
    """Multiplies what ``take`` makes of a skip with its input, and adds what its layer does."""

    def __init__(self, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.aside, self.take = linear(), take

    def forward(self, x: Tensor, value: Any) -> Tensor:
        skip = self.take(value)
        y: Tensor = x * skip + self.aside(skip)
        return y


def s(*names: str, count: int = 1) -> Stash:
    """Stashes what a layer of its own makes."""
    aside = nn.Sequential(linear(), Apply(torch.tanh))
    return stashing(*names, make=aside, after=linear(), count=count)


def p(*names: str, take: Callable[[Any], Any] = identity) -> Pop:
    """Takes it in again, with a layer of its own."""
    return popping(*names, take=Times(take))


@skippable(stash=["c"], pop=["a"])
class PopAndStash(Skippable):
    """Pops ``a``, stashes ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = linear()

    def forward(self, x: Tensor) -> Forward:
        skip = yield pop("a")
        yield stash("c", skip * x)
        return x + self.aside(skip)


class Residual(nn.Module):
    """A custom module around layers, with the identity beside them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y


def namespaces() -> list[nn.Module]:
    first, second = Namespace(), Namespace()
    return [
        s("a").isolate(first), s("a"), s("a").isolate(second), nn.Tanh(),
        p("a").isolate(first), p("a").isolate(second), p("a"),
    ]  # fmt: skip


def deep_inside() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Sequential(s("a"), nn.Tanh()), s("b")),
        Residual(s("c"), linear()),
        nn.Tanh(),
        nn.Sequential(p("b"), s("d"), linear(), p("d")),
        Residual(nn.Tanh(), Residual(p("c"))),
        linear(),
        Residual(p("a"), s("e"), p("e")),
    ]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "nested": lambda: [s("a"), nn.Tanh(), s("b"), linear(), p("b"), nn.Tanh(), p("a")],
    "crossing": lambda: [s("a"), s("b"), nn.Tanh(), p("a"), linear(), p("b"), nn.Tanh()],
    "popped four times": lambda: [
        s("a", count=4), p("a"), linear(), p("a"), p("a"), nn.Tanh(), p("a")
    ],
    "several in one layer": lambda: [
        linear(), s("a", "b"), nn.Tanh(), PopAndStash(), linear(), p("b", "c"), nn.Tanh()
    ],
    "namespaces": namespaces,
    "deep inside": deep_inside,
}
