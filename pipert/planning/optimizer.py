"""Measures the memory of an optimizer: its state, and what its step needs for a moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipert._torch import DispatchMode, pytree, storage_of, weak_storage
from pipert.batch.tensors import tensors_of

_SIZE = 64 * 64 * 4  # bytes of a small parameter


class OptimizerMemory(NamedTuple):
    """Bytes of an optimizer for each byte of the trained parameters on a device."""

    state: float = 0.0
    step: float = 0.0
    """What a step needs beside the state, as one that takes all parameters at once does."""
    of_largest: float = 0.0
    """What it needs beside that for each byte of the largest parameter."""


def optimizer_memory(
    optimizer: Optimizer | Callable[..., Optimizer] | None, on_gpus: bool
) -> OptimizerMemory:
    """Measure the state of small parameters, and the peak of their second step, on the CPU.

    Optimizers of torch take all parameters at once on GPUs, if they are not told otherwise.
    """
    if optimizer is None:
        return OptimizerMemory()
    state, one, two = 0.0, 0.0, 0.0
    for count in (2, 3):  # what one parameter leaves for a moment, the next one finds
        parameters = [nn.Parameter(torch.zeros(64, 64)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        small = _with(optimizer, parameters)
        for group in small.param_groups:
            if on_gpus and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
        small.step()
        with _Peak() as peak:
            small.step()
        one, two = two, peak.most / _SIZE
        known = optimizer if isinstance(optimizer, Optimizer) and optimizer.state else small
        tensors = tensors_of([[*values.values()] for values in known.state.values()])[0]
        state = sum([each.nbytes for each in tensors]) / sum([p.nbytes for p in known.state] or [1])
    return OptimizerMemory(state, two - one, one - 2 * (two - one))


def _with(
    optimizer: Optimizer | Callable[..., Optimizer], parameters: list[nn.Parameter]
) -> Optimizer:
    """Return an optimizer like this one, with other parameters."""
    if not isinstance(optimizer, Optimizer):
        return optimizer(parameters)
    small = copy(optimizer)
    small.state, small.param_groups = defaultdict(dict), []
    small.add_param_group({**optimizer.param_groups[0], "params": parameters})
    for like, values in [*optimizer.state.items()][:1]:  # which some make before the first step
        for parameter in parameters:
            small.state[parameter] = {
                name: torch.zeros_like(parameter, dtype=value.dtype)
                if isinstance(value, Tensor) and value.shape == like.shape
                else deepcopy(value)
                for name, value in values.items()
            }
    return small


class _Peak(DispatchMode):  # type: ignore[misc]
    """The most bytes of new tensors at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._made = 0, dict[int, tuple[Any, int]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        output = func(*args, **kwargs or {})
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and (key := storage_of(tensor)) not in given:
                storage = tensor.untyped_storage()
                self._made[key] = weak_storage(storage), storage.nbytes()
        self._made = {k: (ref, n) for k, (ref, n) in self._made.items() if not ref.expired()}
        self.most = max(self.most, sum([n for _, n in self._made.values()]))
        return output
