"""``@skippable``: layers whose ``forward`` is a generator that yields its stashes and pops.

The standard way would be to wrap the layer in a module that runs the generator. Then the wrapper's
``state_dict`` has keys of its own, the layer's attributes are out of reach, and it can be neither
pickled nor subclassed. Here the decorated class is a *subclass* that differs in ``forward`` alone:
it runs the generator, hands each request to the store (``store``), and returns what the generator
returns.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from pipert._typing import Value
from pipert.queues.process_lock import ProcessLock
from pipert.skip.namespace import Key, Namespace
from pipert.skip.requests import answer_all

__all__ = ["Skippable", "skippable"]

M = TypeVar("M", bound=nn.Module)


class Skippable(nn.Module):
    """What every decorated class is a subclass of.

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the name of the class, or, if it has none of its own, by what it decorates."""
        kind = type(self)
        reduced: Any = super().__reduce_ex__(max(2, int(protocol)))
        made, arguments, *state = reduced
        plain, found = kind.__dict__.get("_decorates"), _by_name(kind)
        of_object = made is copyreg.__newobj__  # type: ignore[attr-defined]
        if not of_object or plain is None or found is kind:
            return reduced
        if getattr(found, "__dict__", {}).get("_decorates") is plain:
            plain = found  # the same class, decorated where it was defined
        declared = (tuple(kind.skip_stashes.items()), tuple(sorted(kind.skip_pops)))
        return _make_again, (plain, *declared, *arguments[1:]), *state


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
        A decorator for an ``nn.Module`` class. Its result is a subclass of it under the same name:
        attributes, ``state_dict`` keys, pickling and copying are those of the class.

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


# Decorating a class twice in the same way gives one class, so that a copy of a layer, which may
# have been pickled in between, is of the class of its original.
_made: weakref.WeakValueDictionary[Any, type[Any]] = weakref.WeakValueDictionary()
_making = ProcessLock()


def _decorate(kind: type[M], stashes: dict[str, int], pops: frozenset[str]) -> type[M]:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"skippable decorates subclasses of nn.Module, got {kind!r}")
    if getattr(kind, "isolate", Skippable.isolate) is not Skippable.isolate:
        raise TypeError(f"{kind.__qualname__} has an attribute 'isolate', which skippable adds")
    if issubclass(kind, Skippable):
        stashes, pops = {**kind.skip_stashes, **stashes}, kind.skip_pops | pops
        kind = kind.__dict__.get("_decorates", kind)
    spec = (kind, tuple(stashes.items()), pops)
    made = _made.get(spec)
    if made is None:
        made = _subclass(kind, stashes, pops)  # not under the lock: metaclasses run here
        with _making.current:
            made = _made.setdefault(spec, made)
    return made


class _Quiet:
    """Spares the ``__init_subclass__`` of the user's class the classes that are made here."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_is_ours" not in cls.__dict__:
            super().__init_subclass__(**kwargs)


def _subclass(kind: type[M], stashes: dict[str, int], pops: frozenset[str]) -> type[M]:
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    names["__qualname__"] = kind.__qualname__
    body = {**names, "__init__": _entered_once(kind), "_is_ours": True}
    if not hasattr(kind.forward, "runs_generator"):
        body["forward"] = _running_generator(kind.forward)
    metaclass: Any = type(kind)
    bases = (kind,) if issubclass(kind, Skippable) else (kind, Skippable)
    if not issubclass(kind, _Quiet):
        bases = (_Quiet, *bases)
    # Two steps, so that super(Layer, self) in the body of Layer comes by the __init__ of the first.
    running = metaclass(kind.__name__, bases, body)
    declared = {
        **names,
        "_decorates": kind,
        "_is_ours": True,
        "skip_pops": pops,
        "skip_stashes": stashes,
    }
    made: type[M] = metaclass(kind.__name__, (running,), declared)
    return made


def _entered_once(kind: type[nn.Module]) -> Callable[..., None]:
    """The ``__init__`` of a decorated class.

    ``super(Layer, self).__init__()`` in the body of ``Layer`` means the decorated class, and would
    call itself for ever.
    """

    @functools.wraps(kind.__init__)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        entered: tuple[type, ...] = self.__dict__.get("_in_init", ())
        if kind in entered:
            raise TypeError(
                f"super({kind.__name__}, self) is {kind.__name__} itself once that is decorated "
                "with skippable; write super().__init__() instead"
            )
        self.__dict__["_in_init"] = (*entered, kind)
        try:
            kind.__init__(self, *args, **kwargs)
        finally:
            self.__dict__["_in_init"] = entered
            if not entered:
                del self.__dict__["_in_init"]

    return init


def _by_name(kind: type[Any]) -> Any:
    """What is found where ``kind`` says that it is."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _make_again(
    kind: type[nn.Module], stashes: tuple[tuple[str, int], ...], pops: tuple[str, ...], *args: Any
) -> nn.Module:
    """A layer without its state, when it is unpickled or copied."""
    decorated = _decorate(kind, dict(stashes), frozenset(pops))
    return decorated.__new__(decorated, *args)


def _running_generator(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as a method that returns what its generator returns."""

    @functools.wraps(forward)
    def run(self: Skippable, *args: Any, **kwargs: Any) -> Value:
        return answer_all(self, forward, *args, **kwargs)

    run.runs_generator = True  # type: ignore[attr-defined]
    return run
