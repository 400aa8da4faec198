"""Estimates how long operations on the meta device would take on GPUs that are not here.

Nothing is computed. An operation takes as long as its floating point operations or its bytes, at
the assumed rates, whichever is longer, and at least a launch. Attention counts as the fused kernel
that saves no matrix of scores, which PyTorch does not choose on meta.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert._torch import (
    DispatchMode,
    efficient_attention,
    flash_attention,
    flop_formulas,
    pytree,
    run_backward,
)

FLOPS, BANDWIDTH, LAUNCH, LINK = 400e12, 2e12, 5e-6, 50e9
"""Assumed: operations and bytes a second, seconds of a launch, bytes a second between devices."""

aten = torch.ops.aten
_ALLOCATIONS = aten.empty, aten.empty_like, aten.empty_strided
_local = threading.local()  # no context variable: layers are measured in contexts of their own


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Count the time of operations on meta in the block, for :func:`counted_seconds`."""
    with _Clock() as clock, _FusedAttention():
        _local.clock = clock
        try:
            yield
        finally:
            _local.clock = None


def counted_seconds() -> float | None:
    """Return the time that operations have taken so far; ``None`` outside of such a block."""
    clock: _Clock | None = getattr(_local, "clock", None)
    return None if clock is None else clock.seconds


class _Clock(DispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        used = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        is_free = func.is_view or func.overloadpacket in _ALLOCATIONS
        if is_free or not any(x.is_meta for x in made):
            return output
        count = flop_formulas.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=output) if count else 0
        moved = sum([x.nbytes for x in (*used, *made)])
        self.seconds += max(flops / FLOPS, moved / BANDWIDTH, LAUNCH)
        return output


class _FusedAttention(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_attention = func is nn.functional.scaled_dot_product_attention
        if is_attention and flash_attention and efficient_attention:
            func = _attention
        kwargs = kwargs or {}
        if func is torch.autograd.grad and isinstance(kwargs["grad_outputs"], (list, tuple)):
            options = [kwargs[name] for name in ("retain_graph", "create_graph")]
            given = tuple(kwargs["grad_outputs"]), *options, args[1], True
            with self:  # since a layer with a checkpoint inside computes its attention again
                return run_backward(args[0], *given, accumulate_grad=False)
        return func(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention on meta as CUDA does: by the flash kernel if it can, else the efficient."""
    if key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    is_half = query.dtype in (torch.half, torch.bfloat16)
    if attn_mask is None and is_half and query.shape[-1] == value.shape[-1]:
        found = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        if attn_mask is not None:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        found = efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    output: Tensor = found[0]
    return output
