"""Intercepts the calls of a module, on the threads that ask for it.

``nn.Module.__call__`` first looks at the slot ``_compiled_call_impl``, which is meant for
``module.compile()``. An object there sees each call, hooks included, and is in no ``state_dict``.
On all other threads it passes the calls on. Copies and pickles are the plain module's: its class,
which may copy ``__dict__`` whole as that of ``nn.LSTM`` does, is asked for a plain one's state.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from pipert._torch import COMPILED_CALL, plain_call


class Interceptor(Protocol):
    """The receiver of a thread's intercepted calls."""

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return what the module returns; ``call`` calls it without intercepting it again."""


class _Thread(threading.local):
    interceptor: Interceptor | None = None
    around: Container[nn.Module] = ()
    """The modules around layers of the model that runs."""
    is_trial: bool = False
    """Whether a model is tried out by itself, even if it is in a pipe."""


current_thread = _Thread()
"""Holds the interceptor of the current thread, if it has one."""


class NotCopied:
    """An object in a module's ``__dict__``, of which the module's copies have ``own``, if any."""

    own: Any = None

    # For classes that copy or pickle their ``__dict__`` without asking for their state.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.own,)


class _State(NotCopied):
    """The ``__getstate__`` of an intercepted module, which ``copy`` and ``pickle`` call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        module = self._module()
        plain = object.__new__(type(module))
        for name, value in [*vars(module).items()]:
            own = value
            while isinstance(own, NotCopied):
                own = own.own
            if own is value or own is not None:
                plain.__dict__[name] = own
        return plain.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._module(), memo).__getstate__


class InterceptedCalls(NotCopied):
    """The object in the slot of an intercepted module, shared by all pipes that intercept it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.own: Callable[..., Any] | None = compiled_call(module)
        self.route: Any = None
        """What sends calls that are made outside of the model's pipe through it."""
        self.bring: Callable[..., Any] | None = None
        """Calls a layer that no pipe runs, with its arguments on the layer's device."""
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        route = self.route  # the pipe may be closed meanwhile
        if route is not None and torch.compiler.is_dynamo_compiling():  # it would see no layers
            disable: Any = torch.compiler.disable
            return disable(self.__call__)(*args, **kwargs)
        module: Any = self._module()
        call = self.own or plain_call(module)
        interceptor = current_thread.interceptor  # of another pipe, if the module is its layer
        if route is not None and route.is_outside():
            call = partial(route.send, call)
        elif self.bring is not None and interceptor is None:
            call = partial(self.bring, call)
        if interceptor is None:
            return call(*args, **kwargs)
        return interceptor.call(module, call, args, kwargs)


def intercept(modules: Iterable[nn.Module]) -> None:
    """Intercept the calls of these modules, until :func:`release` has been called as often."""
    for module in modules:
        calls_of(module).users += 1


def calls_of(module: nn.Module) -> InterceptedCalls:
    """Return the object in the slot of a module, put there if necessary."""
    calls = module.__dict__.get(COMPILED_CALL)
    if not isinstance(calls, InterceptedCalls):
        calls = module.__dict__[COMPILED_CALL] = InterceptedCalls(module)
        module.__dict__["__getstate__"] = _State(module)
    return calls


def release(modules: Iterable[nn.Module]) -> None:
    """Undo one :func:`intercept` of these modules."""
    for module in modules:
        calls = module.__dict__.get(COMPILED_CALL)
        if isinstance(calls, InterceptedCalls):
            calls.users -= 1
            if calls.users or calls.bring is not None:
                continue
            del module.__dict__[COMPILED_CALL]
            if calls.own is not None:
                module.__dict__[COMPILED_CALL] = calls.own
        module.__dict__.pop("__getstate__", None)


def forget_devices(modules: Iterable[nn.Module]) -> None:
    """Call layers of an earlier pipe with their arguments as they are."""
    placed = [m for m in modules if isinstance(m.__dict__.get(COMPILED_CALL), InterceptedCalls)]
    intercept(placed)
    for module in placed:
        calls_of(module).bring = None
    release(placed)


def is_unseen(module: nn.Module) -> bool:
    """Whether ``module.compile()`` has taken the slot, so that calls are not intercepted."""
    return type(module.__dict__.get(COMPILED_CALL)) not in (InterceptedCalls, type(None))


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call of ``module.compile()``, even if it is not in the slot now."""
    found: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
    return found.own if isinstance(found, InterceptedCalls) else found
