"""What a ``forward`` keeps on modules while it waits at a cut, and other micro-batches set again.

All micro-batches of a run are inside of one model. What one of them sets in partition *j*, the next
may have set again before the first reads it in *j + 1*: values would be wrong, depending on who is
faster. Who reads an attribute cannot be seen. So the first micro-batch shows what is set on the way
to a cut, the others compare it with what they find when they come to theirs, and at the end of the
run a warning names what differed.

Not seen are tensors that are changed in place, and what is inside of other objects than lists,
tuples, dicts and sets, or of those of more than a thousand items.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import nn

from pipert.errors import SharedStateWarning
from pipert.layers.modules import modules_of

__all__: list[str] = []

_OWN_NAMES = {"_parameters", "_buffers", "_modules"}  # whose items are attributes, too
_EQUAL = {bool, int, float, complex, str, bytes, type(None), torch.device}  # same if they are equal
_MAPPINGS = {dict, OrderedDict, defaultdict}
_CONTAINERS = {*_MAPPINGS, list, tuple, set, frozenset, deque}
_ABSENT = b"no such attribute"
_DEPTH = 4  # of containers
_MANY = 1000  # items of a container, which is not looked into: a vocabulary, or a data set
_TOLD = 5  # names in one warning

_Key = tuple[nn.Module, str]


class SharedState:
    """What was said about the modules of a model. Owned by the pipe.

    A look takes some microseconds for each module, so there is one in runs 1, 2, 4, 8 and so on.

    Args:
        module: the model.
        layers: of each partition.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        self.module = module
        self.homes = {part: j for j, of in enumerate(layers) for part in modules_of(of)}
        self.told: set[_Key] = set()
        self._runs = 0

    def look(self) -> Look | None:
        """A look at the run that begins, if there is to be one."""
        self._runs += 1
        return Look(self) if self._runs & (self._runs - 1) == 0 else None

    def warn(self, found: list[_Key]) -> None:
        """Say what was found, once."""
        self._runs = 0  # an error is one in the next run, too
        warnings.warn_explicit(self._message(found), SharedStateWarning, *_place(self.module))
        self._runs = 1
        self.told.update(found)

    def _message(self, found: list[_Key]) -> str:
        paths = {module: path for path, module in self.module.named_modules()}
        names = [f"{paths.get(module, '?')}.{name}".lstrip(".") for module, name in found]
        others = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
        return (
            f"forward sets {', '.join(map(repr, names[:_TOLD]))}{others} of the model before a "
            "cut, and so does the next micro-batch, while the first has gone on behind that cut. "
            "What is read there may be another micro-batch's. Keep it in a local variable, return "
            "it from the layer, or let a ContextVar hold it. If nothing behind the cut reads it, "
            "ignore pipert.SharedStateWarning by warnings.filterwarnings"
        )


class Look:
    """A look at the modules in one run. Its drivers', meanwhile; it ends with the run."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._before: dict[_Key, Any] = {}
        self._kept: dict[_Key, Any] = {}
        self._found: dict[_Key, None] = {}

    def begin(self, j: int) -> None:
        """The first micro-batch begins partition ``j``, behind which there is a cut."""
        self._before = self._state(j)

    def end(self, j: int) -> None:
        """It comes to that cut."""
        before, self._before = self._before, {}
        state = self._state(j)
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
        told = self._shared.told
        found = [k for k in self._found if k not in told and not _is_made_for_use(*k)]
        if found:
            self._shared.warn(found)

    def _state(self, j: int) -> dict[_Key, Any]:
        """Of all modules but those of earlier partitions, which other micro-batches are in by now:
        what these set for a while, and put back, was not set by the first.
        """
        homes = self._shared.homes
        return {
            (module, name): _token(value, _DEPTH)
            for module in modules_of(self._shared.module)
            if homes.get(module, j) >= j
            for name, value in _attributes(module)
        }


def _get(module: nn.Module, name: str) -> Any:
    own = [vars(module)[own] for own in _OWN_NAMES]
    return next((d[name] for d in (vars(module), *own) if name in d), _ABSENT)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in _items(vars(module)):
        if name in _OWN_NAMES:
            yield from _items(value)
        else:
            yield name, value


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    # At once: another micro-batch may be adding to it. An OrderedDict's own would ask its keys.
    return list(dict.items(mapping) if isinstance(mapping, dict) else mapping.items())


def _token(value: Any, depth: int) -> Any:
    """What stands for a value, and keeps it only where nothing else can. Of the same it is equal.

    It is compared by :func:`_same`.
    """
    kind = type(value)
    if kind in _EQUAL:
        return value
    if kind in _CONTAINERS or isinstance(value, tuple):  # named ones
        if not depth or len(value) > _MANY:
            return _Whole(_reference(value), len(value))
        items = _items(value) if kind in _MAPPINGS else list(value)
        return tuple([_token(item, depth - 1) for item in items]) if items else ()
    return _reference(value)


class _Whole(NamedTuple):
    """A container that is not looked into."""

    container: Any
    size: int


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_made_for_use(module: nn.Module, name: str) -> bool:
    """Whether a hook sets it right before the module reads it: torch's weight norm, pruning.

    Known by the name that such hooks note.
    """
    hooks = list(module._forward_pre_hooks.values())
    noted = [getattr(h, note, None) for h in hooks for note in ("name", "_tensor_name")]
    return any(type(one) is str and one == name for one in noted)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is tuple or kind is _Whole:
        return len(one) == len(other) and all(map(_same, one, other))
    if kind in _EQUAL or isinstance(one, Number | range):  # numpy's are numbers, too
        return bool(one == other or one != one and other != other)
    return kind is slice and _same(_parts(one), _parts(other))


def _parts(one: slice) -> tuple[Any, ...]:
    return one.start, one.stop, one.step


def _place(module: nn.Module) -> tuple[str, int]:
    """The file and line of the model's ``forward``."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
