"""Names what a ``forward`` keeps on modules, and another micro-batch sets again.

All micro-batches of a run are inside one model. What one of them sets in partition *j*, the next
may set again before the first reads it in *j + 1*: values would depend on timing. Reads cannot be
observed. So the first micro-batch shows what is set on the way to a cut, the others compare it with
what they find at their cuts, and at the end a warning names what differed.

The content of parameters and buffers is compared by version and memory. If the first micro-batch
changes that of a layer that nobody has called yet, and it changes again, that is refused, unless
several threads call the pipe, whose runs would change it as well. Other changes in place are not
detected, nor those inside objects other than lists, tuples, dicts and sets.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipert._torch import NormBase, WithoutFunctions, forward_pre_hooks
from pipert.any_model.boundary_tensors import memory_of
from pipert.batch.tensors import version
from pipert.errors import SharedStateWarning
from pipert.layers.buffers import original_of
from pipert.layers.modules import modules_of
from pipert.layers.place import Place

_REGISTRIES = ("_parameters", "_buffers", "_modules")  # dicts whose items are attributes, too
_PLAIN = (str, bytes, type(None), slice, range, torch.device, Number)  # numpy's numbers, too
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)  # named tuples, too
_MAX_ITEMS = 1000  # of a container that is inspected: no vocabularies, no data sets

# An attribute of a module, or the content of the tensor that it is.
_Key: TypeAlias = tuple[nn.Module, str, bool]


class SharedState:
    """Inspects what runs keep on modules, and warns of each attribute once.

    An inspection takes some microseconds a module, so only runs 1, 2, 4, 8 and so on have one.

    Args:
        roots: the model, or its layers.
        partitions: the layers of each partition, to inspect what happens before cuts.
    """

    def __init__(self, roots: Sequence[nn.Module], partitions: Iterable[nn.Module] = ()) -> None:
        self.roots = roots
        self.homes = {m: j for j, layers in enumerate(partitions) for m in modules_of(layers)}
        self.callers = set[int]()
        self._runs = 0
        self._warned = set[_Key]()

    def begin_run(self, several: bool, has_graph: bool) -> Inspection | None:
        """Return an inspection of the run that begins, if it is to have one.

        It has only if ``several`` micro-batches and partitions are at work at once.
        """
        self.callers.add(get_ident())
        return Inspection(self, has_graph) if self._is_due(several) else None

    @contextmanager
    def inspect_what_is_left(self, several: bool) -> Iterator[None]:
        """Warn of what gets a graph in a call, for its caller: the last micro-batch's alone."""
        if not self._is_due(several):
            yield
            return
        before = self._with_graph()
        yield
        new = [key for key, now in self._with_graph().items() if before.get(key) != now]
        self.warn(
            new, "forward leaves {} on the model, with a graph: of the last micro-batch alone. "
            "Return it from forward, or use chunks=1. If nobody reads it after the call, ignore "
            "pipert.SharedStateWarning with warnings.filterwarnings",
        )  # fmt: skip

    def _is_due(self, several: bool) -> bool:
        self._runs += several
        return several and self._runs & (self._runs - 1) == 0

    def _with_graph(self) -> dict[_Key, Any]:
        held = [(m, *each) for root in self.roots for m in modules_of(root) for each in _items(m)]
        return {(m, name, False): _fingerprint(x) for m, name, x in held if _has_graph(x)}

    def unnamed(self, found: Iterable[_Key]) -> list[_Key]:
        """Return those that no warning has named, nor a hook sets right before their use."""
        return [key for key in found if key not in self._warned and not _is_made_for_use(key)]

    def warn(self, found: Iterable[_Key], text: str) -> None:
        """Warn of those that no warning has named; an error is raised by the next run, too."""
        if new := self.unnamed(found):
            module = self.roots[0] if self.homes else new[0][0]
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            where = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
            runs, self._runs = self._runs, 0
            warnings.warn_explicit(text.format(self.names(new)), SharedStateWarning, *where)
            self._runs = runs
            self._warned.update(new)

    def refuse(self, found: Sequence[_Key]) -> None:
        """Raise an error about tensors that are changed by one partition and used by another."""
        self._runs = 0
        raise RuntimeError(
            f"forward changes {self.names(found)} in one partition, and another one computes with "
            "it, for another micro-batch at the same time: values would depend on timing, and "
            "change for each micro-batch. Change it once per mini-batch, outside of forward, such "
            "as after optimizer.step()"
        )

    def names(self, found: Sequence[_Key]) -> str:
        """Return the names of attributes."""
        paths = {module: path for root in self.roots for path, module in root.named_modules()}
        names = [repr(f"{paths.get(module, '?')}.{name}".lstrip(".")) for module, name, _ in found]
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_SET_AGAIN = (
    "forward sets {} of the model before a cut, and the next micro-batch sets it again when the "
    "first is past that cut. Code there may read another micro-batch's value. Keep it in a local "
    "variable, return it from the layer, or hold it in a ContextVar. If nothing behind the cut "
    "reads it, ignore pipert.SharedStateWarning with warnings.filterwarnings"
)


