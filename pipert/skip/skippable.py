"""``@skippable``: layers whose ``forward`` is a generator that yields its stashes and pops.

The standard way would be to wrap the layer in a module that runs the generator. Then the wrapper's
``state_dict`` has keys of its own, the layer's attributes are out of reach, and it can be neither
pickled nor subclassed. Here the class itself is changed, as ``dataclass`` does: ``Skippable``
becomes its first base, and its ``forward`` runs the generator, hands each request to the store
(``store``), and returns what the generator returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from pipert._typing import Value
from pipert.skip.namespace import Key, Namespace
from pipert.skip.requests import answer_all

__all__ = ["Skippable", "skippable"]

M = TypeVar("M", bound=nn.Module)


class Skippable(nn.Module):
    """The first base of every decorated class.

    Deriving from it instead of ``nn.Module`` changes nothing but that type checkers, which do not
    see what a decorator does to a class, know :meth:`isolate`.
    """

    skip_stashes: ClassVar[Mapping[str, int]] = {}
    skip_pops: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("forward")
        if own is not None and not hasattr(own, "runs_generator"):
            cls.forward = _running_generator(own)

    def isolate(self, ns: Namespace | None, *, only: Iterable[str] | None = None) -> Self:
        """Put the skips of this layer in a namespace.

        Args:
            ns: the one that the layers at the other end are in, too; ``None`` is the default one.
            only: the names to put there; default all.

        Returns:
            The layer itself.

        Raises:
            ValueError: ``only`` has a name that the layer declares neither to stash nor to pop.
            TypeError: ``ns`` is no namespace.
        """
        if not isinstance(ns, Namespace | None):
            raise TypeError(f"isolate takes a Namespace or None, got {ns!r}")
        declared = {*self.skip_stashes, *self.skip_pops}
        names = declared if only is None else {*_names(only, "only")}
        if names - declared:
            raise ValueError(
                f"{type(self).__qualname__} declares the skips {sorted(declared)}, so "
                f"{sorted(names - declared)} cannot be isolated"
            )
        self.__dict__["_skip_namespaces"] = self._in_namespaces() | dict.fromkeys(names, ns)
        return self

    def skip_key(self, name: str) -> Key:
        """What the skip that this layer calls ``name`` is known by."""
        return self._in_namespaces().get(name), name

    def _in_namespaces(self) -> dict[str, Namespace | None]:
        namespaces: dict[str, Namespace | None] = self.__dict__.get("_skip_namespaces", {})
        return namespaces


def skippable(
    stash: Iterable[str] | Mapping[str, int] = (), pop: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Class decorator for layers that stash and pop skips.

    ``forward`` is a generator: it yields ``stash(name, value)``, or ``value = yield pop(name)``,
    and returns its output. It must stash and pop each declared name once.

    Args:
        stash: the names it stashes. A mapping tells how many layers pop each; otherwise one does.
        pop: the names it pops.

    Returns:
        A decorator that changes an ``nn.Module`` class and returns it: attributes, ``state_dict``
        keys, pickling and copying are those of the class. What its bases declare, or a decorator
        below this one, is declared as well. For other skips of the same code, decorate a subclass.

    Raises:
        TypeError: a name is no string, or the class is no ``nn.Module`` or has an ``isolate`` of
            its own.
        ValueError: a number of layers is not positive.
    """
    if isinstance(stash, type):
        raise TypeError(
            f"write @skippable(stash=[...], pop=[...]) above {stash.__qualname__}, not @skippable"
        )
    stashes = {name: 1 for name in _names(stash, "stash")}
    if isinstance(stash, Mapping):
        stashes.update(stash)
    for name, layers in stashes.items():
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise ValueError(
                f"stash must tell a positive number of layers that pop {name!r}, got {layers!r}"
            )
    if isinstance(pop, Mapping):
        raise TypeError(
            f"pop must be a list of names, got {pop!r}; how many layers pop a skip is told by the "
            "layer that stashes it"
        )
    pops = frozenset(_names(pop, "pop"))
    return lambda kind: _decorate(kind, stashes, pops)


def _names(names: Iterable[str], what: str) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list of names, got {names!r}; write [{names!r}]")
    names = list(names)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} must be a list of strings, got {names!r}")
    return names


def _decorate(kind: type[M], stashes: dict[str, int], pops: frozenset[str]) -> type[M]:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"skippable decorates subclasses of nn.Module, got {kind!r}")
    if getattr(kind, "isolate", Skippable.isolate) is not Skippable.isolate:
        raise TypeError(f"{kind.__qualname__} has an attribute 'isolate', which skippable adds")
    if not issubclass(kind, Skippable):
        # A base, not attributes alone: subclasses are to come by its __init_subclass__, beside
        # those of the user's bases.
        kind.__bases__ = (Skippable, *kind.__bases__)
        assert issubclass(kind, Skippable)
    if not hasattr(kind.forward, "runs_generator"):
        kind.forward = _running_generator(kind.forward)
    kind.skip_stashes = {**kind.skip_stashes, **stashes}
    kind.skip_pops = kind.skip_pops | pops
    return kind


def _running_generator(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as a method that returns what its generator returns."""

    @functools.wraps(forward)
    def run(self: Skippable, *args: Any, **kwargs: Any) -> Value:
        return answer_all(self, forward, *args, **kwargs)

    run.runs_generator = True  # type: ignore[attr-defined]
    return run
