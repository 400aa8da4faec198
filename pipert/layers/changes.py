"""Refuses recomputations that change buffers, or that read buffers changed since the forward.

A dispatch mode sees what each operation writes and reads. A buffer with other values than in the
forward leads to other results, and so to gradients that are wrong without a word: a layer uses its
codebook and then moves it. A layer may read a number from such a buffer, though, such as whether it
was initialised: that may well depend on its own forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipert.errors import RecomputationError

__all__: list[str] = []


# Whether the statistics that are read are only copied, for a kernel whose result ignores them.
_unused: ContextVar[bool] = ContextVar("pipert_unused", default=False)


@contextmanager
def unused() -> Iterator[None]:
    """Allow changed buffers to be read in the block, since no result depends on their values."""
    before = _unused.set(True)
    try:
        yield
    finally:
        _unused.reset(before)


class RefuseChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that refuses operations which change buffers, or read changed ones.

    Args:
        buffers: the buffers and their names, by the :func:`place_of` their data.
        changed: the :func:`place_of` the data of buffers that have changed since the forward.
    """

    supports_higher_order_operators = True

    def __init__(
        self, buffers: dict[int, tuple[Tensor, str]], changed: Collection[int] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        self._changed = buffers.keys() & changed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or its first call would import dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written, read = _written_and_read(func, args, kwargs or {})
        if self._changed and not _unused.get():
            for place in self._changed.intersection(map(place_of, read)):
                raise _used(self._buffers[place][1])
        places = set(map(place_of, written))
        changed = [self._buffers[place] for place in places & self._buffers.keys()]
        before = [buffer.clone() for buffer, _ in changed]
        result = func(*args, **kwargs or {})
        for (buffer, name), old in zip(changed, before, strict=True):
            if not _are_equal(buffer, old):
                buffer.copy_(old)
                raise _changed(name)
        return result


def refuse_replaced(home: dict[str, Tensor | None], name: str, old: Tensor | None) -> None:
    """Refuse that a buffer was replaced, unless by a tensor with the same values."""
    new = home.get(name)
    if new is None or old is None or differ(new, old):
        home[name] = old
        raise _changed(name)


def refuse_changed(names: list[str]) -> None:
    """Refuse that the values of these buffers were changed."""
    for name in names:
        raise _changed(name)


def differ(new: Tensor, old: Tensor) -> bool:
    """Return whether the tensor that replaced a buffer has other values.

    A tensor on another device is accepted: the layer was moved to the device where it is called.
    """
    return new.device == old.device and not _are_equal(new, old)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors by layout, shape and values; torch compares no sparse ones itself."""
    if one.layout != other.layout or one.shape != other.shape:
        return False
    return all(map(torch.equal, _parts(one), _parts(other)))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that a tensor consists of."""
    if tensor.layout == torch.sparse_coo:
        coalesced = tensor.coalesce()
        return coalesced.indices(), coalesced.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _changed(name: str) -> RecomputationError:
    return RecomputationError(
        f"a layer changes its buffer {name!r} when it is recomputed, so its result may differ from "
        f"its forward's. {_ADVICE}"
    )


def _used(name: str) -> RecomputationError:
    return RecomputationError(
        f"a layer uses its buffer {name!r} when it is recomputed, which has changed since its "
        f"forward, so its result may differ. {_ADVICE}"
    )


_ADVICE = (
    "Use checkpoint='never', or, if no result of the layer depends on the buffer, leave it alone "
    "while pipert.is_recomputing()"
)


def place_of(tensor: Tensor) -> int:
    """Return an identifier of the tensor's memory, which its views share."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _written_and_read(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], ...]:
    """Return the tensors whose data an operation writes, and those whose data it reads."""
    arguments: Any = getattr(getattr(func, "_schema", None), "arguments", ())
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    there = [(a, given[a.name]) for a in arguments if a.name in given]
    written = _tensors([value for a, value in there if a.is_write])
    if func is torch.ops.aten._local_scalar_dense.default or _makes_another(func):
        return written, []
    return written, _tensors([value for a, value in there if a.alias_info is None])


def _makes_another(func: Any) -> bool:
    """Return whether an operation reads only the shape and dtype of its argument."""
    name = getattr(func, "__name__", "")
    return "_like." in name or name.startswith("new_")


def _tensors(values: list[Any]) -> list[Tensor]:
    flat = [x for one in values for x in (one if isinstance(one, list | tuple) else (one,))]
    return [x for x in flat if isinstance(x, Tensor)]
