"""Measures what each layer costs for one micro-batch: seconds, and bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from statistics import median
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipert._torch import storage_of
from pipert._typing import Device, Value
from pipert.any_model.argument_objects import objects_in, refuse_changes
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import leaves_behind
from pipert.autograd.weight_gradients import Later, PutOff, compute_later
from pipert.balance.by_time import now
from pipert.balance.call_times import measure_calls
from pipert.balance.probe import Probe, collecting_saved, probe_layers, storages
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.skip.namespace import Key

__all__: list[str] = []


class LayerCost(NamedTuple):
    """What a layer costs for one micro-batch: seconds, and bytes."""

    forward: float
    backward: float
    """With all gradients."""
    split: float
    """Of a backward that puts off what it can."""
    weight: float = 0.0
    """Of what that has put off."""
    parameters: int = 0
    """Of its parameters and buffers, except those of an earlier layer."""
    trained: int = 0
    """Of those that require grad."""
    largest: int = 0
    """Of the largest one that requires grad."""
    put_off: int = 0
    """Of the gradients that can be put off."""
    given: int = 0
    """Of its input."""
    made: int = 0
    """Of its output, unless that is memory of the input."""
    saves_input: bool = False
    """Whether its backward needs its input."""
    saves_output: bool = False
    """Whether its backward needs its output."""
    saved: int = 0
    """Of what it saves besides these."""
    later: int = 0
    """Of what is kept from ``B`` to ``W`` for the gradients that are put off."""
    forward_extra: int = 0
    """The peak of its forward, beyond its input."""
    quiet_extra: int = 0
    """The peak of a forward that saves nothing, beyond its input."""
    backward_extra: int = 0
    """The peak of its backward, beyond what it has saved and the gradient of its output."""
    split_extra: int = 0
    """The same, of a backward that puts off what it can."""
    stashed: Mapping[Key, tuple[int, int]] = {}
    """Of each skip that it stashes: all bytes, and those of memory beside what it saves and makes.
    """
    popped: Mapping[Key, int] = {}
    """Of each skip that it pops, if its backward needs that; else 0."""
    kept: int = 0
    """What stays of a recomputed micro-batch, beside the input of its partition."""


def layer_costs(module: nn.Sequential, value: Value, device: Device | None) -> list[LayerCost]:
    """Measure each layer for the micro-batch ``value``, on copies, as :func:`.layer_times` does."""
    _, *rounds = [probe_layers(module, value, device, _Measure()) for _ in range(1 + _ROUNDS)]
    return _medians(rounds)


def block_costs(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    begins: Sequence[str],
    example: Arguments,
    device: torch.device,
    loss: Callable[[Value], object],
) -> list[list[LayerCost]]:
    """Measure each block of a model, see :func:`.measure_calls`; ``loss`` belongs to the last one.

    A block that this micro-batch does not call, such as an expert, has no costs: it is in another.

    Of a recomputed micro-batch the inputs of all layers stay, and what the model's own code saves.
    """

    given: list[Value] = []  # the arguments of the last call, alive, since they are compared

    def measure(probe: Probe) -> tuple[LayerCost, Carried]:
        flows.enter_layer(probe)
        args, kwargs = probe.carried.value
        shared = storages(given)  # such as a mask, which stays once for all layers
        given[:] = [args, kwargs]
        kept = sum(t.nbytes for t in tensors_of(given)[0] if storage_of(t) not in shared)
        objects = objects_in([*args, *kwargs.values()])
        probe.forward(probe.inputs())
        refuse_changes(objects)  # before it is called again
        cost, output = measured(probe)
        flows.is_paused = False
        return cost._replace(kept=kept), output

    rounds, flows = [], _Flows({layers[name]: k for k, name in enumerate(begins)})
    for k in range(1 + _ROUNDS):
        given.clear()
        measured = _Measure()
        with _without_caches(model), flows if k == 0 else contextlib.nullcontext():
            each = measure_calls(model, layers, begins, example, device, measure, _own_code, loss)
        rounds.append(each)
    costs = [_medians([found.get(name, []) for found in rounds[1:]]) for name in begins]
    sizes = measured.sizes_of(model)  # what belongs to no layer that was called
    next(filter(None, costs)).insert(0, _own_code(0.0)._replace(**sizes))
    for (key, size, k), used in flows.used.items():
        costs[k][-1] = costs[k][-1]._replace(stashed={**costs[k][-1].stashed, key: (size, 0)})
        for j in used:
            costs[j][-1] = costs[j][-1]._replace(popped={**costs[j][-1].popped, key: 0})
    return costs


class _Flows(TorchFunctionMode):
    """Notes which tensors the model's own code uses in later blocks than that which made them.

    Operations of layers are not looked at. A tensor without a maker is the caller's, or a weight.
    """

    def __init__(self, begins: Mapping[nn.Module, int]) -> None:
        super().__init__()
        self.is_paused, self._begins, self._block = False, begins, 0
        self._made = dict[int, tuple[ref[Tensor], tuple[Key, int, int]]]()
        """By storage, which may come again: the tensor; and a key, the bytes, and the block."""
        self.used = dict[tuple[Key, int, int], set[int]]()
        """The later blocks, but for those of whose layers it is an argument."""
        self._given, self._numbers = set[int](), count()

    def enter_layer(self, probe: Probe) -> None:
        """Pause; a block may begin, with the inputs of its layer."""
        begun = self._begins.get(probe.original, 0)
        if begun > self._block:
            self._block, self._given = begun, set()
        self._given |= storages(probe.carried.value).keys()
        self.is_paused = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **kwargs or {})
        if not self.is_paused and (made := storages(output)):  # else it looks at a shape
            given = storages([args, kwargs])
            for storage in given.keys() & self._made.keys() - self._given:
                is_there, flow = self._made[storage]
                if is_there() is not None and flow[2] < self._block:
                    self.used.setdefault(flow, set()).add(self._block)
            for tensor in tensors_of(output)[0]:
                if (storage := storage_of(tensor)) not in given:
                    key = None, str(next(self._numbers))
                    self._made[storage] = ref(tensor), (key, made[storage], self._block)
        return output


@contextlib.contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Let models of transformers make no cache by default, as in a pipe that recomputes."""
    configs = [vars(module).get("config") for module in model.modules()]
    ones = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in ones:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config in ones:
            config.use_cache = True  # type: ignore[union-attr]


