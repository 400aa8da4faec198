"""Decorates layers whose ``forward`` is a generator that yields its stashes and pops.

The standard way would be to wrap the layer in a module that runs the generator. Then the
``state_dict`` keys get a prefix, the layer's attributes are out of reach, and the wrapper can be
neither pickled nor subclassed. ``@skippable`` changes the class itself, as ``dataclass`` does:
``Skippable`` becomes its first base, and its ``forward`` runs the generator, passes each request
to the store (``store.py``), and returns what the generator returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.tensors import describe
from pipert.skip.store import Key, Namespace, current_store

__all__ = ["Skippable", "pop", "skippable", "stash"]

M = TypeVar("M", bound=nn.Module)


@dataclass(eq=False, slots=True)
class stash:
    """A request to stash a value for a later layer: ``yield stash(name, value)``.

    Args:
        name: a name that the layer declares to stash.
        value: any pytree, ``None`` included. Its tensors must not be modified in place afterwards.
    """

    name: str
    value: Value


@dataclass(eq=False, slots=True)
class pop:
    """A request for the value that an earlier layer stashed: ``value = yield pop(name)``."""

    name: str


class Skippable(nn.Module):
    """The first base class of every decorated class.

    Derive from it instead of ``nn.Module`` only to tell type checkers about :meth:`isolate`, since
    they do not see how a decorator changes a class.
    """

    skip_stashes: ClassVar[frozenset[str]] = frozenset()
    skip_pops: ClassVar[frozenset[str]] = frozenset()
    _namespaces: Mapping[str, Namespace | None] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.__dict__.get("forward")
        if forward is not None and not hasattr(forward, "runs_generator"):
            cls.forward = _running_generator(forward)

    def isolate(self, ns: Namespace | None, *, only: Iterable[str] | None = None) -> Self:
        """Put the skips of this layer in a namespace.

        Args:
            ns: the namespace, the same for the layers at both ends; ``None`` is the default one.
            only: the names of the skips to put there. Default: all.

        Returns:
            The layer itself.

        Raises:
            ValueError: ``only`` contains a name that the layer declares neither to stash nor to
                pop.
        """
        declared = self.skip_stashes | self.skip_pops
        names = declared if only is None else _names(only, "only")
        if names - declared:
            raise ValueError(
                f"{type(self).__qualname__} declares the skips {sorted(declared)}, so "
                f"{sorted(names - declared)} cannot be isolated"
            )
        self.__dict__["_namespaces"] = {**self._namespaces, **dict.fromkeys(names, ns)}
        return self

    def skip_key(self, name: str) -> Key:
        """Return the key of the skip that this layer calls ``name``."""
        return self._namespaces.get(name), name


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Decorates the class of a layer that stashes or pops skips.

    ``forward`` is a generator: it uses ``yield stash(name, value)`` and ``value = yield pop(name)``
    and returns its output.

    >>> @skippable(stash=["half"])
    ... class StashHalf(nn.Module):
    ...     def forward(self, x):
    ...         yield stash("half", x / 2)
    ...         return x

    Args:
        stash: the names it stashes, each for one layer to pop.
        pop: the names it pops.

    Returns:
        A decorator that changes an ``nn.Module`` class and returns it: attributes, ``state_dict``
        keys, pickling and copying stay as they are. Declarations of its bases, and of decorators
        below this one, are included. To use the same code with other skips, decorate a subclass.

    Raises:
        TypeError: names are a string, or the class is not an ``nn.Module``.
    """
    names = _names(stash, "stash"), _names(pop, "pop")
    return lambda kind: _decorate(kind, *names)


def _names(names: Iterable[str], what: str) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list of names, got {names!r}; write [{names!r}]")
    return frozenset(names)


def _decorate(kind: type[M], stashes: frozenset[str], pops: frozenset[str]) -> type[M]:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"skippable decorates subclasses of nn.Module, got {kind!r}")
    if not issubclass(kind, Skippable):
        # A base rather than mere attributes, so that its __init_subclass__ runs for subclasses,
        # in addition to those of the user's bases.
        kind.__bases__ = (Skippable, *kind.__bases__)
        assert issubclass(kind, Skippable)
    if not hasattr(kind.forward, "runs_generator"):
        kind.forward = _running_generator(kind.forward)
    kind.skip_stashes = kind.skip_stashes | stashes
    kind.skip_pops = kind.skip_pops | pops
    return kind


def _running_generator(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that runs the generator ``forward``, and returns what that returns."""

    @functools.wraps(forward)
    def run(self: Skippable, *args: Any, **kwargs: Any) -> Value:
        return _output_of(self, forward(self, *args, **kwargs))

    run.runs_generator = True  # type: ignore[attr-defined]
    return run


def _output_of(layer: Skippable, generator: Value | Generator[Any, Any, Value]) -> Value:
    if not isinstance(generator, Generator):
        return generator  # the output of a forward that yields nothing
    try:
        request = next(generator)
        while True:
            try:
                answer = _answer(layer, request)
            except Exception as error:
                # Raised at the yield, so that the traceback shows the offending line.
                request = generator.throw(error)
            else:
                request = generator.send(answer)
    except StopIteration as stop:
        return stop.value


def _answer(layer: Skippable, request: object) -> Value:
    """Carry out a request of ``layer``; return the value that is popped.

    Raises:
        TypeError: the layer has yielded anything else.
        RuntimeError: it has not declared the name, or there is nothing to pop.
    """
    kind = type(layer).__qualname__
    if not isinstance(request, stash | pop):
        shown = describe(request) if isinstance(request, Tensor) else repr(request)
        raise TypeError(
            f"the forward of {kind} must yield stash(name, value) or pop(name), got {shown}; call "
            "the forward of a base class without 'yield from'"
        )
    verb, name = type(request), request.name
    if name not in (layer.skip_stashes if verb is stash else layer.skip_pops):
        raise RuntimeError(
            f"{name!r} has not been declared; write @skippable({verb.__name__}=[{name!r}, ...]) "
            f"above {kind}"
        )
    if isinstance(request, pop):
        return current_store().take(layer.skip_key(name))
    current_store().put(layer.skip_key(name), request.value)
    return None
