"""Dispatch keys of torch that nobody uses: all that pipert needs of torch's private parts for them.

The standard way to change what an operation does while a block runs is a ``TorchFunctionMode``. It
costs some microseconds for *each* operation, and sees those that Python calls by name: neither those
of scripted functions, nor those that autograd's threads run. The dispatcher decides anew at each
operation which kernel to call, by a set of keys that each thread has. So here:

1. Two keys, which torch has for its own tests alone, let every operation pass (*fall through*),
   except those given kernels of ours, in Python. They come before those of ``torch.func``,
   autograd and dispatch modes.
2. A thread includes a key while a block runs. Autograd's threads get the keys, and what was
   stashed, from the thread that called for a backward.
3. A kernel excludes its key from what it calls.

What is private: the names of the keys, including and excluding them, the stash. A pipe is refused if
they are missing, or do nothing (:meth:`Key.prepare`); ``tests/layers/test_dispatch_keys.py`` says what
torch has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipert.queues.process_lock import ProcessLock

__all__: list[str] = []

_C: Any = torch._C
_STASH = "pipert_task"
_preparing = ProcessLock(reentrant=True)


class Key:
    """A dispatch key for kernels of ours. Of no effect until it is prepared.

    Args:
        name: one of torch's that has no kernels.
        prepare: registers the kernels; once, when they are first needed.
    """

    __slots__ = ("_alone", "_key", "_libraries", "_name", "_prepare")

    def __init__(self, name: str, prepare: Callable[[Key], None]) -> None:
        self._name = name
        self._prepare = prepare
        self._key: Any = None
        self._libraries: list[torch.library.Library] = []

    def prepare(self) -> None:
        """Register the kernels, if nobody has.

        Raises:
            RuntimeError: this version of torch has no such key.
        """
        with _preparing.current:
            if self._key is None:
                try:
                    key = _C._parse_dispatch_key(self._name)
                    rest = torch.library.Library("_", "IMPL", self._name)
                    rest.fallback(torch.library.fallthrough_kernel)
                    self._libraries = [rest, torch.library.Library("aten", "IMPL", self._name)]
                    self._alone = _C.DispatchKeySet(key)
                    self._prepare(self)
                except (AttributeError, RuntimeError, TypeError) as error:
                    raise RuntimeError(
                        f"pipert cannot redirect operations in torch {torch.__version__}, by the "
                        f"dispatch key {self._name}; it was made for torch 2.13"
                    ) from error
                self._key = key

    def included(self) -> AbstractContextManager[object]:
        """A block in which operations of this thread pass through the kernels.

        Its ends are calls of C: an interrupt comes before or after them.
        """
        if self._key is None:
            self.prepare()
        return _C._IncludeDispatchKeyGuard(self._key)  # type: ignore[no-any-return]

    def excluded(self) -> AbstractContextManager[object]:
        """A block in which they do not, for kernels."""
        return _C._ExcludeDispatchKeyGuard(self._alone)  # type: ignore[no-any-return]

    def is_included(self) -> bool:
        """Whether the current thread is in such a block."""
        key = self._key
        return key is not None and _C._dispatch_tls_is_dispatch_key_included(key)

    def register(self, operation: Any, kernel: Callable[..., Any]) -> None:
        """Call ``kernel`` in place of an ATen ``operation``."""
        self._libraries[-1].impl(operation, kernel, self._name)

    def __repr__(self) -> str:
        return f"<Key {self._name}>"


def stashed() -> Any:
    """What this thread, or the one that autograd works for, has stashed."""
    return _C._get_obj_in_tls(_STASH) if _C._is_key_in_tls(_STASH) else None


def stash(value: Any) -> None:
    """Stash ``value``, ``None`` for nothing."""
    if value is not None:
        _C._stash_obj_in_tls(_STASH, value)
    elif _C._is_key_in_tls(_STASH):
        _C._remove_obj_from_tls(_STASH)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Let no mode and no transform see the operations in the block."""
    keys, of = _C.DispatchKey, _C.DispatchKeySet
    usual = of(keys.BackendSelect) | of(keys.ADInplaceOrView)
    with _C.DisableTorchFunction(), _C._ForceDispatchKeyGuard(usual, of.from_raw_repr(0)):
        yield


def operations(of: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """The ATen operations whose schema is ``of`` some kind, with their schemas.

    ``dir(torch.ops.aten)`` lists those only that somebody has used before.
    """
    found = []
    for schema in _C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and of(schema):
            packet = getattr(torch.ops.aten, name)
            found.append((getattr(packet, schema.overload_name or "default"), schema))
    return found


def is_traced() -> bool:
    """Whether operations are recorded, or run on tensors without data."""
    if _C._get_tracing_state():
        return True
    kinds = _C._TorchDispatchModeKey
    return bool(_C._len_torch_dispatch_stack()) and any(
        _C._get_dispatch_mode(kind) is not None
        for kind in (kinds.FAKE, kinds.FUNCTIONAL, kinds.PROXY)
    )