_ROUNDS = 3
"""How often times are measured, after a first time to warm up."""


def _medians(rounds: Sequence[Sequence[LayerCost]]) -> list[LayerCost]:
    times = "forward", "backward", "split", "weight"
    return [
        each[0]._replace(**{name: median([getattr(cost, name) for cost in each]) for name in times})
        for each in zip(*rounds, strict=True)
    ]


def _own_code(seconds: float, saved: int = 0, made: int = 0, saved_made: int = 0) -> LayerCost:
    """Return the cost of code between layers; its backward takes twice as long."""
    return LayerCost(
        forward=seconds,
        backward=2 * seconds,
        split=2 * seconds,
        made=made,
        saves_output=saved_made > 0,
        saved=saved,
        kept=saved,
        forward_extra=saved,
        backward_extra=saved,
        split_extra=saved,
    )


class _Measure:
    """Measures layers one by one."""

    def __init__(self) -> None:
        self._known = set[Tensor]()

    def __call__(self, probe: Probe) -> tuple[LayerCost, Carried]:
        cost, output = _measure(probe)
        return cost._replace(**self.sizes_of(probe.original)), output

    def sizes_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the bytes of parameters and buffers that no earlier layer has."""
        own = {*module.parameters(), *module.buffers()} - self._known
        self._known |= own
        trained = [tensor.nbytes for tensor in own if tensor.requires_grad]
        return {
            "parameters": sum(tensor.nbytes for tensor in own),
            "trained": sum(trained),
            "largest": max(trained, default=0),
        }


def _measure(probe: Probe) -> tuple[LayerCost, Carried]:
    sizes, output = _sizes(probe)
    inputs = probe.inputs()
    meter = _Meter(probe.device)
    with torch.no_grad():
        probe.forward(inputs)
    _, quiet_extra = meter.read()
    inputs = probe.inputs()
    meter = _Meter(probe.device)
    again = probe.forward(inputs)
    forward, forward_extra = meter.read()
    roots, _ = differentiable(again)
    ones = [torch.ones_like(root) for root in roots]
    wanted = [*differentiable(inputs)[0], *[p for p in probe.layer.parameters() if p.requires_grad]]
    del again
    meter = _Meter(probe.device)
    if roots and wanted:
        torch.autograd.grad(roots, wanted, ones, allow_unused=True)
    backward, backward_extra = meter.read()
    inputs = probe.inputs()
    roots, _ = differentiable(probe.forward(inputs))
    ones = [torch.ones_like(root) for root in roots]
    meter = _Meter(probe.device)
    later = _go_back(inputs, roots, ones)
    split, split_extra = meter.read()
    weights = storages([*probe.layer.parameters(), *probe.layer.buffers()])
    kept = storages([tensor for use in later for tensor in (use.x.tensor, use.dy.tensor)])
    put_off = {id(leaf): leaf.nbytes for use in later for leaf in use.leaves}
    meter = _Meter(probe.device)
    compute_later(later)
    weight, _ = meter.read()
    if probe.device.type != "cuda":  # nobody counts
        forward_extra = sizes["made"] + sizes["saved"]
        quiet_extra = sizes["made"]
        arriving = sum(storages([use.dy.tensor for use in later]).values())
        trained = sum(p.nbytes for p in probe.layer.parameters() if p.requires_grad)
        backward_extra = sizes["given"] + trained
        split_extra = backward_extra - sum(put_off.values()) + arriving
    cost = LayerCost(
        forward=forward,
        backward=backward,
        split=split,
        weight=weight,
        forward_extra=forward_extra,
        quiet_extra=quiet_extra,
        backward_extra=backward_extra,
        split_extra=split_extra,
        put_off=sum(put_off.values()),
        later=sum(size for key, size in kept.items() if key not in weights),
        **sizes,
    )
    return cost, output


def _sizes(probe: Probe) -> tuple[dict[str, Any], Carried]:
    """Return the sizes of what a forward leaves, and its output."""
    inputs = probe.inputs()
    with collecting_saved() as found:
        output = probe.forward(inputs)
    saved = storages(found)
    arrived, made = storages(inputs), storages(output.value)
    known = {*arrived, *made, *storages([*probe.layer.parameters(), *probe.layer.buffers()])}
    skips = zip(probe.skips.leaving, output.skips, strict=True)
    popped = zip(probe.skips.arriving, inputs.skips, strict=True)
    sizes = {
        "stashed": {key: _stashed(storages(skip), {**saved, **made}) for (key, _), skip in skips},
        "popped": {
            key: sum(size for storage, size in storages(skip).items() if storage in saved)
            for (key, _), skip in popped
        },
        "given": sum(storages(inputs.value).values()),
        "made": sum(size for key, size in made.items() if key not in arrived),
        "saves_input": not saved.keys().isdisjoint(storages(inputs.value)),
        "saves_output": not saved.keys().isdisjoint(made),
        "saved": sum(size for key, size in saved.items() if key not in known),
    }
    return sizes, output


class _Meter:
    """Measures seconds, and on a GPU the peak of bytes beyond those at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._bytes = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._bytes = torch.cuda.memory_allocated(device)
        self._begin = now(device)

    def read(self) -> tuple[float, int]:
        seconds = now(self._device) - self._begin
        if self._device.type != "cuda":
            return seconds, 0
        return seconds, torch.cuda.max_memory_allocated(self._device) - self._bytes


def _go_back(inputs: Carried, roots: Sequence[Tensor], ones: Sequence[Tensor]) -> list[Later]:
    """Differentiate a layer, except for what can be put off, which is returned."""
    if not roots:
        return []
    edges = [get_gradient_edge(root) for root in roots]
    ends = [edge.node for edge in edges]
    put_off = PutOff(leaves_behind(ends), ends)
    wanted = [*differentiable(inputs)[0], *put_off.leaves]

    def run(wanted: Sequence[Any], ys: Sequence[Any], dys: Sequence[Tensor]) -> Any:
        return differentiate(ys, wanted, dys)

    _, later = put_off.differentiate(run, wanted, edges, ones)
    return later


def _stashed(skip: dict[int, int], saved: dict[int, int]) -> tuple[int, int]:
    return sum(skip.values()), sum(b for key, b in skip.items() if key not in saved)
