"""Notices changes of buffers that move no version, such as ``self.codebook.data.lerp_(...)``.

That is seen in the values alone, and to look at them takes time. So it is done once for each
module, from the first forward that is to be computed again to the end of that recomputation. What
its forward changes then, it is expected to change always.
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


class Fingerprints:
    """Of the buffers of modules that were never computed again."""

    __slots__ = ("_before", "changing")

    def __init__(self) -> None:
        self._before: list[Fingerprint] = []
        self.changing: list[Tensor] = []
        """Those that their module's forward is known to change, without moving their version."""

    def add(self, module: nn.Module) -> None:
        """Note the buffers of a module, without those of modules inside of it."""
        with _lock:
            known = _changing.get(module)
        if known is None:
            found = [(name, b) for name, b in module._buffers.items() if _can_be_read(b)]
            self._before += [_taken(module, name, b) for name, b in found if b is not None]
        elif known:
            buffers = [module._buffers.get(name) for name in known]
            self.changing += [buffer for buffer in buffers if buffer is not None]

    def compare(self) -> list[str]:
        """Note the buffers again; return the names of those whose values alone have changed."""
        before = self._before
        self._before = now = [_taken(*one[:3]) for one in before]
        changed = [
            old
            for old, new in zip(before, now, strict=True)
            if new.version == old.version and new.values != old.values
        ]
        self.changing += [one.buffer for one in changed]
        return [one.name for one in changed]

    def settle(self) -> None:
        """Remember for good which are changed in forwards: the first recomputation is over."""
        before, self._before = self._before, []
        changing = set(map(id, self.changing))
        found: dict[nn.Module, set[str]] = {one.module: set() for one in before}
        for one in before:
            if id(one.buffer) in changing:
                found[one.module].add(one.name)
        with _lock:
            _changing.update({module: frozenset(names) for module, names in found.items()})


_lock = threading.Lock()  # held while the dictionary is used
_changing: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


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
