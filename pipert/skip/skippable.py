"""Decorates layers whose ``forward`` is a generator that yields its stashes and pops.

The standard way would be to wrap the layer in a module that runs the generator. Then the
``state_dict`` keys get a prefix, the layer's attributes are out of reach, and the wrapper can be
neither pickled nor subclassed. ``@skippable`` changes the class itself, as ``dataclass`` does:
``Skippable`` becomes its first base, and its ``forward`` runs the generator, passes each request
to the store (``store.py``), and returns what the generator returns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from pipert._typing import Value
from pipert.batch.tensors import describe
from pipert.skip.namespace import Key, Namespace, show
from pipert.skip.store import current_store

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

    def __repr__(self) -> str:
        return f"stash({self.name!r})"


@dataclass(eq=False, slots=True)
class pop:
    """A request for the value that an earlier layer stashed: ``value = yield pop(name)``."""

    name: str

    def __repr__(self) -> str:
        return f"pop({self.name!r})"


class Skippable(nn.Module):
    """The first base class of every decorated class.

    Derive from it instead of ``nn.Module`` only to tell type checkers about :meth:`isolate`, since
    they do not see how a decorator changes a class.
    """

    skip_stashes: ClassVar[Mapping[str, int]] = {}
    skip_pops: ClassVar[frozenset[str]] = frozenset()

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
        declared = {*self.skip_stashes, *self.skip_pops}
        names = declared if only is None else {*_names(only, "only")}
        if names - declared:
            raise ValueError(
                f"{type(self).__qualname__} declares the skips {sorted(declared)}, so "
                f"{sorted(names - declared)} cannot be isolated"
            )
        self.__dict__["_skip_namespaces"] = self._namespaces() | dict.fromkeys(names, ns)
        return self

    def skip_key(self, name: str) -> Key:
        """Return the key of the skip that this layer calls ``name``."""
        return self._namespaces().get(name), name

    def _namespaces(self) -> dict[str, Namespace | None]:
        namespaces: dict[str, Namespace | None] = self.__dict__.get("_skip_namespaces", {})
        return namespaces


def skippable(
    stash: Iterable[str] | Mapping[str, int] = (), pop: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Decorates the class of a layer that stashes or pops skips.

    ``forward`` is a generator: it uses ``yield stash(name, value)`` and ``value = yield pop(name)``
    and returns its output. It must stash or pop each declared name once.

    Args:
        stash: the names it stashes. A mapping gives the number of layers that pop each; otherwise
            it is one.
        pop: the names it pops.

    Returns:
        A decorator that changes an ``nn.Module`` class and returns it: attributes, ``state_dict``
        keys, pickling and copying stay as they are. Declarations of its bases, and of decorators
        below this one, are included. To use the same code with other skips, decorate a subclass.

    Raises:
        TypeError: names are a string, the class is not an ``nn.Module``, or it has an ``isolate``
            of its own.
        ValueError: a number of layers is not positive.
    """
    stashes = {name: 1 for name in _names(stash, "stash")}
    if isinstance(stash, Mapping):
        stashes.update(stash)
    for name, layers in stashes.items():
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise ValueError(
                f"stash must tell a positive number of layers that pop {name!r}, got {layers!r}"
            )
    pops = frozenset(_names(pop, "pop"))
    return lambda kind: _decorate(kind, stashes, pops)


def _names(names: Iterable[str], what: str) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list of names, got {names!r}; write [{names!r}]")
    return list(names)


def _decorate(kind: type[M], stashes: dict[str, int], pops: frozenset[str]) -> type[M]:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"skippable decorates subclasses of nn.Module, got {kind!r}")
    if getattr(kind, "isolate", Skippable.isolate) is not Skippable.isolate:
        raise TypeError(f"{kind.__qualname__} has an attribute 'isolate', which skippable adds")
    if not issubclass(kind, Skippable):
        # A base rather than mere attributes, so that its __init_subclass__ runs for subclasses,
        # in addition to those of the user's bases.
        kind.__bases__ = (Skippable, *kind.__bases__)
        assert issubclass(kind, Skippable)
    if not hasattr(kind.forward, "runs_generator"):
        kind.forward = _running_generator(kind.forward)
    kind.skip_stashes = {**kind.skip_stashes, **stashes}
    kind.skip_pops = kind.skip_pops | pops
    return kind


def _running_generator(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that runs the generator ``forward``, and returns what that returns.

    The method raises ``RuntimeError`` if a name is undeclared, requested twice, or declared but not
    requested, or if there is nothing to pop; ``TypeError`` if the generator yields anything else.
    """

    @functools.wraps(forward)
    def run(self: Skippable, *args: Any, **kwargs: Any) -> Value:
        outer: _Requests | None = getattr(_running, "requests", None)
        if outer is not None and outer.layer is self:  # a subclass's forward called this one
            return outer.run(forward(self, *args, **kwargs))
        _running.requests = requests = _Requests(self)
        try:
            output = requests.run(forward(self, *args, **kwargs))
        finally:
            _running.requests = outer
        requests.check_complete()
        return output

    run.runs_generator = True  # type: ignore[attr-defined]
    return run


class _Requests:
    """Answers the requests of one forward of a layer."""

    def __init__(self, layer: Skippable) -> None:
        self.layer = layer
        self._kind = type(layer).__qualname__
        self._missing = {stash: {*layer.skip_stashes}, pop: {*layer.skip_pops}}
        """The declared names that have not been requested yet."""
        self._store = current_store()

    def run(self, generator: Value | Generator[Any, Any, Value]) -> Value:
        if not isinstance(generator, Generator):
            return generator  # the output of a forward that yields nothing
        try:
            request = next(generator)
            while True:
                try:
                    answer = self._answer(request)
                except Exception as error:
                    # Raised at the yield, so that the traceback shows the offending line.
                    request = generator.throw(error)
                else:
                    request = generator.send(answer)
        except StopIteration as stop:
            return stop.value

    def _answer(self, request: object) -> Value:
        if not isinstance(request, stash | pop):
            shown = describe(request) if isinstance(request, Tensor) else repr(request)
            raise TypeError(
                f"the forward of {self._kind} must yield stash(name, value) or pop(name), got "
                f"{shown}; call the forward of a base class without 'yield from'"
            )
        verb, name, layer = type(request), request.name, self.layer
        declared = layer.skip_stashes if verb is stash else layer.skip_pops
        if name not in declared:
            raise RuntimeError(
                f"{name!r} has not been declared; write @skippable({verb.__name__}=[{name!r}, ...])"
                f" above {self._kind}"
            )
        if name not in self._missing[verb]:
            raise RuntimeError(f"{self._kind} can {verb.__name__} {name!r} only once in a forward")
        self._missing[verb].remove(name)
        key = layer.skip_key(name)
        if isinstance(request, pop):
            return self._store.take(key)
        self._store.put(key, request.value, layer.skip_stashes[name])
        return None

    def check_complete(self) -> None:
        for names, verb in zip(self._missing.values(), ("stashed", "popped"), strict=True):
            if names:
                shown = ", ".join(show(self.layer.skip_key(name)) for name in sorted(names))
                raise RuntimeError(
                    f"{self._kind} must have {verb} {shown} when its forward returns, as declared: "
                    "write yield before stash(...) and pop(...). Where there is nothing to stash, "
                    "stash None"
                )


_running = threading.local()  # ``requests``: those of the thread's innermost running layer
