"""Intercepts the calls of a module, on the threads that ask for it.

``nn.Module.__call__`` first looks at the slot ``_compiled_call_impl``, which is meant for
``module.compile()``. An object there sees each call, hooks included, is in no ``state_dict``, and
is left out when the module is pickled or copied. On all other threads it passes the calls on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch import nn

from pipert._torch import COMPILED_CALL, plain_call

__all__: list[str] = []


class Interceptor(Protocol):
    """The receiver of a thread's intercepted calls."""

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return what the module returns; ``call`` calls it without intercepting it again."""


class Route(Protocol):
    """Where calls of a module go that are made outside of its pipe."""

    def is_outside(self) -> bool:
        """Whether the current call is one of these."""

    def send(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the module returns; ``call`` calls it."""


class _Thread(threading.local):
    interceptor: Interceptor | None = None
    is_trial: bool = False
    """Whether a model is tried out by itself, even if it is in a pipe."""


here = _Thread()
"""Holds the interceptor of the current thread, if it has one."""


class Calls:
    """The object in the slot of an intercepted module, shared by all pipes that intercept it."""

    __slots__ = ("_module", "compiled", "route", "users")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.compiled: Callable[..., Any] | None = compiled_call(module)
        self.route: Route | None = None
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        call = self.compiled or plain_call(module)
        route = self.route  # the pipe may be closed meanwhile
        if route is not None and route.is_outside():
            call = partial(_send, route, call)
        interceptor = here.interceptor  # of another pipe, of which the module is a layer
        if interceptor is None:
            return call(*args, **kwargs)
        return interceptor.call(module, call, args, kwargs)

    def __repr__(self) -> str:
        return f"<Calls of {type(self._module()).__name__}, for {self.users}>"


def _send(route: Route, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return route.send(call, args, kwargs)


def intercept(modules: Iterable[nn.Module]) -> None:
    """Intercept the calls of these modules, until :func:`release` has been called as often."""
    for module in modules:
        calls_of(module).users += 1


def calls_of(module: nn.Module) -> Calls:
    """Return the object in the slot of a module, put there if necessary."""
    calls = module.__dict__.get(COMPILED_CALL)
    if not isinstance(calls, Calls):
        calls = module.__dict__[COMPILED_CALL] = Calls(module)
    return calls


def release(modules: Iterable[nn.Module]) -> None:
    """Undo one :func:`intercept` of these modules."""
    for module in modules:
        calls = module.__dict__.get(COMPILED_CALL)
        if isinstance(calls, Calls):
            calls.users -= 1
            if not calls.users:
                del module.__dict__[COMPILED_CALL]
                if calls.compiled is not None:
                    module.__dict__[COMPILED_CALL] = calls.compiled


def is_unseen(module: nn.Module) -> bool:
    """Whether ``module.compile()`` has taken the slot, so that calls are not intercepted."""
    return type(module.__dict__.get(COMPILED_CALL)) not in (Calls, type(None))


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call of ``module.compile()``, even if it is not in the slot now."""
    found: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
    return found.compiled if isinstance(found, Calls) else found
