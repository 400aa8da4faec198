"""Detects attributes that a ``forward`` sets before a cut and other micro-batches set again.

All micro-batches of a run are inside one model. What one of them sets in partition *j*, the next
may set again before the first reads it in *j + 1*: values would be wrong, depending on timing.
Reads of attributes cannot be observed. So the first micro-batch shows what is set on the way to a
cut, the others compare it with what they find at their cuts, and at the end of the run a warning
names what differed.

In-place changes of parameters and buffers are told by versions. If the first micro-batch changes
those of a layer that nobody has called yet, and another one does again, that is refused, unless
several threads call the pipe, whose runs would change them as well.

What a forward leaves for the caller is told by its graph, in any pipe: :class:`LeftBehind`.

Other changes of tensors in place are not detected, nor are those by way of ``.data``, those inside
objects other than lists, tuples, dicts and sets, or inside those with more than a thousand items.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from pipert._torch import NormBase, WithoutFunctions, forward_pre_hooks, is_lazy
from pipert.any_model.boundary_tensors import memory_of
from pipert.any_model.fingerprints import fingerprint, items_of
from pipert.batch.tensors import version
from pipert.errors import SharedStateWarning
from pipert.layers.buffers import original_of
from pipert.layers.modules import modules_of
from pipert.layers.place import Place

__all__: list[str] = []

_REGISTRIES = {"_parameters", "_buffers", "_modules"}  # dicts whose items are attributes, too
_MAX_NAMES = 5  # in one warning

_Key = tuple[nn.Module, str]


class SharedState:
    """Decides which runs are inspected, and remembers what was warned about. Owned by the pipe.

    An inspection takes some microseconds a module, so only runs 1, 2, 4, 8 and so on have one.

    Args:
        module: the model.
        layers: the layers of each partition.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        self.module = module
        self.homes = {part: j for j, inside in enumerate(layers) for part in modules_of(inside)}
        self.warned: set[_Key] = set()
        self._runs = 0
        self._callers = set[int]()

    def begin_run(self, several: bool, has_graph: bool) -> Inspection | None:
        """Return an inspection of the run that begins, if it is to have one.

        It has only if ``several`` micro-batches and partitions are at work at once.
        """
        self._callers.add(get_ident())
        self._runs += several
        is_due = several and self._runs & (self._runs - 1) == 0
        return Inspection(self, has_graph) if is_due else None

    def has_one_caller(self) -> bool:
        """Whether all runs so far have been called by one thread."""
        return len(self._callers) == 1

    def warn(self, found: list[_Key]) -> None:
        """Warn about ``found``, once."""
        self._runs = 0  # if the warning is an error, the next run is inspected and raises it again
        warnings.warn_explicit(self.message(found), SharedStateWarning, *_location(self.module))
        self._runs = 1
        self.warned.update(found)

    def refuse(self, found: list[_Key]) -> None:
        """Raise an error about tensors that are changed by one partition and used by another."""
        self._runs = 0
        raise RuntimeError(
            f"forward changes {self._names(found)} in one partition, and another one computes with "
            "it, for another micro-batch at the same time: values would depend on timing, and "
            "change for each micro-batch. Change it once per mini-batch, outside of forward, such "
            "as after optimizer.step()"
        )

    def _names(self, found: list[_Key]) -> str:
        return _names([self.module], found)

    def message(self, found: list[_Key]) -> str:
        """Return what is wrong with ``found``."""
        return (
            f"forward sets {self._names(found)} of the model before a cut, and the next "
            "micro-batch sets it again when the first is past that cut. Code there may read "
            "another micro-batch's value. Keep it in a local variable, return it from the layer, "
            "or hold it in a ContextVar. If nothing behind the cut reads it, ignore "
            "pipert.SharedStateWarning with warnings.filterwarnings"
        )


