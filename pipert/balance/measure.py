"""Measures one call of a layer: seconds and bytes.

Bytes are counted, tensor by tensor, by the storage behind each. What several layers share counts
once when the costs of consecutive layers are joined.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipert._torch import pytree, weak_storage
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import objects_in, refuse_changes
from pipert.autograd.leaves import find_leaves
from pipert.autograd.order import edge_of
from pipert.autograd.weight_gradients import DeferredGradients, compute_deferred, defer_weights
from pipert.balance.counted import counted_seconds
from pipert.batch.tensors import differentiable, tensors_of
from pipert.model.calls import settled
from pipert.skip.store import Carried, Store, of_task, parts_of

T = TypeVar("T")

Sizes = Mapping[int, int]
"""Bytes by a number of each storage, or tensor, so that what several layers share counts once."""


def total(sizes: Sizes) -> int:
    """Return the sum of the bytes."""
    return sum(sizes.values())


def without(sizes: Sizes, *others: Iterable[int]) -> dict[int, int]:
    """Return the sizes whose numbers are in none of the others."""
    known = set[int]().union(*others)
    return {key: size for key, size in sizes.items() if key not in known}


class Cost(NamedTuple):
    """Seconds and bytes of a layer, a block or a partition for one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    """Seconds of the backward with all gradients."""
    split: float = 0.0
    """Seconds of the backward when gradients of weights are deferred."""
    weight: float = 0.0
    """Seconds of the deferred gradients."""
    parameters: Sizes = {}
    """Parameters and buffers."""
    trained: Sizes = {}
    """Parameters that require grad."""
    inputs: Sizes = {}
    """Values from before: arguments, popped skips, and what the model's own code uses."""
    outputs: Sizes = {}
    """Values for later layers, stashed skips included."""
    saved: Sizes = {}
    """What the backward needs, without weights."""
    kept: Sizes = {}
    """The part of ``saved`` that is not recomputed: of the model's own code, and of the loss."""
    deferred: int = 0
    """Bytes that are kept for the gradients that can be deferred."""

    @property
    def seconds(self) -> float:
        """The time of the forward and the backward."""
        return self.forward + self.backward

    def with_times(self, other: Cost) -> Cost:
        """Return these sizes with the times of another."""
        times = {name: getattr(other, name) for name in (*_TIMES, "deferred")}
        return self._replace(**times)


def joined(costs: Sequence[Cost]) -> Cost:
    """Return the cost of consecutive layers, one or more."""

    def added(a: Any, b: Any) -> Any:
        return {**a, **b} if isinstance(a, dict) else a + b

    found = costs[0]
    for later in costs[1:]:
        inputs = {**found.inputs, **without(later.inputs, found.outputs)}
        found = Cost(*map(added, found, later))._replace(inputs=inputs)
    return found


Blocks = dict[str, Cost]
"""The costs of blocks, by the name of the layer with which each begins."""
_TIMES = "forward", "backward", "split", "weight"


def medians(rounds: Sequence[Blocks]) -> Blocks:
    """Return the first round's costs, with the median times of all."""
    return {
        name: cost._replace(**{
            time: median([getattr(each[name], time) for each in rounds]) for time in _TIMES
        })
        for name, cost in rounds[0].items()
    }


def repeated(measure: Callable[[], Blocks], timeout: float) -> list[float]:
    """Call ``measure``, once or more, for ``timeout`` seconds; return medians of its times."""
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    deadline = perf_counter() + timeout
    rounds = [measure()]
    while perf_counter() < deadline:
        rounds.append(measure())
    return [cost.seconds for cost in medians(rounds).values()]


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

    def _number(self, storage: torch.UntypedStorage) -> int:
        known = weak_storage(storage)
        self._known.setdefault(known.cdata, known)
        return int(known.cdata)


