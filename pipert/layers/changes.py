"""Refuses changes of buffers in a recomputation: a dispatch mode sees what operations write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipert.errors import RecomputationError

__all__: list[str] = []


class RefuseChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that change buffers.

    Args:
        buffers: by where their data are, with their names.
    """

    supports_higher_order_operators = True

    def __init__(self, buffers: dict[int, tuple[Tensor, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or its first call would import dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = {place_of(tensor) for tensor in _written(func, args, kwargs or {})}
        changed = [self._buffers[place] for place in places & self._buffers.keys()]
        before = [buffer.clone() for buffer, _ in changed]
        result = func(*args, **kwargs or {})
        for (buffer, name), old in zip(changed, before, strict=True):
            if not _are_equal(buffer, old):
                buffer.copy_(old)
                raise _changed(name)
        return result


def refuse_replaced(home: dict[str, Tensor | None], name: str, old: Tensor | None) -> None:
    """Refuse that another tensor is in the place of a buffer, unless it has the same values.

    On another device it is one of a layer that was moved meanwhile, to where it is called.
    """
    new = home.get(name)
    if new is not None and old is not None and new.device != old.device:
        return
    if new is None or old is None or not _are_equal(new, old):
        home[name] = old
        raise _changed(name)


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
        "its forward's. Use checkpoint='never', or leave the buffer alone while "
        "pipert.is_recomputing()"
    )


def place_of(tensor: Tensor) -> int:
    """Where its data are, as for all of its views."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    arguments: Any = getattr(getattr(func, "_schema", None), "arguments", ())
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    found = [given[a.name] for a in arguments if a.is_write and a.name in given]
    flat = [x for one in found for x in (one if isinstance(one, list | tuple) else (one,))]
    return [x for x in flat if isinstance(x, Tensor)]
