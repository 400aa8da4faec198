"""Warns of what a ``forward`` sets on modules, and another micro-batch sets again.

All micro-batches of a run are inside one model. What one of them sets in partition *j*, the next
may set again before the first reads it in *j + 1*: values would depend on timing. Reads cannot be
observed. So the first micro-batch shows what is set on the way to a cut, the others compare it with
what they find at their cuts, and a warning names what differs. That takes some microseconds a
module, so only the first run has it, in training and in evaluation.

Compared are the attributes of modules, by identity or, if they are plain or containers of plain
values, by content; and parameters and buffers by version and memory, unless a layer has them that
has been called, whose own affair they are.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipert._torch import NormBase, WithoutFunctions, forward_pre_hooks
from pipert.any_model.microbatch_graph import memory_of
from pipert.batch.tensors import version
from pipert.errors import SharedStateWarning
from pipert.layers.modules import modules_of
from pipert.layers.place import Place
from pipert.recompute.snapshot import original_of

_REGISTRIES = ("_parameters", "_buffers", "_modules")  # dicts whose items are attributes, too
_PLAIN = (str, bytes, type(None), slice, range, torch.device, Number)  # numpy's numbers, too
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)  # named tuples, too
_MAX_ITEMS = 1000  # of a container that is inspected: no vocabularies, no data sets

# An attribute of a module, or the content of the tensor that it is.
_Key: TypeAlias = tuple[nn.Module, str, bool]


class SharedState:
    """Inspects what runs keep on modules, and warns of each attribute once.

    Args:
        roots: the model, or its layers.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots = roots
        self._inspected = set[bool]()  # in training, and in evaluation
        self._named = set[_Key]()

    def is_due(self) -> bool:
        """Whether no run in this mode has been inspected to its end."""
        return bool(self.roots) and self.roots[0].training not in self._inspected

    @contextmanager
    def inspect_what_is_left(self, several: bool) -> Iterator[None]:
        """Warn of what gets a graph in a call, for its caller: the last micro-batch's alone."""
        if not (several and self.is_due()):
            yield
            return
        before = self._with_graph()
        yield
        new = [key for key, now in self._with_graph().items() if before.get(key) != now]
        self.warn(new, _LEFT)
        self.end()

    def _with_graph(self) -> dict[_Key, Any]:
        held = [(m, *each) for root in self.roots for m in modules_of(root) for each in _items(m)]
        return {(m, name, False): _fingerprint(x) for m, name, x in held if _has_graph(x)}

    def warn(self, found: Iterable[_Key], text: str) -> None:
        """Warn of those that no warning has named, nor a hook sets right before their use."""
        new = [key for key in found if key not in self._named and not _is_made_for_use(key)]
        if not new:
            return
        paths = {module: path for root in self.roots for path, module in root.named_modules()}
        names = [repr(f"{paths.get(module, '?')}.{name}".lstrip(".")) for module, name, _ in new]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        warnings.warn(text.format(", ".join(names[:5]) + more), SharedStateWarning, stacklevel=4)
        self._named.update(new)

    def end(self) -> None:
        """Note that a run was inspected to its end. If a warning is an error, it was not."""
        self._inspected.add(self.roots[0].training)


_LEFT = (
    "forward leaves {} on the model, with a graph: of the last micro-batch alone. Return it from "
    "forward, or use chunks=1. If nobody reads it after the call, ignore pipert.SharedStateWarning "
    "with warnings.filterwarnings"
)
_SET_AGAIN = (
    "forward sets {} of the model before a cut, and the next micro-batch sets it again when the "
    "first is past that cut. Code there may read another micro-batch's value. Keep it in a local "
    "variable, return it from the layer, or hold it in a ContextVar; change weights once per "
    "mini-batch, outside of forward. If nothing behind the cut reads it, ignore "
    "pipert.SharedStateWarning with warnings.filterwarnings"
)


class Inspection:
    """Compares what the micro-batches of one run set on modules. Used by the run's threads.

    Args:
        shared: warns.
        homes: the partition of each module inside a layer.
        called: the layers that have been called in the run, so far.
    """

    def __init__(
        self, shared: SharedState, homes: dict[nn.Module, int], called: Collection[nn.Module]
    ) -> None:
        self._shared, self._homes, self._called = shared, homes, called
        self._before = self._state()
        self._set: dict[_Key, Any] = {}  # by the first micro-batch

    def end(self, i: int, place: Place) -> None:
        """Note what the first micro-batch has set at its cut; warn of what others set again.

        Other micro-batches may be in layers of earlier partitions: what they set there temporarily
        must not be taken for a change by the first one.
        """
        if i == 0 and not place.is_last:
            before, now = self._before, self._state()
            own = {module for layer in list(self._called) for module in modules_of(layer)}
            for key in before | now:
                if before.get(key) != now.get(key) and not (key[2] and key[0] in own):
                    if self._homes.get(key[0], place.j) >= place.j:
                        self._set.setdefault(key, now.get(key))
        elif i > 0:
            if found := list(self._set.items()):
                now = self._state()
                self._shared.warn([k for k, first in found if now.get(k) != first], _SET_AGAIN)
            if place.is_last and i == place.m - 1:
                self._shared.end()

    def _state(self) -> dict[_Key, Any]:
        """Take fingerprints of all attributes."""
        state = dict[_Key, Any]()
        with WithoutFunctions():  # which would take copies
            for module in modules_of(self._shared.roots[0]):
                for name, value in _items(module):
                    state[module, name, False] = _fingerprint(value)
                if isinstance(module, NormBase):  # counts its batches wherever it is called
                    continue
                for name, value in [*module._parameters.items(), *module._buffers.items()]:
                    tensor = original_of(value)
                    if tensor is not None:
                        state[module, name, True] = version(tensor), memory_of(tensor)
        return state


def _has_graph(value: Any, depth: int = 2) -> bool:
    if isinstance(value, list | tuple | dict) and depth:
        return any([_has_graph(each, depth - 1) for each in _items(value)])
    return isinstance(value, Tensor) and value.grad_fn is not None


def _items(holder: Any) -> list[Any]:
    """Return the items of a container, or the attributes of a module, by name.

    Another micro-batch may be adding some, so they are copied in one go, without calling methods of
    keys, as an ``OrderedDict`` does.
    """
    if not isinstance(holder, nn.Module):
        return list(dict.items(holder) if isinstance(holder, dict) else holder)
    own = _items(vars(holder))
    return [x for k, v in own for x in (list(v.items()) if k in _REGISTRIES else [(k, v)])]


def _fingerprint(value: Any, depth: int = 4) -> Any:
    """Return what ``==`` compares of a value: its content, or its identity, which it keeps."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # two NaN are the same
    if isinstance(value, _CONTAINERS) and depth and len(value) <= _MAX_ITEMS:
        return type(value), [_fingerprint(item, depth - 1) for item in _items(value)]
    value = original_of(value)
    return id(value), value  # the numbers decide


def _is_made_for_use(key: _Key) -> bool:
    """Return whether a hook sets the attribute before its use, as of weight norm and pruning."""
    hooks = list(forward_pre_hooks(key[0]).values())
    names = [getattr(hook, each, None) for hook in hooks for each in ("name", "_tensor_name")]
    return any(type(found) is str and found == key[1] for found in names)
