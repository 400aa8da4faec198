"""Detects changes of buffers by their values.

Some changes leave a buffer's version alone, such as ``self.codebook.data.lerp_(...)``, and some
writes leave its values alone. Reading the values takes time, and on a GPU the host waits for it. So
all buffers of a module are read once, from its first checkpointed forward to the end of the
recomputation of that. Later runs read only those that its forward wrote meanwhile.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipert._torch import WithoutDispatch, WithoutFunctions, is_wrapped
from pipert.batch.tensors import version

__all__: list[str] = []


class Fingerprint(NamedTuple):
    """The version of a buffer at one moment, and the sum of its bytes."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: int

    def is_written(self, now: Fingerprint) -> bool:
        """Return whether the buffer was written between this moment and ``now``."""
        return (self.version, self.values) != (now.version, now.values)


Pair = tuple[Fingerprint, Fingerprint]


class Fingerprints:
    """Fingerprints of the buffers of modules, taken before their first forward in a run."""

    __slots__ = ("_first", "_unknown")

    def __init__(self) -> None:
        self._first: list[Fingerprint] = []
        self._unknown: set[nn.Module] = set()  # modules that were never recomputed

    def add(self, module: nn.Module) -> None:
        """Take the fingerprints of a module's own buffers, not of its submodules'."""
        with _lock:
            known = _written.get(module)
        if known is None:
            self._unknown.add(module)
        for name in module._buffers if known is None else known:
            buffer = module._buffers.get(name)
            if buffer is not None and _can_be_read(buffer):
                self._first.append(_taken(module, name, buffer))

    def begin(self) -> list[Pair]:
        """Return pairs of each fingerprint and a new one. Called before a recomputation."""
        return [(one, _taken(*one[:3])) for one in self._first]

    def end(self, begun: list[Pair]) -> list[str]:
        """Return the names of buffers that a first recomputation changed without a new version."""
        if not self._unknown:
            return []
        pairs = [(now, _taken(*now[:3])) for _, now in begun if now.module in self._unknown]
        unseen = [(now, end) for now, end in pairs if now.version == end.version]
        changed = [now.name for now, end in unseen if now.values != end.values]
        if not changed:
            self._settle(begun)
        return changed

    def _settle(self, begun: list[Pair]) -> None:
        """Remember which buffers the forwards of these modules write."""
        unknown, self._unknown = self._unknown, set()
        written = [old for old, now in begun if old.is_written(now) or old.module not in unknown]
        found: dict[nn.Module, set[str]] = {module: set() for module in unknown}
        for one in written:
            if one.module in found:
                found[one.module].add(one.name)
        self._first = written
        with _lock:
            _written.update({module: frozenset(names) for module, names in found.items()})


_lock = threading.Lock()  # held while the dictionary is used
_written: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def _can_be_read(buffer: Tensor | None) -> bool:
    return (
        type(buffer) is Tensor
        and buffer.layout == torch.strided
        and not (buffer.is_meta or buffer.is_quantized or buffer.is_inference())
        and not (buffer.is_conj() or buffer.is_neg())
        and not is_wrapped(buffer)
    )


def _taken(module: nn.Module, name: str, buffer: Tensor) -> Fingerprint:
    """Take a fingerprint, unseen by the caller's modes and transforms."""
    with WithoutFunctions(), WithoutDispatch(), torch.no_grad():
        values = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
        total = int(values.sum(dtype=torch.int64))
    return Fingerprint(module, name, buffer, version(buffer), total)
