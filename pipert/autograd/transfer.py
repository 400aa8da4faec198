"""Copy and Wait: move values between devices inside the graph (section 3.2.3 of the paper).

In the backward each does what the opposite direction needs: ``Copy'`` brings the gradient back over
the same two streams, and in ``Wait'`` the two streams swap roles. On CPU neither is used.

Autograd runs the nodes of each device on a thread, and adds up the gradients of a tensor on the
threads that they come from. That goes wrong in torch (2.11 to 2.14): whether a gradient may be
added to in place is decided by two counts of references, and between these the thread may wait for
the interpreter, while another one, which is in a Python node, passes the same gradient on. So
``Copy'`` hands over to ``Send'``, a node on the device of ``x``, whose thread adds up all gradients
of ``x``. It takes the turn of its micro-batch, as forks do (see ``autograd.order``): it comes after
what has begun there, which would wait for the copy as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipert._torch import set_sequence_nr
from pipert._typing import Tensors
from pipert.autograd import streams
from pipert.autograd.engine import applied
from pipert.autograd.leaves import accumulators

Stream = torch.cuda.Stream | None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        set_sequence_nr(ctx, i)
        return tuple(map(Tensor.detach, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: torch.device, source: Stream, target: Stream, to_caller: bool, *xs: Tensor
    ) -> Tensors:
        ctx.materialize_grads = False
        # The thread that runs the backward has other current streams.
        home = xs[0].device
        ctx.back = (home, target, source, streams.compute_stream(home))
        if to_caller:
            ctx.back = (home, target, ctx.back[3], ctx.back[3])
        return streams.copy(xs, device, source, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = tuple(grad for grad in grads if grad is not None)
        reader = ctx.back[1]
        # Autograd may pass the memory of a gradient to another node as well, or the caller has
        # passed it in: they may write to it while the copy still reads it.
        if reader is not None and given:
            given = tuple(map(Tensor.clone, given))
            streams.wait(reader, streams.compute_stream(given[0].device))
        moved = streams.copy(given, *ctx.back)
        if torch.is_anomaly_enabled():
            _let_autograd_read(moved, ctx.back[2])
        copied = iter(moved)
        return (None, None, None, None, *[None if g is None else next(copied) for g in grads])


def _let_autograd_read(moved: Tensors, target: Stream) -> None:
    """Let anomaly detection read a node's results, which it does before ``Wait'`` has waited.

    Anomaly detection makes the host wait for its findings, so the memory may be reused afterwards.
    """
    for tensor in moved:
        streams.wait(streams.compute_stream(tensor.device), target)


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


_apply_send, _apply_copy, _apply_wait = map(applied, (_Send, _Copy, _Wait))


def copy(
    i: int,
    xs: Tensors,
    device: torch.device,
    source: Stream,
    target: Stream,
    to_caller: bool = False,
) -> Tensors:
    """Copy ``xs``, which are all on one device, to ``device``; gradients come back the same way.

    Args:
        i: the micro-batch.
        xs: the tensors.
        device: where they go.
        source, target: the streams on which they are read and written.
        to_caller: whether gradients may become ``.grad``, which the caller reads on any stream and
            drops at any time. So they use memory of the caller's compute stream, which the caller
            orders.
    """
    held = accumulators(xs)
    copied: Tensors = _apply_copy(device, source, target, to_caller, *_apply_send(i, *xs))
    del held
    return copied


def wait(xs: Tensors, waiter: Stream, awaited: Stream, now: bool = True) -> Tensors:
    """Make ``waiter`` wait for ``awaited`` ``now``, and vice versa in the backward of ``xs``."""
    held = accumulators(xs)
    waited: Tensors = _apply_wait(waiter, awaited, now, *xs)
    del held
    return waited
