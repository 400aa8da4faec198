"""Flattens values: any pytree, including mappings that torch takes for leaves.

torch recognises containers by their exact type. So it takes a ``UserDict``, such as the batches
that tokenizers return, a ``MappingProxyType`` or an instance of a subclass of ``dict`` for a leaf.
Here each of them is a node, and is rebuilt by calling its type with a dict. These types are not
added to torch's registry, which other code also uses: instead, a mapping is replaced by a node of
pipert's own type before it is flattened.
"""

from __future__ import annotations

import contextlib
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pipert._torch import pytree
from pipert._typing import Value
from pipert.errors import UnsupportedTorchError

Leaves = tuple[list[Any], pytree.TreeSpec]

ORDINARY = frozenset(
    {
        Tensor, nn.Parameter, type(None), bool, int, float, complex, str, bytes,
        torch.dtype, torch.device, torch.Size,
    }  # fmt: skip
)
"""Types of leaves that are not mappings and hold no other tensors."""

CLOSED_TO_GRAPHS = (type, nn.Module, ModuleType, Tensor)
"""Types that hold no tensor of a graph. A function may hold one in its closure."""

CLOSED = (*CLOSED_TO_GRAPHS, FunctionType, BuiltinFunctionType, MethodType)
"""Types in which no rows are looked for: tensors that a function holds need not be rows."""

_PLACES = 10_000
"""How many places are looked at in an object, the nearest first."""

REMEDY = (
    "put its tensors into a tuple, list or dict, or register its class as a pytree with "
    "torch.utils._pytree.register_pytree_node"
)
"""Advice on how to make the tensors in an object visible, for error messages."""

_MAPPINGS = (dict, UserDict, MappingProxyType)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size  # as a node it would be rebuilt as a tuple


def flatten(value: Value, is_leaf: Callable[[Any], bool] = _is_size) -> Leaves:
    """Return the leaves of ``value``, and the spec for ``pytree.tree_unflatten``.

    Containers for which ``is_leaf`` is true are leaves as well.
    """
    leaves, spec = pytree.tree_flatten(value, is_leaf)
    if any([isinstance(leaf, _MAPPINGS) for leaf in leaves]):
        return pytree.tree_flatten(_opened(value, is_leaf), is_leaf)
    return leaves, spec


Rebuild = Callable[[Iterator[Any]], Any]
"""Makes a container from the next leaves."""


def take_apart(value: Any, leaves: list[Any]) -> Rebuild | None:
    """Add what is in nested tuples, lists and dicts to ``leaves``; return how to rebuild them.

    ``None`` if there is anything else than these, named tuples and ordinary leaves, which a pytree
    may have. A pytree takes ten times as long.
    """
    kind, items, within = type(value), value, list[Rebuild | None]()
    keys: tuple[Any, ...] = ()
    if kind is dict:
        keys, items = tuple(value), value.values()
    elif kind is not tuple and kind is not list and not _is_named_tuple(kind):
        return None
    for item in items:
        part = None
        if type(item) in ORDINARY:
            leaves.append(item)
        elif (part := take_apart(item, leaves)) is None:
            return None
        within.append(part)

    def rebuild(left: Iterator[Any]) -> Any:
        items = [next(left) if part is None else part(left) for part in within]
        if kind is dict:
            return dict(zip(keys, items, strict=True))
        return kind(items) if kind is tuple or kind is list else kind._make(items)

    return rebuild


def _is_named_tuple(kind: Any) -> bool:
    is_direct = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    return is_direct and kind not in pytree.SUPPORTED_NODES


def is_whole(value: Any) -> bool:
    """Return whether a container is a leaf: it has no rows, or would change its type if rebuilt."""
    return type(value) in (torch.Size, PackedSequence)