class Inspection:
    """Compares what the micro-batches of one run set on modules. Used by the run's threads."""

    def __init__(self, shared: SharedState, has_graph: bool) -> None:
        self._shared = shared
        self._has_graph = has_graph
        self._called = set[nn.Module]()  # in layers
        self._marks: dict[_Key, Any] = {}  # when the first micro-batch began its partition
        self._changed: dict[_Key, Any] = {}  # tensors, with their marks
        self._before: dict[_Key, Any] = {}
        self._set: dict[_Key, Any] = {}  # by the first micro-batch, with fingerprints
        self._set_again: dict[_Key, None] = {}  # by other micro-batches

    def begin(self, i: int, place: Place) -> None:
        """Note the state before the first micro-batch runs a partition that ends at a cut."""
        if i == 0 and not place.is_last:
            self._marks = _marks(self._shared.module)
            self._before = self._state(place.j)

    def note_call(self, layer: nn.Module) -> None:
        """Note that ``layer`` is about to be called."""
        self._called.update(modules_of(layer))

    def end(self, i: int, place: Place) -> None:
        """Note what is set when a micro-batch arrives at a cut or its end."""
        if i > 0:
            self._compare()
            if place.is_last and i == place.m - 1:
                self._warn()
        elif not place.is_last:
            self._note_changes(place.j)

    def _note_changes(self, j: int) -> None:
        marks, self._marks = self._marks, {}
        for key, now in _marks(self._shared.module).items():
            if marks.get(key, now) != now and key[0] not in self._called:
                self._changed.setdefault(key, now)
        before, self._before = self._before, {}
        state = self._state(j)
        for key in before.keys() | state.keys():
            if before.get(key) != state.get(key):
                self._set.setdefault(key, state.get(key))

    def _compare(self) -> None:
        """Note what has been set again by another micro-batch than the first."""
        for (module, name), first in items_of(self._set):
            if first != _current(module, name):
                self._set_again[module, name] = None

    def _warn(self) -> None:
        """Warn about attributes set again, once the last micro-batch has left the model.

        Warns:
            SharedStateWarning: once for each attribute. Where warnings are errors, in each run.

        Raises:
            RuntimeError: tensors of layers that another partition calls have been changed.
        """
        now = _marks(self._shared.module)
        again = [key for key, first in self._changed.items() if now.get(key) != first]
        in_layers = [key for key in again if key[0] in self._called]
        if in_layers and self._has_graph and self._shared.has_one_caller():
            self._shared.refuse(in_layers)
        self._set_again.update((key, None) for key in again if key[0] not in self._called)
        found = [key for key in self._found() if key not in self._shared.warned]
        if found:
            self._shared.warn(found)

    def _found(self) -> list[_Key]:
        return [key for key in self._set_again if not _is_made_for_use(*key)]

    def note(self) -> str:
        """Return what to add to an error of the run; empty if nothing was set again."""
        self._compare()
        found = self._found()
        return f"perhaps for this reason: {self._shared.message(found)}" if found else ""

    def _state(self, j: int) -> dict[_Key, Any]:
        """Take fingerprints of all attributes, except those of layers of earlier partitions.

        Other micro-batches may be in those layers: what they set temporarily must not be taken for
        a change by the first one.
        """
        homes = self._shared.homes
        return {
            (module, name): fingerprint(value)
            for module in modules_of(self._shared.module)
            if homes.get(module, j) >= j
            for name, value in _attributes(module)
        }


class LeftBehind:
    """Warns of tensors with a graph that forwards leave for their caller: the last micro-batch's.

    Like :class:`SharedState` it inspects calls 1, 2, 4, 8 and so on, of several micro-batches.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots, self._calls = roots, 0
        self._warned: set[_Key] = set()

    @contextmanager
    def inspecting(self, several: bool) -> Iterator[None]:
        """Warn of attributes that get a graph in the block, once each, if it is inspected."""
        self._calls += several
        if not several or self._calls & (self._calls - 1):
            yield
            return
        before = self._with_graph()
        yield
        new = [key for key, now in self._with_graph().items() if before.get(key) != now]
        found = [key for key in new if key not in self._warned and not _is_made_for_use(*key)]
        if found:
            calls, self._calls = self._calls, 0  # as in ``SharedState.warn``
            message = (
                f"forward leaves {_names(self._roots, found)} on the model, with a graph: of the "
                "last micro-batch alone. Return it from forward, or use chunks=1. If nobody reads "
                "it after the call, ignore pipert.SharedStateWarning with warnings.filterwarnings"
            )
            warnings.warn_explicit(message, SharedStateWarning, *_location(found[0][0]))
            self._calls = calls
            self._warned.update(found)

    def _with_graph(self) -> dict[_Key, Any]:
        return {
            (module, name): fingerprint(value)
            for root in self._roots
            for module in modules_of(root)
            for name, value in _attributes(module)
            if _has_graph(value)
        }


def _has_graph(value: Any, depth: int = 2) -> bool:
    if isinstance(value, list | tuple | dict) and depth:
        each = items_of(value) if isinstance(value, dict) else enumerate([*value])
        return any([_has_graph(item, depth - 1) for _, item in each])
    return isinstance(value, Tensor) and value.grad_fn is not None


def _names(roots: Iterable[nn.Module], found: list[_Key]) -> str:
    """Return the names of attributes."""
    paths = {module: path for root in roots for path, module in root.named_modules()}
    names = [f"{paths.get(module, '?')}.{name}".lstrip(".") for module, name in found]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(map(repr, names[:_MAX_NAMES]))}{more}"


def _marks(model: nn.Module) -> dict[_Key, Any]:
    """Return the version and the memory of each parameter and buffer.

    Those of norms are left out, which count their batches wherever they are called.
    """
    with WithoutFunctions():  # which would take copies
        return {
            (module, name): (version(tensor), memory_of(tensor))
            for module in modules_of(model)
            if not isinstance(module, NormBase)
            for registry in (module._parameters, module._buffers)
            for name, found in items_of(registry)
            if (tensor := original_of(found)) is not None and not is_lazy(tensor)
        }


def _current(module: nn.Module, name: str) -> Any:
    registries = [vars(module)[registry] for registry in _REGISTRIES]
    found = [d[name] for d in (vars(module), *registries) if name in d]
    return fingerprint(found[0]) if found else None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in items_of(vars(module)):
        if name in _REGISTRIES:
            yield from items_of(value)
        else:
            yield name, value


def _is_made_for_use(module: nn.Module, name: str) -> bool:
    """Return whether a hook sets the attribute right before the module reads it.

    The hooks of torch's weight norm and pruning do so. They hold the attribute's name.
    """
    hooks = list(forward_pre_hooks(module).values())
    names = [getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")]
    return any(type(found) is str and found == name for found in names)


def _location(module: nn.Module) -> tuple[str, int]:
    """Return the file and line of the model's ``forward``."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
