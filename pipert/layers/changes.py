"""Refuses recomputations that change buffers, or that read what was changed since the forward.

A dispatch mode sees what operations write to and what they read. What has other values than in the
forward makes other results, and gradients that are wrong without a word: a codebook that a layer
uses and then moves. A layer may ask for a number, though, such as whether it was initialised: that
one may well depend on its own forward.
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


# Whether statistics are copied that a kernel updates: it gives the same result, whatever they are.
_unused: ContextVar[bool] = ContextVar("pipert_unused", default=False)


@contextmanager
def unused() -> Iterator[None]:
    """Nothing depends on the values of the buffers that are read in the block."""
    before = _unused.set(True)
    try:
        yield
    finally:
        _unused.reset(before)


class RefuseChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that change buffers, or read those that were changed.

    Args:
        buffers: by where their data are, with their names.
        changed: where the data are of those that were changed since the forward.
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
            if not torch.equal(buffer, old):
                buffer.copy_(old)
                raise _changed(name)
        return result


def refuse_replaced(home: dict[str, Tensor | None], name: str, old: Tensor | None) -> None:
    """Refuse that another tensor is in the place of a buffer, unless it has the same values."""
    new = home.get(name)
    if new is None or old is None or differ(new, old):
        home[name] = old
        raise _changed(name)


def refuse_changed(names: list[str]) -> None:
    """Refuse that the values of these buffers were changed."""
    for name in names:
        raise _changed(name)


def differ(new: Tensor, old: Tensor) -> bool:
    """Whether the tensor in the place of a buffer has other values.

    On another device it is one of a layer that was moved meanwhile, to where it is called.
    """
    return new.device == old.device and (new.shape != old.shape or not torch.equal(new, old))


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
    """Where its data are, as for all of its views."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _written_and_read(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], ...]:
    """The tensors whose data an operation writes, and those whose data it reads."""
    arguments: Any = getattr(getattr(func, "_schema", None), "arguments", ())
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    there = [(a, given[a.name]) for a in arguments if a.name in given]
    written = _tensors([value for a, value in there if a.is_write])
    if func is torch.ops.aten._local_scalar_dense.default or _makes_another(func):
        return written, []
    return written, _tensors([value for a, value in there if a.alias_info is None])


def _makes_another(func: Any) -> bool:
    """Whether it makes a tensor like another one, whose values do not matter."""
    name = getattr(func, "__name__", "")
    return "_like." in name or name.startswith("new_")


def _tensors(values: list[Any]) -> list[Tensor]:
    flat = [x for one in values for x in (one if isinstance(one, list | tuple) else (one,))]
    return [x for x in flat if isinstance(x, Tensor)]
