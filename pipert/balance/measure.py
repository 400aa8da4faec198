"""Measures one call of a layer: seconds, and bytes."""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipert._torch import weak_storage
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import objects_in, refuse_changes
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import leaves_behind
from pipert.autograd.order import edge_of
from pipert.autograd.weight_gradients import Deferral, DeferredGradients, compute_deferred
from pipert.balance.cost import Cost, Sizes, medians, total, without
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.model.calls import settled
from pipert.skip.routes import PartitionSkips
from pipert.skip.store import of_task

T = TypeVar("T")


class Storages:
    """Numbers the storages of one round; a copy has the number of what it was copied from."""

    def __init__(self) -> None:
        self._known = dict[int, Any]()  # weak references, so that no address comes again
        self._same = dict[int, int]()

    def sizes(self, value: Value) -> dict[int, int]:
        """Return the bytes behind the tensors of a value."""
        storages = [tensor.untyped_storage() for tensor in tensors_of(value)[0]]
        each = {self._number(storage): storage.nbytes() for storage in storages}
        found = dict[int, int]()
        for key, size in each.items():
            number = self._same.get(key, key)
            found[number] = found.get(number, 0) + size
        return found

    def copied(self, value: Value) -> Value:
        """Return a copy of a value, as a part of the graph where it requires grad."""
        tensors, rebuild = tensors_of(value)
        copies = tuple([tensor.clone() for tensor in tensors])
        for made, tensor in zip(copies, tensors, strict=True):
            key = self._number(tensor.untyped_storage())
            self._same[self._number(made.untyped_storage())] = self._same.get(key, key)
        return rebuild(copies)

    def alive(self, sizes: Sizes) -> dict[int, int]:
        """Return the sizes of storages that are still there."""
        return {key: size for key, size in sizes.items() if not self._known[key].expired()}

    def _number(self, storage: torch.UntypedStorage) -> int:
        known = weak_storage(storage)
        self._known.setdefault(known.cdata, known)
        return int(known.cdata)


class Call(NamedTuple):
    """One call of a layer, to be measured."""

    original: nn.Module
    layer: nn.Module
    """A copy, on ``device``."""
    device: torch.device
    inputs: Carried
    """Its :class:`Arguments`, and the values of the skips that it pops."""
    skips: PartitionSkips
    """The skips that it stashes and pops."""
    storages: Storages

    def fresh_inputs(self) -> Carried:
        """Return the inputs for one forward: not leaves, so that the layer may work in place."""
        inputs: Carried = self.storages.copied(settled(self.inputs, self.device))
        return inputs

    def forward(self, inputs: Carried) -> Carried:
        """Run the layer; return its output and the values stashed for later layers."""
        return contextvars.copy_context().run(self._forward, inputs)

    def _forward(self, inputs: Carried) -> Carried:
        store = self.skips.store(self.skips.entries(inputs.skips))
        of_task.set(store)
        args, kwargs = inputs.value
        output = self.layer(*args, **kwargs)
        return Carried(output, tuple([store.send(key) for key, _ in self.skips.leaving]))

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Classes, settings and shapes of the layer, and of its inputs."""
        modules = tuple([(type(each), *_settings(each)) for each in self.original.modules()])
        args, kwargs = self.inputs.value
        constants = [value for value in (*args, *kwargs.values()) if isinstance(value, _CONSTANT)]
        found = tensors_of([*self.original.parameters(), *self.original.buffers(), self.inputs])[0]
        shapes = [(each.shape, each.dtype, each.requires_grad) for each in found]
        memory = self.storages.sizes(self.inputs).values()
        return ((modules, *shapes, *memory, *map(repr, constants)),)


_CONSTANT = bool | int | float | str
_OF_EACH = {*vars(nn.Module()), *dir(nn.Module)} - {"training", "forward"}
_PLACE = re.compile(r"(^|_)(idx|index|id|number)$")
"""Attributes that tell a layer which one of several it is, such as ``layer_idx``."""


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module has beside parameters, buffers, modules and hooks."""
    for name, value in vars(module).items():
        if name not in _OF_EACH and not _PLACE.search(name):
            is_tensor = isinstance(value, Tensor)
            yield name, str((value.shape, value.dtype)) if is_tensor else repr(value)