class MeasuredCall(NamedTuple):
    """One call of a layer, to be measured."""

    original: nn.Module
    layer: nn.Module
    """A copy, on ``device``."""
    device: torch.device
    inputs: Carried
    """Its :class:`Arguments`, and the values of the skips that it pops."""
    storages: Storages

    def fresh_inputs(self) -> tuple[Carried, Carried]:
        """Return leaves, and copies of them for one forward, which may work in place."""
        leaves: Carried = settled(self.inputs, self.device)
        return leaves, self.storages.copied(leaves)

    def forward(self, inputs: Carried) -> Carried:
        """Run the layer; return its output and the values stashed for later layers."""
        return contextvars.copy_context().run(self._forward, inputs)

    def _forward(self, inputs: Carried) -> Carried:
        of_task.set(store := Store(inputs.skips))
        args, kwargs = inputs.value
        output = self.layer(*args, **kwargs)
        return Carried(output, store.skips())

    @property
    def weights(self) -> Sizes:
        """The copy's parameters and buffers."""
        return self.storages.sizes([*self.layer.parameters(), *self.layer.buffers()])

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Classes, settings and shapes of the layer, and of its inputs."""
        modules = tuple([(type(each), *_settings(each)) for each in self.original.modules()])
        args, kwargs = self.inputs.value
        constants = [value for value in (*args, *kwargs.values()) if isinstance(value, _CONSTANT)]
        found = tensors_of([*self.original.parameters(), *self.original.buffers(), self.inputs])[0]
        shapes = [(each.shape, each.dtype, each.requires_grad) for each in found]
        memory = self.storages.sizes(self.inputs).values()
        return (modules, *shapes, *memory, *map(repr, constants))


_CONSTANT = bool | int | float | str
_OF_EACH = {*vars(nn.Module()), *dir(nn.Module)} - {"training", "forward"}
_PLACE = re.compile(r"(^|_)(idx|index|id|number)$")
"""Attributes that tell a layer which one of several it is, such as ``layer_idx``."""
_PLACE_IN_NAME = re.compile(r"\.\d+\.")
"""The same in a name that a layer remembers, such as ``layers.3.mlp``, as peft's do."""


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module has beside parameters, buffers, modules and hooks."""
    for name, value in vars(module).items():
        if name not in _OF_EACH and not _PLACE.search(name):
            is_tensor = isinstance(value, Tensor)
            setting = (value.shape, value.dtype) if is_tensor else value
            yield name, _PLACE_IN_NAME.sub(".N.", repr(setting))


Measure = Callable[[MeasuredCall], tuple[Cost, Carried]]
"""Returns the cost of a call, and its output."""


def once_for_equal(measure: Measure) -> Measure:
    """Return ``measure`` for layers unlike those before; of equal ones only sizes are counted."""
    known = dict[Hashable, Cost]()

    def measured(call: MeasuredCall) -> tuple[Cost, Carried]:
        kind = call.kind
        if kind not in known:
            known[kind], output = measure(call)
            return known[kind], output
        own, output = measure_sizes(call)
        return own.with_times(known[kind]), output

    return measured


def time_once(call: MeasuredCall, is_split: bool = False) -> tuple[Cost, Carried]:
    """Measure times, computing once: arguments may remember it, as a cache of keys does.

    If ``is_split``, also those of gradients that are deferred, and count what these need.
    """
    leaves, inputs = call.fresh_inputs()
    output, forward = _timed(call.device, partial(call.forward, inputs))
    # A tensor that is stashed as well has two gradients.
    roots = [root for part in parts_of(output) for root in differentiable(part)[0]]
    parameters = [parameter for parameter in call.layer.parameters() if parameter.requires_grad]
    wanted = [*differentiable(leaves)[0], *parameters]
    if not roots or not wanted:
        return Cost(forward), output
    ones = [torch.ones_like(root) for root in roots]
    # Only to these: a cache may lead to other layers, whose backward has already run.
    options: Any = {"allow_unused": True, "retain_graph": is_split}
    run = partial(torch.autograd.grad, roots, wanted, ones, **options)
    _, backward = _timed(call.device, run)
    if not is_split:
        return Cost(forward, backward), output
    edges, uses = [edge_of(root) for root in roots], list[DeferredGradients]()
    reachable = find_leaves([edge.node for edge in edges])
    defer = partial(defer_weights, edges, differentiable(leaves)[0], ones, reachable, uses)
    _, split = _timed(call.device, defer)
    deferred = total(without(call.storages.sizes([(use.x, use.dy) for use in uses]), call.weights))
    _, weight = _timed(call.device, partial(compute_deferred, uses))
    return Cost(forward, backward, split, weight, deferred=deferred), output


def time_warm(call: MeasuredCall) -> tuple[Cost, Carried]:
    """Measure times, after a first time to warm up."""
    time_once(call)
    return time_once(call)


def measure_sizes(call: MeasuredCall) -> tuple[Cost, Carried]:
    """Count what a forward takes, makes and saves."""
    (_, inputs), saved, sizes = call.fresh_inputs(), list[Tensor](), call.storages.sizes
    with collecting_saved(saved):
        output = call.forward(inputs)
    cost = Cost(
        inputs=sizes(inputs),
        outputs=sizes(output),
        saved=without(sizes(saved), call.weights),
        **weights_of(call.original),
    )
    return cost, output


def measure_all(call: MeasuredCall) -> tuple[Cost, Carried]:
    """Measure sizes and times.

    Raises:
        RuntimeError: the layer changes an argument, and could not be recomputed.
    """
    args, kwargs = call.inputs.value
    objects = objects_in([*args, *kwargs.values()])
    cost, output = measure_sizes(call)
    refuse_changes(objects)  # before it is called again
    context = contextvars.copy_context()
    for variable, value in [*context.items()]:  # hooks may collect outputs there
        context.run(variable.set, pytree.tree_map(lambda leaf: leaf, value))
    times, _ = context.run(time_once, call, True)
    return cost.with_times(times), output


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Return the bytes of parameters and buffers, and of those that are trained."""
    weights = [*module.parameters(), *module.buffers()]
    return {
        "parameters": {id(tensor): tensor.nbytes for tensor in weights},
        "trained": {id(tensor): tensor.nbytes for tensor in weights if tensor.requires_grad},
    }


def _timed(device: torch.device, run: Callable[[], T]) -> tuple[T, float]:
    """Run; return the result and the seconds."""
    begin = now(device)
    result = run()
    return result, now(device) - begin


def now(device: torch.device) -> float:
    """Wait until the device is idle, then read the clock, or what was counted on meta."""
    if device.type == "meta" and (counted := counted_seconds()) is not None:
        return counted
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
