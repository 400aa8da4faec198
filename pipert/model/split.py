"""Splits a Sequential into partitions and places them on devices.

Layers remain the same objects under the same names, so parameters keep their identity and the
``state_dict`` its keys, whatever the balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipert._torch import NormBase
from pipert.layers.parameter_copies import weights_elsewhere
from pipert.model.settings import whole


class Partition(nn.Sequential):
    """Consecutive layers of the user's module. It takes no hooks: a pipe calls each layer."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a hook of a partition would never be called, since a pipe calls its layers; register "
            "it on a layer, such as pipe.partitions[j][0], or on the pipe for whole calls"
        )

    register_forward_pre_hook = register_forward_hook = _refuse
    register_full_backward_pre_hook = register_full_backward_hook = _refuse
    register_backward_hook = _refuse


def is_sequential(model: Any) -> bool:
    """Return whether layers run one after the other, or the model is a pipe of such layers."""
    sequential = isinstance(model, nn.Sequential)
    return getattr(model, "is_pipe", False) or (
        sequential and type(model).forward is nn.Sequential.forward
    )


def check_module(module: Any) -> None:
    """Refuse anything but an ``nn.Sequential`` that adds nothing to its layers."""
    if getattr(module, "is_pipe", False):
        raise TypeError("module is a pipe already; make another one of the module it was made of")
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be an nn.Sequential, got {type(module).__qualname__}; use "
            "pipert.pipeline(model, example=batch), which runs any module through its own forward, "
            "or put the layers in an nn.Sequential in the order in which they run"
        )
    kind = type(module)
    for name, plain in (("forward", nn.Sequential.forward), ("__call__", nn.Sequential.__call__)):
        if getattr(kind, name) is not plain or name in vars(module):
            raise TypeError(
                f"{kind.__qualname__} overrides {name}, which a pipe would never call; make what "
                "it does a layer of a plain nn.Sequential"
            )
    own = [*module._parameters, *module._buffers]
    if own:
        raise TypeError(
            f"the module has {own} of its own, which belong to no layer and would be missing from "
            "the pipe; move them into a layer"
        )


def check_balance(module: nn.Sequential, balance: Any) -> list[int]:
    """Return ``balance`` as integers; refuse one that does not fit the module."""
    measure = "pipert.balance.balance_by_time(partitions, module, example) measures one"
    if balance is None:
        raise ValueError(
            "balance is required: how many layers each partition takes, one entry for each "
            f"device; {measure}"
        )
    if not isinstance(balance, Iterable) or isinstance(balance, str | bytes):
        raise TypeError(
            f"balance must be a sequence of numbers of layers, such as [2, 2], got {balance!r}"
        )
    counts = [whole(count, "each entry of balance") for count in balance]
    if any(count <= 0 for count in counts):
        raise ValueError(f"each entry of balance must be positive, got {counts}")
    if sum(counts) != len(module):
        raise ValueError(
            f"balance must add up to the number of layers, but {counts} adds up to {sum(counts)} "
            f"and the module has {len(module)}; {measure}"
        )
    return counts


def split(module: nn.Sequential, balance: Sequence[int]) -> tuple[nn.Sequential, ...]:
    """Return the partitions, without moving anything."""
    named = list(module._modules.items())
    partitions = []
    start = 0
    for count in balance:
        partition = sequential(dict(named[start : start + count]), module.training, Partition)
        partitions.append(partition)
        start += count
    return tuple(partitions)


def sequential(
    layers: Mapping[str, nn.Module | None],
    training: bool = True,
    kind: type[nn.Sequential] = nn.Sequential,
) -> nn.Sequential:
    """Make a Sequential of class ``kind`` with these layers under these names."""
    module = kind()
    # add_module refuses names that are attributes, such as a layer called 'train'.
    module._modules.update(layers)  # type: ignore[arg-type]
    module.training = training
    return module


def place(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    copies_buffers: bool = False,
) -> None:
    """Move each partition to its device; a shared parameter to the first one that uses it.

    So does a shared buffer, if runs make ``copies_buffers``, as they do of parameters. State that
    several partitions cannot share is refused before anything moves.
    """
    for partition in partitions:
        for name, tensor in (*partition.named_parameters(), *partition.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"{name!r} is on 'meta', without values, so it cannot be moved to a device; "
                    "pass load= to pipeline(), or give it memory with to_empty(device='cpu')"
                )
    buffers = check_shared(partitions, devices, copies_buffers)
    weights = weights_elsewhere(partitions, devices)
    for buffer, device in buffers.items():
        buffer.data = buffer.data.to(device)
    for partition, device, shared in zip(partitions, devices, weights, strict=True):
        staying = {id(each) for weight in (*shared, *buffers) for each in (weight, weight.grad)}
        partition._apply(partial(_moved, device, staying))  # type: ignore[no-untyped-call]


def check_shared(
    partitions: Sequence[nn.Sequential], devices: Sequence[torch.device], copies_buffers: bool
) -> dict[Tensor, torch.device]:
    """Refuse state that several partitions cannot share; return shared buffers' devices."""
    refuse_shared_norms([[*part.modules()] for part in partitions], range(len(devices)))
    return _shared_buffers(partitions, devices, not copies_buffers)


def _moved(device: torch.device, staying: set[int], tensor: Tensor) -> Tensor:
    return tensor if id(tensor) in staying else tensor.to(device)


def move(module: nn.Module, name: str, device: torch.device) -> None:
    """Move a parameter and its gradient, or a buffer, that belongs to ``module`` itself.

    It stays the same object, by which a run knows the statistics that it defers.
    """
    tensor = (module._parameters if name in module._parameters else module._buffers)[name]
    if tensor is not None and tensor.device != device:
        with torch.no_grad():
            tensor.data = tensor.data.to(device)
            if tensor.is_leaf and tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)


def refuse_shared_norms(
    partitions: Sequence[Iterable[nn.Module]], placement: Sequence[int]
) -> None:
    """Refuse running statistics that partitions of several placements, such as ranks, update."""
    homes: dict[nn.Module, int] = {}
    for j, modules in enumerate(partitions):
        for module in modules:
            if isinstance(module, NormBase) and module.track_running_stats:
                if placement[first := homes.setdefault(module, j)] != placement[j]:
                    raise ValueError(
                        f"a {type(module).__name__} is used in partitions {first} and {j}, which "
                        "would update its running statistics in no fixed order; put its uses into "
                        "one partition, or copy it"
                    )


def _shared_buffers(
    partitions: Sequence[nn.Sequential], devices: Sequence[torch.device], refuse: bool
) -> dict[Tensor, torch.device]:
    """Return the buffers that are used on several devices, each with the first; or refuse them."""
    homes: dict[Tensor, tuple[str, torch.device]] = {}
    clashes: dict[Tensor, str] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for name, tensor in partition.named_buffers():
            other, home = homes.setdefault(tensor, (name, device))
            if home != device:
                clashes[tensor] = f"{other!r} on {home} is {name!r} on {device}"
    if clashes and refuse:
        raise ValueError(
            "a buffer shared by several layers must stay on one device, but "
            + "; ".join(clashes.values())
            + ". Choose a balance that puts those layers on one device"
        )
    return {tensor: homes[tensor][1] for tensor in clashes}
