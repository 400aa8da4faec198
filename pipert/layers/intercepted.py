"""Intercepting the calls of a module, on the threads that ask for it.

``nn.Module.__call__`` looks first at the slot ``_compiled_call_impl``, which is there for
``module.compile()``. What is put there sees each call, hooks included, is in no ``state_dict``, and
is left out when the module is pickled or copied. On all other threads it passes the call on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch import nn

__all__: list[str] = []

SLOT = "_compiled_call_impl"
"""Its name."""


class Interceptor(Protocol):
    """Who gets the intercepted calls of a thread."""

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call ``call`` in place of the module, and return what the module would."""


class _Here(threading.local):
    interceptor: Interceptor | None = None


here = _Here()
"""The interceptor of the current thread, if it has one."""


class Calls:
    """What stands in the slot of a module: one for all pipes that intercept it."""

    __slots__ = ("_module", "compiled", "users")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.compiled: Callable[..., Any] | None = compiled_call(module)
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        call = self.compiled or module._call_impl
        interceptor = here.interceptor
        if interceptor is None:
            return call(*args, **kwargs)
        return interceptor.call(module, call, args, kwargs)

    def __repr__(self) -> str:
        return f"<Calls of {type(self._module()).__name__}, for {self.users}>"


class Shortcut(partial[Any]):
    """What stands in the slot of a module for a while, and is nothing compiled."""

    compiled = None


def intercept(modules: Iterable[nn.Module]) -> None:
    """Intercept the calls of these modules, until :func:`release` was called as often."""
    for module in modules:
        calls = module.__dict__.get(SLOT)
        if not isinstance(calls, Calls):
            calls = module.__dict__[SLOT] = Calls(module)
        calls.users += 1


def release(modules: Iterable[nn.Module]) -> None:
    """Intercept them no more."""
    for module in modules:
        calls = module.__dict__.get(SLOT)
        if isinstance(calls, Calls):
            calls.users -= 1
            if not calls.users:
                del module.__dict__[SLOT]
                if calls.compiled is not None:
                    module.__dict__[SLOT] = calls.compiled


def is_unseen(module: nn.Module) -> bool:
    """Whether ``module.compile()`` has taken the slot since."""
    return type(module.__dict__.get(SLOT)) not in (Calls, type(None))


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` has put in the slot, whatever stands there now."""
    found: Callable[..., Any] | None = getattr(module, SLOT, None)
    return found.compiled if isinstance(found, Calls | Shortcut) else found