Measured = Callable[[Call], tuple[Cost, Carried]]


def once_for_equal(measure: Measured) -> Measured:
    """Return ``measure`` for layers unlike those before; of equal ones only sizes are counted."""
    known, fresh = dict[Hashable, Cost](), count(-1, -1)

    def measured(call: Call) -> tuple[Cost, Carried]:
        kind = call.kind
        if kind not in known:
            known[kind], output = measure(call)
            return known[kind], output
        like = known[kind]
        own, output = measure_sizes(call)
        names = "inputs", "outputs", "saved"
        keys = [[*chain(*[getattr(cost, name) for name in names])] for cost in (like, own)]
        same = dict(zip(*keys, strict=False))
        later = {same.get(key, next(fresh)): size for key, size in like.later.items()}
        found = {name: getattr(own, name) for name in (*names, "parameters", "trained")}
        return like._replace(**found, later=later), output

    return measured


def repeated(measure: Callable[[], Sequence[Cost]], timeout: float) -> list[float]:
    """Call ``measure``, once or more, for ``timeout`` seconds; return medians of its times."""
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    deadline = perf_counter() + timeout
    rounds = [measure()]
    while perf_counter() < deadline:
        rounds.append(measure())
    return [cost.seconds for cost in medians(rounds)]


def time_once(call: Call) -> tuple[Cost, Carried]:
    """Measure times, computing once: arguments may remember it, as a cache of keys does."""
    inputs = call.fresh_inputs()
    output, forward, _ = _metered(call.device, partial(call.forward, inputs), False)
    backward, _ = _backward(call, inputs, output, counts_bytes=False)
    return Cost(forward, backward, kind=call.kind), output


def time_warm(call: Call) -> tuple[Cost, Carried]:
    """Measure times, after a first time to warm up."""
    time_once(call)
    return time_once(call)


def _backward(
    call: Call, inputs: Carried, output: Carried, counts_bytes: bool = True
) -> tuple[float, int]:
    """Measure a backward to the inputs and parameters that need a gradient."""
    roots, _ = differentiable(output)
    leaves = [parameter for parameter in call.layer.parameters() if parameter.requires_grad]
    wanted = [*differentiable(inputs)[0], *leaves]
    if not roots or not wanted:
        return 0.0, 0
    ones = [torch.ones_like(root) for root in roots]
    # Only to these: a cache may lead to other layers, whose backward has already run.
    run = partial(torch.autograd.grad, roots, wanted, ones, allow_unused=True)
    return _metered(call.device, run, counts_bytes)[1:]


def measure_sizes(call: Call) -> tuple[Cost, Carried]:
    """Count what a forward takes, makes and saves."""
    inputs, saved, sizes = call.fresh_inputs(), list[Tensor](), call.storages.sizes
    with collecting_saved(saved):
        output = call.forward(inputs)
    weights = sizes([*call.layer.parameters(), *call.layer.buffers()])
    cost = Cost(
        inputs=sizes(inputs),
        outputs=sizes(output),
        saved=without(sizes(saved), weights),
        kind=call.kind,
        **weights_of(call.original),
    )
    return cost, output


def measure_all(call: Call) -> tuple[Cost, Carried]:
    """Measure times, sizes and peaks.

    Raises:
        RuntimeError: the layer changes an argument, and could not be recomputed.
    """
    args, kwargs = call.inputs.value
    objects = objects_in([*args, *kwargs.values()])
    cost, output = measure_sizes(call)
    refuse_changes(objects)  # before it is called again
    return medians([[_measure_peaks(call, cost)] for _ in range(3)])[0], output


