"""Copy and Wait: move values between devices inside the graph (section 3.2.3 of the paper).

Each does in the backward what the other direction needs: ``Copy'`` brings the gradient back over
the same two streams, and ``Wait'`` lets what waited go on to be waited for. On CPU there is
neither.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipert._typing import Tensors
from pipert.autograd import streams
from pipert.autograd.function import applied
from pipert.autograd.leaves import accumulators

__all__: list[str] = []

Stream = torch.cuda.Stream | None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: torch.device, source: Stream, target: Stream, to_caller: bool, *xs: Tensor
    ) -> Tensors:
        ctx.materialize_grads = False
        # The thread of the backward has other current streams.
        home = xs[0].device
        ctx.back = (home, target, source, streams.compute_stream(home))
        if to_caller:
            ctx.back = (home, target, ctx.back[3], ctx.back[3])
        return streams.copy(xs, device, source, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = tuple(grad for grad in grads if grad is not None)
        if ctx.back[1] is not None and any(map(_is_shared, there)):
            there = _own(there, ctx.back[1])
        moved = streams.copy(there, *ctx.back)
        if torch.is_anomaly_enabled():
            _let_autograd_read(moved, ctx.back[2])
        copied, reader = iter(moved), ctx.back[1]
        if reader is not None and there:
            _at_end_of_backward(partial(_wait_in_caller, there[0].device, reader))
        return (None, None, None, None, *[None if g is None else next(copied) for g in grads])


def _is_shared(gradient: Tensor) -> bool:
    """Whether autograd passes it to another node, too, here or in another shape.

    When the copy has begun, that node's next gradient may be added to it in place, while the copy
    still reads. So it is if the copy was made late in its partition, and goes backward early. A
    hook of this node, such as a recording's, counts as another one.
    """
    found: Any = gradient
    users: int = torch._C._storage_Use_Count(found.untyped_storage()._cdata)  # which is one
    return users > 2 or bool(found._use_count() > 1)


def _own(gradients: Tensors, reader: Stream) -> Tensors:
    """The same in memory of their own, which ``reader`` may read."""
    own = tuple(map(Tensor.clone, gradients))
    streams.wait(reader, streams.compute_stream(own[0].device))
    return own


def _let_autograd_read(moved: Tensors, target: Stream) -> None:
    """Let anomaly detection read a node's results, which it does before ``Wait'`` has waited.

    It also makes the host wait for its findings, so that the memory may be reused.
    """
    for tensor in moved:
        streams.wait(streams.compute_stream(tensor.device), target)


def _wait_in_caller(device: torch.device, reader: Stream) -> None:
    """D1: who has passed a gradient in, which a layer may hand on as it is, may write it next."""
    streams.wait(streams.compute_stream(device), reader)


# Calls its argument once the backward has succeeded, with the caller's current streams.
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, waiter: Stream, awaited: Stream, now: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.back = (awaited, waiter)
        if now:
            streams.wait(waiter, awaited)
        return tuple(map(Tensor.detach, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        streams.wait(*ctx.back)
        return (None, None, None, *grads)


def copy(
    xs: Tensors, device: torch.device, source: Stream, target: Stream, to_caller: bool = False
) -> Tensors:
    """Copy ``xs``, all on one device, to ``device``; gradients come back the same way.

    With ``to_caller`` gradients may become ``.grad``, which the caller reads on any stream and
    drops at any time. So they use memory of the caller's compute stream, which the caller orders.
    """
    held = accumulators(xs)
    copied: Tensors = applied(_Copy)(device, source, target, to_caller, *xs)
    del held
    return copied


def wait(xs: Tensors, waiter: Stream, awaited: Stream) -> Tensors:
    """Make ``waiter`` wait for ``awaited`` now, and vice versa in the backward of ``xs``."""
    return _wait(xs, waiter, awaited, True)


def wait_back(xs: Tensors, waiter: Stream, awaited: Stream) -> Tensors:
    """As :func:`wait`, but ``waiter`` has waited: in the backward of ``xs`` alone."""
    return _wait(xs, waiter, awaited, False)


def _wait(xs: Tensors, waiter: Stream, awaited: Stream, now: bool) -> Tensors:
    held = accumulators(xs)
    waited: Tensors = applied(_Wait)(waiter, awaited, now, *xs)
    del held
    return waited
