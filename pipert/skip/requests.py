"""What a skippable layer yields, and what answers it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from pipert._typing import Value
from pipert.batch.tensors import describe
from pipert.skip.namespace import Key, show
from pipert.skip.store import current_store

__all__ = ["pop", "stash"]


class stash:
    """Yield it to put a value aside.

    Args:
        name: as declared.
        value: any pytree, ``None`` included. Its tensors must not be modified in place afterwards.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Value) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"stash({self.name!r})"


class pop:
    """Yield it to get a value that was put aside: ``value = yield pop(name)``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"pop({self.name!r})"


class Declares(Protocol):
    """A layer that has declared its skips."""

    @property
    def skip_stashes(self) -> Mapping[str, int]:
        """Each name it stashes, and how many layers pop that."""

    @property
    def skip_pops(self) -> frozenset[str]:
        """Each name it pops."""

    def skip_key(self, name: str) -> Key:
        """What the skip that it calls ``name`` is known by."""


def answer_all(layer: Declares, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
    """``forward(layer, *args, **kwargs)``, and the value that its generator returns.

    Raises:
        RuntimeError: a name is not declared, is asked for twice, or is declared and not asked for;
            there is nothing to pop.
        TypeError: it yields something else.
    """
    outer = _running.requests
    if outer is not None and outer.layer is layer:  # called by the forward of a subclass
        return outer.run(forward(layer, *args, **kwargs))
    _running.requests = requests = _Requests(layer)
    try:
        output = requests.run(forward(layer, *args, **kwargs))
    finally:
        _running.requests = outer
    requests.check_complete()
    return output


class _Requests:
    """What one forward of a layer asks for."""

    def __init__(self, layer: Declares) -> None:
        self.layer = layer
        self._kind = type(layer).__qualname__
        self._to_stash = set(layer.skip_stashes)
        self._to_pop = set(layer.skip_pops)
        self._store = current_store()

    def run(self, output: Value | Generator[Any, Any, Value]) -> Value:
        if not isinstance(output, Generator):
            return output
        generator = output
        try:
            request = next(generator)
            while True:
                try:
                    answer = self._answer(request)
                except Exception as error:
                    # At the yield, so that the traceback shows the line that is wrong.
                    request = generator.throw(error)
                else:
                    request = generator.send(answer)
        except StopIteration as stop:
            return stop.value

    def _answer(self, request: object) -> Value:
        layer = self.layer
        if isinstance(request, stash):
            self._claim(request.name, layer.skip_stashes, self._to_stash, "stash")
            pops = layer.skip_stashes[request.name]
            self._store.put(layer.skip_key(request.name), request.value, pops)
            return None
        if isinstance(request, pop):
            self._claim(request.name, layer.skip_pops, self._to_pop, "pop")
            return self._store.take(layer.skip_key(request.name))
        shown = describe(request) if isinstance(request, Tensor) else repr(request)
        raise TypeError(
            f"the forward of {self._kind} must yield stash(name, value) or pop(name), got {shown}; "
            "call the forward of a base class without 'yield from'"
        )

    def _claim(self, name: str, declared: Iterable[str], to_do: set[str], verb: str) -> None:
        if name not in declared:
            raise RuntimeError(
                f"{name!r} has not been declared; write @skippable({verb}=[{name!r}, ...]) above "
                f"{self._kind}"
            )
        if name not in to_do:
            raise RuntimeError(f"{self._kind} can {verb} {name!r} only once in a forward")
        to_do.remove(name)

    def check_complete(self) -> None:
        for names, verb in ((self._to_stash, "stashed"), (self._to_pop, "popped")):
            if names:
                shown = ", ".join(show(self.layer.skip_key(name)) for name in sorted(names))
                raise RuntimeError(
                    f"{self._kind} must have {verb} {shown} when its forward returns, as declared: "
                    "write yield before stash(...) and pop(...). Where there is nothing to stash, "
                    "stash None"
                )


class _Running(threading.local):
    """The requests of the innermost layer that is running in a thread."""

    requests: _Requests | None = None


_running = _Running()
