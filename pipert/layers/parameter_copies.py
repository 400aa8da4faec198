"""Copies of parameters that live on another device.

The standard way to tie weights over devices is one parameter per device, initialised alike, whose
gradients special code adds up. Here it stays one parameter. It lives on the device of the first
partition that uses it, its *owner*; every other device computes with a copy:

1. It is copied once per run and partition, in a call inside the graph. So the gradients of all
   micro-batches are summed there, copied back once, and added into the one ``.grad`` by autograd.
   In any model a buffer that layers on several devices share has a copy as well.
2. While a layer that uses the parameter runs, a :class:`Substitute` passes the copy to every torch
   function called with it. The modules are not touched: names, ``state_dict`` and other runs are
   unaffected. A change in place is refused, as the others would miss it.
3. A recomputation uses the copy of its forward.

A substitute reaches only torch functions: scripted functions, backward hooks and the recomputation
of ``torch.utils.checkpoint`` inside a layer get the parameter itself, on its own device. So does
``Function.apply``, which no mode sees; its graph is refused. So are compiled and scripted layers.
A hook that a layer registers on the parameter in its forward goes to the copy, and sees its
device's share alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from pipert._torch import AccumulateGrad, outputs_of, transforms
from pipert._typing import Value
from pipert.autograd.leaves import find_leaves
from pipert.batch.tensors import describe, differentiable, version
from pipert.layers.compiling import is_compiled
from pipert.layers.modules import modules_of
from pipert.recompute.snapshot import original_of

Weights = tuple[nn.Parameter, ...]
MakeCopy = Callable[[Tensor], Tensor]


def weights_elsewhere(
    partitions: Sequence[nn.Module], devices: Sequence[torch.device]
) -> tuple[Weights, ...]:
    """Returns the parameters that each partition uses but that live on another device.

    Determined in each run, since parameters may be replaced between runs: by loading with
    ``assign=True``, or by assigning one to a layer.
    """
    if len(set(devices)) < 2:
        return tuple(() for _ in partitions)
    owners: dict[nn.Parameter, torch.device] = {}
    found = []
    for partition, device in zip(partitions, devices, strict=True):
        parameters = tuple(partition.parameters())
        found.append(tuple(p for p in parameters if owners.setdefault(p, device) != device))
    return tuple(found)


class ParameterCopies:
    """The copies of parameters and buffers in one run. Those of a partition are used only there.

    Args:
        buffers: the ids of the buffers that layers of several partitions share.
    """

    def __init__(self, buffers: Collection[int] = ()) -> None:
        self._buffers = buffers
        self._versions: dict[int, int] = {}
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}
        self._substitutes: dict[tuple[Any, ...], Substitute | None] = {}
        self._has_looked = False  # at the graph of a micro-batch, which is once per run

    def note_versions(self, tensors: Iterable[Tensor]) -> None:
        """Note the versions of tensors that may get copies, when the run begins."""
        self._versions = {id(tensor): version(tensor) for tensor in tensors}

    def copy_of(self, tensor: Tensor, j: int, make: MakeCopy) -> Tensor:
        """Return the copy of a tensor in partition ``j``, which ``make`` makes."""
        key = j, id(tensor)
        if key not in self._copies:
            if transforms():
                raise RuntimeError(_TRANSFORMED)
            copy = make(tensor)
            self._copies[key] = tensor, copy, version(copy)
        return self._copies[key][1]

    def of_partition(self, j: int) -> list[Tensor]:
        """Return the copies that partition ``j`` computes with."""
        return [copy for (k, _), (_, copy, _) in [*self._copies.items()] if k == j]

    def tensors_of(self, *layers: nn.Module) -> list[Tensor]:
        """Return what may have copies of a called layer, and of the modules in its arguments."""
        found: list[Tensor] = []
        for k, layer in enumerate(layers):
            parts = modules_of(layer)
            found += [w for part in parts for w in part._parameters.values() if w is not None]
            if k or self._buffers:  # a recomputation puts clones in the place of buffers
                buffers = [b for part in parts for b in [*part._buffers.values()] if b is not None]
                originals = list(map(original_of, buffers))
                found += [buffer for buffer in originals if k or id(buffer) in self._buffers]
        return list({id(tensor): tensor for tensor in found}.values())

    def wrap(
        self, j: int, layers: Sequence[nn.Module], call: Callable[..., Any],
        make: Callable[[Tensor], object] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Return ``call``, made to use the copies of the tensors of ``layers`` in partition ``j``.

        These are the called layer, which must not be compiled, and the modules in its arguments.
        Before their first call in the partition, ``make`` gets each tensor, to copy it if needed;
        by default all copies have been made.
        """
        key = j, *layers
        if key not in self._substitutes:
            own = self.tensors_of(*layers)
            if make is not None:
                for tensor in own:
                    make(tensor)
            versions = self._versions
            used = [
                (x, self._copies[j, id(x)][1], versions.setdefault(id(x), version(x)))
                for x in own if (j, id(x)) in self._copies
            ]  # fmt: skip
            if used and is_compiled(layers[0]):
                raise ValueError(
                    "a layer is compiled or scripted and uses a parameter that lives on another "
                    "device, so it cannot receive the copy; put the layers that share it on one "
                    "device, or leave it uncompiled"
                )
            self._substitutes[key] = Substitute(used) if used else None
        substitute = self._substitutes[key]
        return call if substitute is None else partial(substitute.during, call)

    def are_changed(self) -> bool:
        """Return whether a copy was changed in place."""
        return any([version(copy) != before for _, copy, before in [*self._copies.values()]])

    def refuse_functions(self, y: Value) -> None:
        """Refuse a ``Function`` of the model's own code that got a parameter, not its copy."""
        if self._copies and not self._has_looked and torch.is_grad_enabled():
            copied = {id(weight) for weight, _, _ in [*self._copies.values()]}
            self._has_looked = _refuse_functions(y, copied)


