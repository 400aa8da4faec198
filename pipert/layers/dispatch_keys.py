"""Changes what operations do in a block, by dispatch keys that torch has but does not use.

The standard way to do that is a ``TorchFunctionMode``. It costs microseconds for *each* operation
and sees only what Python calls by name: not the operations of scripted functions or of autograd's
threads. But at each operation torch looks up the kernel by the thread's set of dispatch keys. So:

1. Two keys, which torch has for its own tests only, let every operation pass (*fall through*),
   except those with kernels of pipert's. They come before ``torch.func``, autograd and dispatch
   modes.
2. A thread includes a key while a block runs. Autograd's threads inherit the keys, and the current
   task, of the thread that starts a backward.
3. A kernel excludes its key from what it calls.

``tests/layers/test_dispatch_keys.py`` fails when torch changes the keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from pipert import _torch
from pipert.autograd.thread_locals import (
    get_thread_local,
    remove_thread_local,
    set_thread_local,
)
from pipert.queues.process_lock import ProcessLock

_Library: Any = torch.library.Library
_TASK = "pipert_task"
_preparing = ProcessLock(reentrant=True)


class Key:
    """A dispatch key for kernels of pipert's.

    Args:
        name: a key of torch's that has no kernels.
        register: registers the kernels, when they are first needed.
    """

    __slots__ = ("_key", "_libraries", "_name", "_register", "_set")

    def __init__(self, name: str, register: Callable[[Key], None]) -> None:
        self._name = name
        self._register = register
        self._key: Any = None
        self._libraries: list[Any] = []  # keep the kernels registered

    def prepare(self) -> None:
        """Register the kernels, unless that has been done.

        Raises:
            RuntimeError: the key does not work in this version of torch.
        """
        with _preparing.current:
            if self._key is not None:
                return
            try:
                key = _torch.parse_key(self._name)
                self._set = _torch.DispatchKeySet(key)
                self._libraries = [_Library("_", "IMPL", self._name), _Library("aten", "IMPL")]
                self._libraries[0].fallback(torch.library.fallthrough_kernel)
                self._register(self)
                _let_higher_order_pass(key)
                self._probe(key)
            except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
                raise RuntimeError(
                    f"the dispatch key {self._name} does not work in torch {torch.__version__}; "
                    "README says which versions are tested"
                ) from error
            self._key = key

    def _probe(self, key: Any) -> None:
        seen: list[bool] = []
        probe = _Library("pipert", "FRAGMENT")
        probe.define(f"{self._name}() -> ()")
        probe.impl(self._name, lambda: seen.append(True), self._name)
        with _torch.Including(key):
            with self.excluded():
                assert _torch.is_included(key)
            getattr(torch.ops.pipert, self._name)()
        assert seen, "its kernels are not called"
        self._libraries.append(probe)

    def register(self, operation: Any, kernel: Callable[..., Any]) -> None:
        """Call ``kernel`` in place of an ATen ``operation``."""
        self._libraries[1].impl(operation, kernel, self._name)

    def included(self) -> AbstractContextManager[object]:
        """Return a block in which this thread's operations go through the kernels, if it works.

        It is entered and left by C functions, which an interrupt cannot cut short.
        """
        if self._key is None:
            return contextlib.nullcontext()
        return _torch.Including(self._key)  # type: ignore[no-any-return]

    def excluded(self) -> AbstractContextManager[object]:
        """Return a block in which this thread's operations do not go through the kernels."""
        return _torch.Excluding(self._set)  # type: ignore[no-any-return]

    def works(self) -> bool:
        """Whether the kernels are registered, and torch calls them."""
        return self._key is not None

    def is_included(self) -> bool:
        """Whether this thread includes the key."""
        key = self._key
        return key is not None and _torch.is_included(key)

    def __repr__(self) -> str:
        return f"<Key {self._name}>"


def _let_higher_order_pass(key: Any) -> None:
    """Let higher-order operators pass, such as ``torch.cond``; each keeps its own list of keys."""
    _torch.higher_order_keys.append(key)
    for operator in list(_torch.higher_order.values()):
        operator.fallthrough(key)


current_task: Callable[[], Any] = partial(get_thread_local, _TASK)
"""Returns the task that this thread, or the one whose backward it runs, is inside of."""


def set_current_task(task: Any) -> None:
    """Set the task that this thread and its backward are inside of; ``None`` if of none."""
    if task is not None:
        set_thread_local(_TASK, task)
    elif _torch.has_object(_TASK):
        remove_thread_local(_TASK)


def operations(wanted: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """Return the ATen operations whose schemas are ``wanted``, with their schemas.

    ``dir(torch.ops.aten)`` would list only operations that have been used before.
    """
    found = []
    for schema in _torch.schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and wanted(schema):
            packet = getattr(torch.ops.aten, name)
            found.append((getattr(packet, schema.overload_name or "default"), schema))
    return found


def is_traced() -> bool:
    """Whether operations are being traced, or run on tensors without data."""
    modes = _torch.dispatch_modes()
    return any(type(mode).__name__ in _TRACING for mode in modes) or _torch.is_traced_by_jit()


_TRACING = ("FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode")
