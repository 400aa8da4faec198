"""Makes up values for tensors on the meta device, where one layer of a model is computed alone.

They are finite and steer little: weights are small and random, so that experts get about equally
many rows; vectors, such as those of norms, and variances are one; indices are zero. A generator of
their own leaves torch's alone, by which a model may drop layers.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

_RANDOM = 1_000_003  # odd, so that rows of a matrix differ


def has_values(module: nn.Module) -> bool:
    """Return whether no parameter or buffer is on the meta device."""
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def made_up(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or parameter, of this kind on the device, with values."""
    made: Any = torch.empty_like(tensor, device=device, requires_grad=False)
    if tensor.dtype == torch.bool or (tensor.is_floating_point() and tensor.dim() < 2):
        made.fill_(1)
    elif not tensor.is_floating_point():
        made.zero_()
    else:
        generator = torch.Generator(device).manual_seed(0)
        some = torch.randn(min(made.numel(), _RANDOM), device=device, generator=generator)
        some, flat = some.mul_(0.02).to(made.dtype), made.view(-1)
        for k in range(0, len(flat), _RANDOM):
            flat[k : k + _RANDOM] = some[: len(flat) - k]
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
    return cast("Tensor", made)


def copy_of(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copy ``layer`` to the device, with values made up where it has none, unless that is meta.

    The copy shares the layer's forward hooks.
    """
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(value)] = type(value)() if "backward" in name else value
        own = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for value in [each for each in own if isinstance(each, Tensor) and id(each) not in memo]:
            if value.is_meta and device.type != "meta":
                memo[id(value)] = made_up(value, device)
            elif not value.is_leaf:  # which deepcopy refuses
                memo[id(value)] = value.detach().to(device, copy=True)
    try:
        return copy.deepcopy(layer, memo).to(device)
    except Exception as error:
        error.add_note(
            "a layer that cannot be copied cannot be measured; measure it yourself, and pass the "
            "costs of all layers to balance_by_cost"
        )
        raise
