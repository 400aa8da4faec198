"""Flattens values: any pytree, including mappings that torch takes for leaves.

torch's own functions recognise containers by their exact type, and take ten times as long. So they
take a ``UserDict``, such as the batches that tokenizers return, a ``MappingProxyType`` or an
instance of a subclass of ``dict`` for a leaf. Here each of them is a node, and is rebuilt by
calling its type with a dict. Other types are those of torch's registry.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pipert._torch import pytree
from pipert._typing import Value

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


class Node(NamedTuple):
    """A container without its items. Those of values of one structure are equal."""

    kind: Any
    context: Any
    """A mapping's keys, or what torch's registry wants to rebuild it."""
    items: tuple[Node | None, ...]
    """``None`` stands for a leaf."""


def flatten(
    value: Value, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Node | None]:
    """Return the leaves of ``value``, and the structure for :func:`unflatten`.

    Containers for which ``is_leaf`` is true are leaves as well.
    """
    leaves: list[Any] = []
    return leaves, take_apart(value, leaves, is_leaf)


def take_apart(
    value: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None = None
) -> Node | None:
    """Add the leaves of ``value`` to ``leaves``; return its structure, as :func:`flatten` does."""
    kind, items, context = type(value), value, None
    if kind in ORDINARY or is_leaf is not None and is_leaf(value):
        leaves.append(value)
        return None
    if kind is dict:
        context, items = tuple(value), value.values()
    elif kind in pytree.SUPPORTED_NODES:
        if kind is not tuple and kind is not list:
            items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    elif isinstance(value, _MAPPINGS):
        context, items = tuple(value), value.values()
    elif not _is_named_tuple(kind):
        leaves.append(value)
        return None
    nodes = list[Node | None]()
    for item in items:
        if type(item) in ORDINARY:
            leaves.append(item)
            nodes.append(None)
        else:
            nodes.append(take_apart(item, leaves, is_leaf))
    return Node(kind, context, tuple(nodes))


def unflatten(node: Node | None, leaves: Iterator[Any]) -> Any:
    """Return a value of this structure with the next of the ``leaves``."""
    if node is None:
        return next(leaves)
    kind, context, nodes = node
    items = [next(leaves) if item is None else unflatten(item, leaves) for item in nodes]
    if kind is tuple or kind is list:
        return kind(items)
    if kind is dict:
        return dict(zip(context, items, strict=True))
    if kind in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(items, context)
    return kind._make(items) if context is None else kind(dict(zip(context, items, strict=True)))


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def paths_of(node: Node | None) -> Iterator[str]:
    """Yield the path to each leaf as a user writes it, such as ``[0]['x']``."""
    if node is None:
        yield ""
        return
    kind, context, items = node
    keys = context if isinstance(context, tuple) or type(context) is list else ()
    for k, item in enumerate(items):
        step = f"[{keys[k] if len(keys) == len(items) else k!r}]"
        if _is_named_tuple(kind):
            step = f".{kind._fields[k]}"
        for rest in paths_of(item):
            yield step + rest


def is_whole(value: Any) -> bool:
    """Return whether a container is a leaf: it has no rows, or would change its type if rebuilt."""
    return type(value) in (torch.Size, PackedSequence)


def is_whole_in_rows(value: Any) -> bool:
    """Return :func:`is_whole`; refuse a container that keeps its batch size with fewer rows."""
    if type(value) not in ORDINARY and isinstance(getattr(value, "batch_size", 0), torch.Size):
        leaves, structure = flatten(value)
        rows = [leaf[:0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if len(rows) == len(leaves) and (
            unflatten(structure, iter(rows)).batch_size == value.batch_size
        ):
            raise TypeError(
                f"a {type(value).__qualname__} keeps its batch_size when its rows are split or "
                "joined; use a dict, such as its to_dict(), or in a step microbatches= that are "
                "ready"
            )
    return is_whole(value)


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
