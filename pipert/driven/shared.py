"""What a ``forward`` keeps on modules while it waits at a cut, and other micro-batches set again.

All micro-batches of a run are inside of one model. What one of them sets in partition *j*, the next
may have set again before the first reads it in *j + 1*: values would be wrong, depending on who is
faster. Who reads an attribute cannot be seen. So the first micro-batch shows what is set on the way
to a cut, the others compare it with what they find when they come to theirs, and at the end of the
run a warning names what differed.

Not seen are tensors that are changed in place, and what is inside of other objects than lists,
tuples, dicts and sets.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pipert.errors import SharedStateWarning
from pipert.layers.modules import modules_of

__all__: list[str] = []

_OWN_NAMES = {"_parameters", "_buffers", "_modules"}  # whose items are attributes, too
_EQUAL = {bool, int, float, complex, str, bytes, type(None), torch.device}  # same if they are equal
_MAPPINGS = {dict, OrderedDict, defaultdict}
_CONTAINERS = {*_MAPPINGS, list, set, deque}
_ABSENT = b"no such attribute"
_DEPTH = 4  # of containers
_TOLD = 5  # names in one warning

_Key = tuple[nn.Module, str]


class SharedState:
    """Looks at the modules of a model. Owned by the pipe; used by its passages, meanwhile.

    A look takes some microseconds for each module, so there is one in runs 1, 2, 4, 8 and so on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._runs = 0
        self._told: set[_Key] = set()
        self._before: dict[_Key, Any] = {}
        self._kept: dict[_Key, Any] = {}
        self._found: dict[_Key, None] = {}

    def looks(self) -> bool:
        """Whether to look at the run that begins."""
        self._kept, self._found = {}, {}
        self._runs += 1
        return self._runs & (self._runs - 1) == 0

    def begin(self) -> None:
        """The first micro-batch begins a partition."""
        self._before = self._state()

    def end(self) -> None:
        """The first micro-batch comes to a cut."""
        before, self._before = self._before, {}
        state = self._state()
        for key in before.keys() | state.keys():
            if not _same(before.get(key, _ABSENT), state.get(key, _ABSENT)):
                self._kept.setdefault(key, state.get(key, _ABSENT))

    def compare(self) -> None:
        """Another micro-batch comes to a cut, or to its end."""
        for (module, name), token in _items(self._kept):
            if not _same(token, _token(_get(module, name), _DEPTH)):
                self._found[module, name] = None

    def warn(self) -> None:
        """The last micro-batch has gone through the model: warn about what others have set again.

        Warns:
            SharedStateWarning: once for each attribute. Where warnings are errors, in each run.
        """
        found = [k for k in self._found if k not in self._told and not _is_made_for_use(*k)]
        if found:
            self._runs = 0  # an error is one in the next run, too
            warnings.warn_explicit(self._message(found), SharedStateWarning, *_place(self._module))
            self._runs = 1
            self._told.update(found)

    def _state(self) -> dict[_Key, Any]:
        return {
            (module, name): _token(value, _DEPTH)
            for module in modules_of(self._module)
            for name, value in _attributes(module)
        }

    def _message(self, found: list[_Key]) -> str:
        paths = {module: path for path, module in self._module.named_modules()}
        names = [f"{paths.get(module, '?')}.{name}".lstrip(".") for module, name in found]
        others = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
        return (
            f"forward sets {', '.join(map(repr, names[:_TOLD]))}{others} of the model before a "
            "cut, and so does the next micro-batch, while the first has gone on behind that cut. "
            "What is read there may be another micro-batch's. Keep it in a local variable, return "
            "it from the layer, or let a ContextVar hold it. If nothing behind the cut reads it, "
            "ignore pipert.SharedStateWarning by warnings.filterwarnings"
        )


def _get(module: nn.Module, name: str) -> Any:
    own = [vars(module)[own] for own in _OWN_NAMES]
    return next((d[name] for d in (vars(module), *own) if name in d), _ABSENT)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in _items(vars(module)):
        if name in _OWN_NAMES:
            yield from _items(value)
        else:
            yield name, value


def _items(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(mapping.items())  # at once: another micro-batch may be adding to it


def _token(value: Any, depth: int) -> Any:
    """What stands for a value, and does not keep it. Of the same value it is the same again."""
    kind = type(value)
    if kind in _EQUAL:
        return value
    if depth and (kind in _CONTAINERS or isinstance(value, tuple)):
        items = _items(value) if kind in _MAPPINGS else list(value)
        return tuple([_token(item, depth - 1) for item in items]) if items else ()
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)


def _is_made_for_use(module: nn.Module, name: str) -> bool:
    """Whether a hook sets it right before the module reads it: torch's weight norm, pruning.

    Known by the name that such hooks note.
    """
    hooks = module._forward_pre_hooks.values()
    return name in [getattr(h, noted, None) for h in hooks for noted in ("name", "_tensor_name")]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return kind in _EQUAL and bool(one == other)


def _place(module: nn.Module) -> tuple[str, int]:
    """The file and line of the model's ``forward``."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
