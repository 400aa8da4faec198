"""Provides layers that stash and pop, and models, for tests that are not about declaring skips."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable
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
"""The return type of the ``forward`` of a layer that stashes or pops."""


def identity(value: Any) -> Any:
    return value


def declaring(
    kind: type[M], stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> type[M]:
    """Returns a subclass of ``kind``, with its name, that declares these skips."""
    subclass: type[M] = type(kind.__name__, (kind,), {})
    return skippable(stash=stash, pop=pop)(subclass)


class Stash(Skippable):
    """A layer that stashes under each name it declares; made by :func:`stashing`."""

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
        for name in sorted(self.skip_stashes):
            yield stash(name, self.make(y))
        return self.after(y)


class Pop(Skippable):
    """A layer that pops each name it declares; made by :func:`popping`."""

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
) -> Stash:
    """Makes a layer that stashes ``make(y)`` and returns ``after(y)``, where ``y = before(x)``.

    Args:
        names: the names of the skips; ``"skip"`` if none is given.
        make, before, after: functions, or layers, whose parameters become the layer's.
    """
    return declaring(Stash, stash=names or ["skip"])(make, before, after)


def popping(*names: str, take: Callable[[Any, Any], Any] = operator.add) -> Pop:
    """Makes a layer that replaces ``x`` by ``take(x, skip)`` for each name, in sorted order."""
    return declaring(Pop, pop=names or ["skip"])(take)


@skippable(pop=["a"])
class PopAdd(nn.Module):
    """A layer that pops ``a``, written in the shortest way."""

    def forward(self, x: Any) -> Forward:
        a = yield pop("a")
        return x + a


# Models of seven layers ---------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


class Times(nn.Module):
    """Returns ``x * skip + linear(skip)``, where ``skip`` is ``take`` of the popped value."""

    def __init__(self, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.aside, self.take = linear(), take

    def forward(self, x: Tensor, value: Any) -> Tensor:
        skip = self.take(value)
        y: Tensor = x * skip + self.aside(skip)
        return y


def s(*names: str) -> Stash:
    """Makes a layer that stashes the output of an extra linear layer."""
    aside = nn.Sequential(linear(), Apply(torch.tanh))
    return stashing(*names, make=aside, after=linear())


def p(*names: str, take: Callable[[Any], Any] = identity) -> Pop:
    """Makes a layer that pops skips and combines each with its input by :class:`Times`."""
    return popping(*names, take=Times(take))


@skippable(stash=["c"], pop=["a"])
class PopAndStash(Skippable):
    """A layer that pops ``a`` and stashes ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = linear()

    def forward(self, x: Tensor) -> Forward:
        skip = yield pop("a")
        yield stash("c", skip * x)
        return x + self.aside(skip)


class Residual(nn.Module):
    """A custom module that adds its input to the output of its layers."""

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
    "several in one layer": lambda: [
        linear(), s("a", "b"), nn.Tanh(), PopAndStash(), linear(), p("b", "c"), nn.Tanh()
    ],
    "namespaces": namespaces,
    "deep inside": deep_inside,
}
