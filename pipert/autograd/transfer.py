"""Copy and Wait: moving values between devices inside the graph (section 3.2.3 of the paper).

Each does in the backward what the other direction needs: ``Copy'`` brings the gradient back over
the same two streams, and ``Wait'`` lets what waited go on to be waited for. On CPU the lane has
neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipert import stream
from pipert._typing import Tensors

__all__: list[str] = []

Stream = torch.cuda.Stream | None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: torch.device, source: Stream, target: Stream, *xs: Tensor
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        # The thread of the backward has other current streams.
        home = xs[0].device
        ctx.back = (home, target, source, stream.compute_stream(home))
        return stream.copy(xs, device, source, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        copied = iter(stream.copy(tuple(g for g in grads if g is not None), *ctx.back))
        return (None, None, None, *[None if g is None else next(copied) for g in grads])


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiter: Stream, awaited: Stream, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.back = (awaited, waiter)
        stream.wait(waiter, awaited)
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        stream.wait(*ctx.back)
        return (None, None, *grads)


def copy(xs: Tensors, device: torch.device, source: Stream, target: Stream) -> Tensors:
    """Copy ``xs``, all on one device, to ``device``; gradients come back the same way."""
    copied: Tensors = _Copy.apply(device, source, target, *xs)  # type: ignore[no-untyped-call]
    return copied


def wait(xs: Tensors, waiter: Stream, awaited: Stream) -> Tensors:
    """``waiter`` waits for ``awaited`` now; in the backward of ``xs`` the other way round."""
    waited: Tensors = _Wait.apply(waiter, awaited, *xs)  # type: ignore[no-untyped-call]
    return waited