class Substitute(TorchFunctionMode):
    """A function mode that passes copies to the torch functions called with tensors.

    It gets each parameter or buffer, its copy, and its version when the run began. Leaving the
    block raises ``RuntimeError`` if one of both was modified in place: the other would miss the
    change, or see it in no fixed order.
    """

    def __init__(self, copied: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        super().__init__()
        self._has_looked = False  # at the graph of a call, which is once per run
        self._copies = {id(tensor): copy for tensor, copy, _ in copied}
        self._watched = [(tensor, before) for tensor, _, before in copied]
        self._watched += [(copy, version(copy)) for _, copy, _ in copied]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DATA and id(args[0]) in self._copies:
            # Unlike ``data``, this shares the copy's version counter.
            return self._copies[id(args[0])].detach()
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copies.get(id(original_of(value)), value)
        if type(value) in (tuple, list):
            return type(value)(map(self._swap, value))
        if type(value) is dict:
            return {key: self._swap(item) for key, item in value.items()}
        return value

    def during(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``call(*args, **kwargs)`` with the copies."""
        given = () if self._has_looked else differentiable((args, kwargs))[0]
        begins = [x.grad_fn for x in given]
        with self:
            y = call(*args, **kwargs)
        self._has_looked = self._has_looked or _refuse_functions(y, self._copies, begins)
        return y

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None and any(version(tensor) != before for tensor, before in self._watched):
            raise RuntimeError(
                "a parameter or buffer that layers on several devices share was modified in place "
                "by one of them, which the others see at an uncertain time or never; choose a "
                "balance that puts the layers that share it on one device"
            )


def _refuse_functions(y: Value, copied: Container[int], stop: Iterable[Any] = ()) -> bool:
    """Refuse a graph in which a ``Function`` got a parameter of another device, not its copy.

    ``copied`` has the ids of parameters with copies; the nodes in ``stop`` are not visited. Returns
    whether there was a graph.
    """
    ends = [x.grad_fn for x in differentiable(y)[0] if x.grad_fn is not None]
    node: Any
    for node in find_leaves(ends, stop=stop).nodes:
        children = node.next_functions if issubclass(type(node), BackwardCFunction) else ()
        for weight in [child.variable for child, _ in children if type(child) is AccumulateGrad]:
            devices = [output.device for output in outputs_of(node)]
            if id(weight) in copied and devices and weight.device not in devices:
                raise RuntimeError(
                    f"{type(node).__name__.removesuffix('Backward')}, an autograd.Function, got a "
                    f"parameter ({describe(weight)}) of another device, shared by layers on both; "
                    "pass it weight.view_as(weight), which is a view of this device's copy, or "
                    "choose a balance that puts the layers that share it on one device"
                )
    return bool(ends)


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_TRANSFORMED = (
    "a transform of torch.func in a model's own code uses a parameter that lives on another device "
    "and cannot be given a copy in its place; use it before the transform as well"
)