class Inspection:
    """Compares what the micro-batches of one run set on modules. Used by the run's threads."""

    def __init__(self, shared: SharedState, has_graph: bool) -> None:
        self._shared = shared
        self._has_graph = has_graph
        self._called = set[nn.Module]()  # in layers
        self._before: dict[_Key, Any] = {}  # when the first micro-batch began its partition
        self._set: dict[_Key, Any] = {}  # by the first micro-batch
        self._again: dict[_Key, None] = {}  # set by others, too

    def begin(self, i: int, place: Place) -> None:
        """Note the state before the first micro-batch runs a partition that ends at a cut."""
        if i == 0 and not place.is_last:
            self._before = self._state(place.j)

    def note_call(self, layer: nn.Module) -> None:
        """Note that ``layer`` is about to be called, and may change its own tensors."""
        self._called.update(modules_of(layer))

    def end(self, i: int, place: Place) -> None:
        """Note what is set when a micro-batch arrives at a cut or its end.

        Warns:
            SharedStateWarning: the last one leaves the model, and attributes were set again.

        Raises:
            RuntimeError: likewise, and tensors of layers that another partition calls were changed.
        """
        if i > 0:
            of_layers, others = self._compare()
            if place.is_last and i == place.m - 1:
                if of_layers and self._has_graph and len(self._shared.callers) == 1:
                    self._shared.refuse(of_layers)
                self._shared.warn(others, _SET_AGAIN)
        elif not place.is_last:
            before, now = self._before, self._state(place.j)
            for key in before | now:
                if before.get(key) != now.get(key) and not self._is_layers(key):
                    self._set.setdefault(key, now.get(key))
            self._before = {}

    def note(self) -> str:
        """Return what to add to an error of the run; empty if nothing was set again."""
        found = self._shared.unnamed(self._compare()[1])
        reason = "perhaps for this reason: " + _SET_AGAIN
        return reason.format(self._shared.names(found)) if found else ""

    def _compare(self) -> tuple[list[_Key], list[_Key]]:
        """Note what others have set again; return the tensors of layers, and the rest of it."""
        if found := list(self._set.items()):
            now = self._state(0)
            self._again.update({key: None for key, first in found if now.get(key) != first})
        again = list(self._again)
        of_layers = [key for key in again if self._is_layers(key)]
        return of_layers, [key for key in again if not self._is_layers(key)]

    def _is_layers(self, key: _Key) -> bool:
        """Return whether the key is of the content of a tensor of a layer that was called."""
        return key[2] and key[0] in self._called

    def _state(self, j: int) -> dict[_Key, Any]:
        """Take fingerprints of all attributes, except those of layers of earlier partitions.

        Other micro-batches may be in those layers: what they set temporarily must not be taken for
        a change by the first one.
        """
        state, homes = dict[_Key, Any](), self._shared.homes
        with WithoutFunctions():  # which would take copies
            for module in modules_of(self._shared.roots[0]):
                if homes.get(module, j) < j:
                    continue
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
    """Return what ``==`` compares of a value. Keeps the value alive only if it must."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # two NaN are the same
    if isinstance(value, _CONTAINERS) and depth and len(value) <= _MAX_ITEMS:
        return type(value), [_fingerprint(item, depth - 1) for item in _items(value)]
    value = original_of(value)
    try:
        return id(value), weakref.ref(value)  # of one object always the same one
    except TypeError:
        return id(value), value


def _is_made_for_use(key: _Key) -> bool:
    """Return whether a hook sets the attribute before its use, as of weight norm and pruning."""
    hooks = list(forward_pre_hooks(key[0]).values())
    names = [getattr(hook, each, None) for hook in hooks for each in ("name", "_tensor_name")]
    return any(type(found) is str and found == key[1] for found in names)