def is_whole_in_rows(value: Any) -> bool:
    """Return :func:`is_whole`; refuse a container that keeps its batch size with fewer rows."""
    if type(value) not in ORDINARY and isinstance(getattr(value, "batch_size", 0), torch.Size):
        leaves, spec = pytree.tree_flatten(value)
        rows = [leaf[:0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if len(rows) == len(leaves) and (
            pytree.tree_unflatten(rows, spec).batch_size == value.batch_size
        ):
            raise TypeError(
                f"a {type(value).__qualname__} keeps its batch_size when its rows are split or "
                "joined; use a dict, such as its to_dict(), or in a step microbatches= that are "
                "ready"
            )
    return is_whole(value)


def path_of(value: Value, k: int) -> str | None:
    """Return the path to the ``k``-th leaf of ``flatten(value, is_whole)``, such as ``[0]['x']``.

    ``None`` if a type above it is registered without names.
    """
    try:
        opened = _opened(value, is_whole)
        return pytree.keystr(pytree.tree_flatten_with_path(opened, is_whole)[0][k][0])
    except ValueError:
        return None


def has_rows(value: Any) -> bool:
    """Return whether ``value`` is a tensor or an array with at least one dimension."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if type(value) in ORDINARY or isinstance(value, CLOSED):
        return False
    return hasattr(value, "shape") and bool(getattr(value, "ndim", 0))


def held_by(value: Any, closed: tuple[type, ...] = CLOSED) -> Iterator[Any]:
    """Yield what an object has in attributes and items, and what these have, unless ``closed``."""
    left, seen = deque([value]), dict[int, Any]()
    for _ in range(_PLACES):
        if not left:
            return
        part = left.popleft()
        if type(part) in ORDINARY or isinstance(part, closed) or id(part) in seen:
            continue
        seen[id(part)] = part
        slots = [vars(kind).get("__slots__", ()) for kind in type(part).__mro__]
        names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        held = [getattr(part, name) for name in names if hasattr(part, name)]
        held += getattr(part, "__dict__", {}).values()
        if isinstance(part, dict):
            held += dict.values(part)
        elif isinstance(part, (list, tuple, set, frozenset, deque)):
            held += part
        elif isinstance(part, FunctionType):
            cells = [cell for cell in part.__closure__ or () if cell != CellType()]
            held += [cell.cell_contents for cell in cells]
            held += [part.__defaults__, part.__kwdefaults__]
        elif isinstance(part, (MethodType, BuiltinFunctionType)):
            held += [part.__self__]
        yield from held
        left += held


def is_opaque(value: Any) -> bool:
    """Return whether ``value`` is a leaf, and no container of leaves."""
    return pytree.tree_is_leaf(value) and not isinstance(value, _MAPPINGS)


class _Mapping(dict[Any, Any]):
    """A mapping that torch takes for a leaf, as a node."""

    def __init__(self, mapping: Any, is_leaf: Callable[[Any], bool]) -> None:
        super().__init__({key: _opened(value, is_leaf) for key, value in mapping.items()})
        self.context = type(mapping), tuple(self)


def _opened(value: Value, is_leaf: Callable[[Any], bool]) -> Value:
    """Return ``value`` with each mapping that torch takes for a leaf replaced by a node."""

    def opened(leaf: Any) -> Any:
        return _Mapping(leaf, is_leaf) if isinstance(leaf, _MAPPINGS) else leaf

    return pytree.tree_map(opened, value, is_leaf=is_leaf)


def _rebuilt(values: Iterable[Any], context: tuple[type[Any], tuple[Any, ...]]) -> Any:
    kind, keys = context
    return kind(dict(zip(keys, values, strict=True)))


with contextlib.suppress(UnsupportedTorchError):  # raised again when a pipe is made
    pytree.register_pytree_node(
        _Mapping,
        lambda node: (list(node.values()), node.context),
        _rebuilt,
        flatten_with_keys_fn=lambda node: (
            [(pytree.MappingKey(key), value) for key, value in node.items()], node.context
        ),
    )  # fmt: skip
