"""Flattens values: any pytree, and in it mappings that torch takes for leaves.

torch knows containers by their exact type, so that a ``UserDict``, as which tokenizers return their
batches, a ``MappingProxyType`` or a dict of a class of one's own is a leaf to it. Here each is a
dict that comes back as its own type: a copy, with the attributes that it had beside its items. The
registry of torch, which others use as well, learns nothing of that: such a mapping is replaced by a
node of ours before it is flattened.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from copy import copy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from pipert._typing import Value

__all__: list[str] = []

Leaves = tuple[list[Any], pytree.TreeSpec]

ORDINARY = frozenset(
    {
        Tensor, nn.Parameter, type(None), bool, int, float, complex, str, bytes,
        torch.dtype, torch.device, torch.Size,
    }  # fmt: skip
)
"""The types of leaves that are what they seem to be."""

_MAPPINGS = (dict, UserDict, MappingProxyType)


def flatten(value: Value, is_leaf: Callable[[Any], bool] | None = None) -> Leaves:
    """Returns the leaves, and what ``pytree.tree_unflatten`` makes of others.

    Each mapping adds a leaf: itself with nothing but ``None`` in it. ``is_leaf`` says what else is
    one.
    """
    is_leaf = is_leaf or _is_size
    leaves, spec = pytree.tree_flatten(value, is_leaf)
    if not ORDINARY.issuperset(map(type, leaves)) and any(map(_is_mapping, leaves)):
        return pytree.tree_flatten(_opened(value, is_leaf), is_leaf)
    return leaves, spec


def keys_of(value: Value, k: int, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Returns the path to the ``k``-th leaf; ``None`` below a type registered without names."""
    is_leaf = is_leaf or _is_size
    try:
        opened = _opened(value, is_leaf)
        return tuple(pytree.tree_flatten_with_path(opened, is_leaf)[0][k][0])
    except ValueError:
        return None


def is_whole(value: Any) -> bool:
    """Whether a container is a leaf: it is no container of rows, or comes back as another."""
    return type(value) in (torch.Size, PackedSequence)


class _Opened:
    """A mapping, as a node: the mapping without its values, and these."""

    __slots__ = ("children", "keys")

    def __init__(self, mapping: Any, is_leaf: Callable[[Any], bool]) -> None:
        self.keys = tuple(mapping)
        like: Any = MappingProxyType({})
        if not isinstance(mapping, MappingProxyType):
            like = _filled(mapping, self.keys, [None] * len(self.keys))
        self.children = [like, *[_opened(value, is_leaf) for value in mapping.values()]]


def _opened(value: Value, is_leaf: Callable[[Any], bool]) -> Value:
    def opened(leaf: Any) -> Any:
        return _Opened(leaf, is_leaf) if _is_mapping(leaf) else leaf

    return pytree.tree_map(opened, value, is_leaf=is_leaf)


def _closed(children: Iterable[Any], keys: tuple[Any, ...]) -> Any:
    like, *values = children
    if isinstance(like, MappingProxyType):
        return MappingProxyType(dict(zip(keys, values, strict=True)))
    return _filled(like, keys, values)


def _filled(like: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    mapping = copy(like)
    for key, value in zip(keys, values, strict=True):
        mapping[key] = value
    return mapping


class _Itself:
    """The way from a mapping to itself."""

    def __str__(self) -> str:
        return ""


def _with_keys(node: _Opened) -> Any:
    ways: list[Any] = [_Itself(), *map(_key, node.keys)]
    return list(zip(ways, node.children, strict=True)), node.keys


def _key(key: Any) -> pytree.MappingKey[Any, Any]:
    return pytree.MappingKey(key)


pytree.register_pytree_node(
    _Opened,
    lambda node: (node.children, node.keys),
    _closed,
    flatten_with_keys_fn=_with_keys,
)


def _is_mapping(leaf: Any) -> bool:
    return isinstance(leaf, _MAPPINGS)


def _is_size(value: Any) -> bool:
    # A Size would come back as a tuple.
    return type(value) is torch.Size
