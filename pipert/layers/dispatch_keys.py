"""Changes what operations do in a block, by dispatch keys that torch has but does not use.

The standard way to do that is a ``TorchFunctionMode``. It costs microseconds for *each* operation
and sees only what Python calls by name: not the operations of scripted functions or of autograd's
threads. But at each operation torch looks up the kernel by the thread's set of dispatch keys. So:

1. Two keys, which torch has for its own tests only, let every operation pass (*fall through*),
   except those with kernels of pipert's. They come before ``torch.func``, autograd and dispatch
   modes.
2. A thread includes a key while a block runs. Autograd's threads inherit the keys, and the stash,
   of the thread that starts a backward.
3. A kernel excludes its key from what it calls.

A pipe is refused where the keys do not work as that needs;
``tests/layers/test_dispatch_keys.py`` fails when torch changes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from pipert import _torch
from pipert.queues.process_lock import ProcessLock

__all__: list[str] = []

_Library: Any = torch.library.Library
_STASH = "pipert_task"
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
                    f"torch {torch.__version__} does not let pipert give each task random numbers "
                    f"and running statistics of its own, by the dispatch key {self._name}; README "
                    "says which versions are tested"
                ) from error
            self._key = key

    def _probe(self, key: Any) -> None:
        seen: list[bool] = []
        probe = _Library("pipert", "FRAGMENT")
        probe.define(f"{self._name}() -> ()")
        probe.impl(self._name, lambda: seen.append(True), self._name)
        with _torch.Including(key):
            getattr(torch.ops.pipert, self._name)()
        assert seen, "its kernels are not called"
        self._libraries.append(probe)

    def register(self, operation: Any, kernel: Callable[..., Any]) -> None:
        """Call ``kernel`` in place of an ATen ``operation``."""
        self._libraries[1].impl(operation, kernel, self._name)

    def included(self) -> AbstractContextManager[object]:
        """Return a block in which this thread's operations go through the kernels.

        It is entered and left by C functions, which an interrupt cannot cut short.
        """
        if self._key is None:
            self.prepare()
        return _torch.Including(self._key)  # type: ignore[no-any-return]

    def excluded(self) -> AbstractContextManager[object]:
        """Return a block in which this thread's operations do not go through the kernels."""
        return _torch.Excluding(self._set)  # type: ignore[no-any-return]

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


def stashed() -> Any:
    """Return the object stashed by this thread, or by the one whose backward it is running."""
    return _torch.get_stashed(_STASH) if _torch.is_stashed(_STASH) else None


def stash(value: Any) -> None:
    """Stash ``value`` for this thread and its backward; ``None`` empties the stash."""
    if value is not None:
        stash_as(_STASH, value)
    elif _torch.is_stashed(_STASH):
        _remove(_STASH)


def _stash_counted(name: str, value: Any) -> None:
    """Stash ``value`` with the reference that torch does not count."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _torch.stash(name, value)


def _stash_none(name: str) -> None:
    _stash_counted(name, None)


_remove = _torch.unstash or _stash_none  # torch 2.13 has this function


@cache
def _counts_references() -> bool:
    """Whether torch counts its reference to a stashed object. torch 2.11 only drops it."""
    probe = object()
    before = sys.getrefcount(probe)
    _stash_counted(_STASH, probe)
    after = sys.getrefcount(probe)
    _remove(_STASH)
    return after > before + 1


def stash_as(name: str, value: Any) -> None:
    """Stash a value under a name of its own; otherwise like :func:`stash`."""
    (_torch.stash if _counts_references() else _stash_counted)(name, value)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Hide the operations in the block from all modes and transforms."""
    keys, key_set = _torch.DispatchKey, _torch.DispatchKeySet
    usual = key_set(keys.BackendSelect) | key_set(keys.ADInplaceOrView)
    with _torch.WithoutFunctions(), _torch.Forcing(usual, key_set.from_raw_repr(0)):
        yield


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
    if not _torch.dispatch_mode_count():
        return _torch.is_traced_by_jit()
    kinds = _torch.mode_kinds
    tracing = (kinds.FAKE, kinds.FUNCTIONAL, kinds.PROXY)
    return any(_torch.dispatch_mode(kind) is not None for kind in tracing)
