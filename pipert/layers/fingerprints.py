"""Notices changes of buffers by their values.

Some changes move no version, such as ``self.codebook.data.lerp_(...)``, and some that move one
change nothing. To look at the values takes time. So all buffers of a module are looked at once,
from the first forward that is to be computed again to the end of that recomputation. Those that its
forward has written by then are looked at in later runs as well, and no others.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipert.batch.tensors import version

__all__: list[str] = []


class Fingerprint(NamedTuple):
    """What a buffer was like."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: int

    def is_written(self, now: Fingerprint) -> bool:
        """Whether it was written to until ``now``, if with the same values."""
        return (self.version, self.values) != (now.version, now.values)


Pair = tuple[Fingerprint, Fingerprint]


class Fingerprints:
    """Of the buffers of some modules before their first forward in a run."""

    __slots__ = ("_first", "_unknown")

    def __init__(self) -> None:
        self._first: list[Fingerprint] = []
        self._unknown: set[nn.Module] = set()  # which were never computed again

    def add(self, module: nn.Module) -> None:
        """Note the buffers of a module, without those of modules inside of it."""
        with _lock:
            known = _written.get(module)
        if known is None:
            self._unknown.add(module)
        for name in module._buffers if known is None else known:
            buffer = module._buffers.get(name)
            if buffer is not None and _can_be_read(buffer):
                self._first.append(_taken(module, name, buffer))

    def begin(self) -> list[Pair]:
        """Return what the buffers were like and what they are, before a recomputation."""
        return [(one, _taken(*one[:3])) for one in self._first]

    def end(self, begun: list[Pair]) -> list[str]:
        """Return the names of the buffers that a first recomputation has changed unseen."""
        if not self._unknown:
            return []
        pairs = [(now, _taken(*now[:3])) for _, now in begun if now.module in self._unknown]
        unseen = [(now, end) for now, end in pairs if now.version == end.version]
        changed = [now.name for now, end in unseen if now.values != end.values]
        if not changed:
            self._settle(begun)
        return changed

    def _settle(self, begun: list[Pair]) -> None:
        """Remember for good which are written in forwards."""
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
        and not torch._C._functorch.is_functorch_wrapped_tensor(buffer)
    )


def _taken(module: nn.Module, name: str, buffer: Tensor) -> Fingerprint:
    """Take a fingerprint of which neither transforms nor modes of the caller see anything."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        values = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
        total = int(values.sum(dtype=torch.int64))
    return Fingerprint(module, name, buffer, version(buffer), total)
