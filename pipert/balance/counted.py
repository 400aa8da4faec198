"""Estimates how long operations on the meta device would take on GPUs that are not here.

Nothing is computed. An operation takes as long as its floating point operations or its bytes, at
the assumed rates, whichever is longer, and at least a launch. Attention counts as the fused kernel
that saves no matrix of scores, which PyTorch does not choose on meta.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pipert._torch import pytree

FLOPS, BANDWIDTH, LAUNCH, LINK = 400e12, 2e12, 5e-6, 50e9
"""Assumed: operations and bytes a second, seconds of a launch, bytes a second between devices."""

aten = torch.ops.aten
_ALLOCATIONS = aten.empty, aten.empty_like, aten.empty_strided
_clock: contextvars.ContextVar[_Clock | None] = contextvars.ContextVar("pipert_clock", default=None)


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Count the time of operations on meta in the block, for :func:`counted_seconds`."""
    fused = mock.patch.object(nn.functional, "scaled_dot_product_attention", _attention)
    with _Clock() as clock, fused:
        token = _clock.set(clock)
        try:
            yield
        finally:
            _clock.reset(token)


def counted_seconds() -> float | None:
    """Return the time that operations have taken so far; ``None`` outside of such a block."""
    clock = _clock.get()
    return None if clock is None else clock.seconds


class _Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        used = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in made) or func.overloadpacket in _ALLOCATIONS:
            return output
        if func.is_view:
            return output
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=output) if count else 0
        moved = sum([x.nbytes for x in (*used, *made)])
        self.seconds += max(flops / FLOPS, moved / BANDWIDTH, LAUNCH)
        return output


_plain_attention = nn.functional.scaled_dot_product_attention


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention on meta as CUDA does: by the flash kernel if it can, else the efficient."""
    if not query.is_meta:
        options: Any = {"scale": scale, "enable_gqa": enable_gqa}
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    is_half = query.dtype in (torch.half, torch.bfloat16)
    if attn_mask is None and is_half and query.shape[-1] == value.shape[-1]:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    else:
        if attn_mask is not None:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    output: Tensor = found[0]
    return output
