"""Computes on meta tensors, or on zeros, what a recording of any model over ranks needs to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import FakeTensorMode, pytree
from pipert._typing import Tensors
from pipert.any_model.intercept import _METADATA
from pipert.any_model.map_tensors import map_tensors
from pipert.batch.tensors import tensors_of
from pipert.distributed.placeholders import META, ReplayError, reshape

DEVICES: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cuda", "is_cpu")
)
OF_META = _METADATA - DEVICES | {Tensor.is_signed, torch.is_floating_point, torch.is_complex}
"""Functions that are the same of a placeholder."""

HOOKS = {Tensor.register_hook, Tensor.retain_grad}


def called(func: Any) -> str:
    """Return the name of a torch function."""
    return str(getattr(func, "__name__", func))


def on_meta(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: Tensors, casts: torch.device | None
) -> tuple[Any, list[int]]:
    """Call a torch function with meta tensors in place of all others, which stay unchanged.

    Args:
        func, args, kwargs: the call.
        tensors: those among the arguments.
        casts: the device whose autocast is on; torch has none for meta tensors.

    Returns:
        The result, in meta tensors but for those arguments that the function returns; and which
        of ``tensors`` it would change.
    """
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0], []
    if func in (Tensor.__getitem__, Tensor.__setitem__):  # a real mask has its number of rows
        args = (args[0], _as_numbers(args[1]), *args[2:])
    mode = None if casts is None else FakeTensorMode(allow_non_fake_inputs=True)
    metas: dict[int, tuple[Tensor, int]] = {}

    def meta(x: Any) -> Any:
        if isinstance(x, torch.device) or (func is Tensor.to and type(x) is str):
            return casts or META
        if not isinstance(x, Tensor):
            return x
        if id(x) not in metas:
            one = x
            if mode is not None:
                with mode:
                    one = _empty_like(x, casts)
            elif not x.is_meta:
                one = _empty_like(x)
            metas[id(x)] = one, one._version
        return metas[id(x)][0]

    args, kwargs = pytree.tree_map(meta, (tuple(args), dict(kwargs)))
    if kwargs.get("device") is not None:
        kwargs["device"] = casts or META
    with torch.no_grad():
        y = func(*args, **kwargs)
    for x in tensors if mode is not None else ():
        if id(x) in metas:
            reshape(x, metas[id(x)][0].shape, metas[id(x)][0].stride())
    given = {id(metas[id(x)][0]): x for x in tensors if id(x) in metas}
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    results, rebuild = tensors_of(y)
    found = [given[id(t)] if id(t) in given else placeholder_of(t, needs_grad) for t in results]
    pairs = enumerate([metas.get(id(x)) for x in tensors])
    return rebuild(tuple(found)), [k for k, pair in pairs if pair and pair[0]._version != pair[1]]


def placeholder_of(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return a meta tensor like this one; it requires grad if its dtype can."""
    is_trained = needs_grad and (tensor.is_floating_point() or tensor.is_complex())
    return _empty_like(tensor).requires_grad_(is_trained)


def _empty_like(tensor: Tensor, device: torch.device | None = META) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class Zeros:
    """Zeros for a ``layer`` that cannot be recorded on meta tensors, as experts choose by values.

    Whatever has no value here is a zero of the same shape, made where a function needs it.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._layer, self._device = layer, device
        self._buffers = {id(buffer) for buffer in layer.buffers()}

    def of(self, tensor: Tensor) -> Tensor:
        """Return what a function inside of the layer gets for ``tensor``."""
        if tensor.is_meta or isinstance(tensor, nn.Parameter):
            return _empty_like(tensor, self._device).zero_()
        return tensor.to(self._device) if id(tensor) in self._buffers else tensor

    def call(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the layer; return its result in meta tensors but for its arguments."""
        given = tensors_of((args, kwargs))[0]
        zeros = {id(tensor): self.of(tensor) for tensor in given}
        back = {id(zeros[id(tensor)]): tensor for tensor in given}
        trained = any(t.requires_grad for t in (*given, *self._layer.parameters()))
        needs_grad = torch.is_grad_enabled() and trained
        args, kwargs = map_tensors((args, kwargs), lambda t: zeros[id(t)])
        try:
            with torch.no_grad():
                y = call(*args, **kwargs)
        except Exception as error:
            raise ReplayError(
                f"the layer {name!r} needs values to be recorded, and fails with zeros in their "
                f"place ({type(error).__name__}: {str(error)[:200]}); let it take zeros"
            ) from error
        finally:
            map_tensors((args, kwargs), lambda t: back.get(id(t), t))  # in the caller's lists
        tensors, rebuild = tensors_of(y)
        found = [
            back[id(t)] if id(t) in back else placeholder_of(t, needs_grad) for t in tensors
        ]
        return rebuild(tuple(found))


def _as_numbers(index: Any) -> Any:
    """Return an index whose real masks are replaced by the numbers of the rows they select."""
    found: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(item, Tensor) and item.dtype == torch.bool and not item.is_meta
        found += item.nonzero(as_tuple=True) if is_mask else [item]
    return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]