def _measure_peaks(call: Call, cost: Cost) -> Cost:
    """Measure times and peaks of a layer whose sizes are known."""
    inputs = call.fresh_inputs()
    again, forward, forward_extra = _metered(call.device, partial(call.forward, inputs))
    backward, backward_extra = _backward(call, inputs, again)
    del again
    inputs = call.fresh_inputs()
    roots, _ = differentiable(call.forward(inputs))
    ones = [torch.ones_like(root) for root in roots]
    uses, split, split_extra = _metered(call.device, partial(_defer, inputs, roots, ones))
    sizes = call.storages.sizes
    weights = sizes([*call.layer.parameters(), *call.layer.buffers()])
    arriving = sizes([use.dy for use in uses])
    later = without({**sizes([use.x for use in uses]), **arriving}, weights)
    deferred = sum({id(leaf): leaf.nbytes for use in uses for leaf in use.leaves}.values())
    _, weight, _ = _metered(call.device, partial(compute_deferred, uses))
    made = without(cost.outputs, cost.inputs)
    if call.device.type != "cuda":  # nobody counts
        forward_extra = total(made) + total(without(cost.saved, cost.inputs, made))
        backward_extra = total(cost.inputs) + total(cost.trained)
        split_extra = backward_extra - deferred + total(arriving)
    before = total(cost.saved) + total(cost.outputs)
    return cost._replace(
        forward=forward,
        backward=backward,
        split=split,
        weight=weight,
        deferred=deferred,
        later=later,
        forward_peak=total(cost.inputs) + forward_extra,
        layer_peak=total(cost.inputs) + forward_extra,
        backward_peak=before + backward_extra,
        split_peak=before + split_extra,
    )


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Return the bytes of parameters and buffers, and of those that are trained."""
    weights = [*module.parameters(), *module.buffers()]
    return {
        "parameters": {id(tensor): tensor.nbytes for tensor in weights},
        "trained": {id(tensor): tensor.nbytes for tensor in weights if tensor.requires_grad},
    }


def _defer(
    inputs: Carried, roots: Sequence[Tensor], ones: Sequence[Tensor]
) -> list[DeferredGradients]:
    """Differentiate a layer, except for the gradients that can be deferred; return these."""
    if not roots:
        return []
    edges = [edge_of(root) for root in roots]
    nodes = [edge.node for edge in edges]
    put_off = Deferral(leaves_behind(nodes), nodes)
    wanted = [*differentiable(inputs)[0], *put_off.leaves]

    def run(wanted: Sequence[Any], ys: Sequence[Any], dys: Sequence[Tensor]) -> Any:
        return differentiate(ys, wanted, dys)

    return put_off.differentiate(run, wanted, edges, ones)[1]


def _metered(
    device: torch.device, run: Callable[[], T], counts_bytes: bool = True
) -> tuple[T, float, int]:
    """Run; return the result, the seconds, and on a GPU the peak of bytes beyond those before."""
    counts_bytes, before = counts_bytes and device.type == "cuda", 0
    if counts_bytes:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin = now(device)
    result = run()
    seconds = now(device) - begin
    return result, seconds, torch.cuda.max_memory_allocated(device) - before if counts_bytes else 0


def now(device: torch.device) -> float:
    """Wait until the device is idle, then read the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


@contextlib.contextmanager
def collecting_saved(found: list[Tensor]) -> Iterator[None]:
    """Collect the tensors that are saved for the backward."""

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return found[-1]  # an output itself would keep its graph, which keeps the output

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


A = TypeVar("A")
R = TypeVar("R")


@contextlib.contextmanager
def counting(what: str, measure: Callable[[A], R]) -> Iterator[Callable[[A], R]]:
    """Yield ``measure``, whose calls a bar counts: with tqdm, if it is there, on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield measure
        return
    with import_module("tqdm").tqdm(desc=what, unit=" layers", leave=False) as bar:

        def counted(call: A) -> R:
            found = measure(call)
            bar.update()
            return found

        yield counted
