"""Flattens values: any pytree, including mappings that torch takes for leaves.

torch recognises containers by their exact type. So it takes a ``UserDict``, such as the batches
that tokenizers return, a ``MappingProxyType`` or an instance of a subclass of ``dict`` for a leaf.
Here each of them is a node and is rebuilt as its own type: a copy with new items that keeps its
other attributes. These types are not added to torch's registry, which other code also uses:
instead, a mapping is replaced by a node of pipert's own type before it is flattened.
"""

from __future__ import annotations

import contextlib
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
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

    Each mapping that torch does not know adds a leaf: its copy with ``None`` for each value, or an
    empty ``MappingProxyType``. Containers for which ``is_leaf`` is true are leaves as well.
    """
    leaves, spec = pytree.tree_flatten(value, is_leaf)
    if not ORDINARY.issuperset(map(type, leaves)) and any(map(_is_mapping, leaves)):
        return pytree.tree_flatten(_opened(value, is_leaf), is_leaf)
    return leaves, spec


Layout = tuple[Any, tuple[Any, ...] | None, list[Any]]
"""A container: its type, its keys if it is a dict, and for each item ``None`` for a leaf,
or the layout of a container in it."""


def layout_of(value: Any, leaves: list[Any]) -> Layout | None:
    """Return the layout of nested tuples, lists and dicts, and add what is in them to ``leaves``.

    ``None`` if there is anything else than these, named tuples and ordinary leaves, which a pytree
    may have. A pytree takes ten times as long.
    """
    kind, items, within = type(value), value, list[Any]()
    if kind is dict:
        items = value.values()
    elif kind is not tuple and kind is not list and not _is_named_tuple(kind):
        return None
    for item in items:
        layout = None
        if type(item) in ORDINARY:
            leaves.append(item)
        elif (layout := layout_of(item, leaves)) is None:
            return None
        within.append(layout)
    return kind, tuple(value) if kind is dict else None, within


def laid_out(layout: Layout, leaves: Iterator[Any]) -> Any:
    """Return the containers of a layout with the next ``leaves`` in them."""
    kind, keys, within = layout
    items = [next(leaves) if each is None else laid_out(each, leaves) for each in within]
    if keys is not None:
        return kind(zip(keys, items, strict=True))
    return kind(items) if kind is tuple or kind is list else kind._make(items)


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
    attributes = getattr(value, "__dict__", ())
    is_array = all(name in attributes or hasattr(type(value), name) for name in ("ndim", "shape"))
    return is_array and bool(value.ndim)


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
    return pytree.tree_is_leaf(value) and not _is_mapping(value)


class _MappingNode:
    """A mapping as a node. Its first child is a template: the mapping with ``None`` values."""

    __slots__ = ("children", "keys")

    def __init__(self, mapping: Any, is_leaf: Callable[[Any], bool]) -> None:
        self.keys = tuple(mapping)
        template: Any = MappingProxyType({})
        if not isinstance(mapping, MappingProxyType):
            template = _filled(mapping, self.keys, [None] * len(self.keys))
        self.children = [template, *[_opened(value, is_leaf) for value in mapping.values()]]


def _opened(value: Value, is_leaf: Callable[[Any], bool]) -> Value:
    """Return ``value`` with each mapping that torch takes for a leaf replaced by a node."""

    def opened(leaf: Any) -> Any:
        return _MappingNode(leaf, is_leaf) if _is_mapping(leaf) else leaf

    return pytree.tree_map(opened, value, is_leaf=is_leaf)


def _rebuilt(children: Iterable[Any], keys: tuple[Any, ...]) -> Any:
    template, *values = children
    if isinstance(template, MappingProxyType):
        return MappingProxyType(dict(zip(keys, values, strict=True)))
    return _filled(template, keys, values)


def _filled(template: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    mapping = copy(template)
    for key, value in zip(keys, values, strict=True):
        mapping[key] = value
    return mapping


class _EmptyKey:
    """The key of a mapping's template, which adds nothing to a path."""

    def __str__(self) -> str:
        return ""


def _with_keys(node: _MappingNode) -> Any:
    keys: list[Any] = [_EmptyKey(), *[pytree.MappingKey(key) for key in node.keys]]
    return list(zip(keys, node.children, strict=True)), node.keys


with contextlib.suppress(UnsupportedTorchError):  # raised again when a pipe is made
    pytree.register_pytree_node(
        _MappingNode,
        lambda node: (node.children, node.keys),
        _rebuilt,
        flatten_with_keys_fn=_with_keys,
    )


def _is_mapping(leaf: Any) -> bool:
    return isinstance(leaf, _MAPPINGS)
