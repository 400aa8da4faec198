"""Keeps the ends of a stage in the graph: in a call, autograd walks back along one graph.

::

    forward, in time order                       backward, in time order (read upwards)

    receive   x from stage j-1                   dx goes on to stage j-1
    copy      on copy streams j-1 -> j           Copy'      on the copy streams
    join      with the token of F[i-1,j]         Join'      releases B[i-1,j]
    wait      compute waits for the copy         Wait'
    compute   y = partition(x)                   B[i,j]
    wait      copy stream waits for compute      Wait'      compute waits for dy   <- only here
    recompute if checkpointed                    R[i,j]     while dy is still being copied
    fork      token for F[i+1,j]                 Fork'      B[i+1,j] is done
    send      y to stage j+1                     Copy'      dy arrives from stage j+1

What would do nothing is left out: there are no copies and waits on CPU, no autograd nodes at all
without grad, and no join for the first micro-batch and no fork for the last. Where one thread goes
backward through all partitions, the last micro-batch may fork, too, to wait for its turn.

A skip that a partition pops is copied like ``x``, from the device that it comes from, but not
joined. One that is left for later partitions goes through the same nodes as ``y``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipert._typing import Value
from pipert.autograd import order, streams
from pipert.batch.tensors import differentiable
from pipert.recompute.nodes import recompute_before
from pipert.recompute.segment import Segments
from pipert.skip.store import Carried
from pipert.stage.copies import Copies


@dataclass(slots=True, eq=False)
class CallBoundary:
    """The ends of a stage whose graph is kept whole."""

    _device: torch.device
    _last: int
    """The last micro-batch, which leaves no token."""
    _grad_enabled: bool
    """Whether there is a graph."""
    copies: Copies
    in_turn: bool
    """Whether tasks go backward in turn, since one thread goes through all partitions."""
    forks_last: bool
    """Whether the last micro-batch is forked, too, to wait for its turn."""
    _token: Tensor | None = None

    def cross(self, i: int, x: Value, origin: int | None, is_skip: bool = False) -> Value:
        """Bring a value here from partition ``origin``, or the caller, for the layers."""
        copied = None
        if i == 0 and self._grad_enabled:  # in the first call a worker's nodes have low numbers
            order.begin_numbers(self._last + 1)  # beyond all turns
        if self.copies.come_in:
            x, copied = self.copies.copy(i, x, origin)
        if self._token is not None and not is_skip:
            x = self._join(x)
        return x if copied is None else self.copies.wait(i, x, copied)

    def leave(self, i: int, y: Value, segments: Segments | None) -> Value:
        """Prepare the output of the layers for sending."""
        if self.copies.go_out:
            copying = self.copies.stream(i)
            if copying is not None:
                compute = streams.compute_stream(self._device)
                wait = partial(self.copies.order, i, waiter=copying, awaited=compute)
                if isinstance(y, Carried):  # a tensor that is both has two gradients to wait for
                    y, skips = y
                    skips = {key: wait(skip) for key, skip in skips.items()}
                    y = Carried(wait(y), skips)
                else:
                    y = wait(y)
        if not self._grad_enabled:
            return y
        ys, rebuild = differentiable(y)
        if not ys:
            return y
        if segments is not None:
            ys = recompute_before(ys, segments)
        if i != self._last or self._token is not None or self.forks_last:
            token, *ys = order.fork(i if self.in_turn else None, self._token, *ys)
            self._token = token if i != self._last else None
        return rebuild(ys)

    def copy_weight(self, i: int, weight: Tensor) -> Tensor:
        """Copy a parameter that lives elsewhere, as a call's arguments are; once per run.

        Each is copied separately, since they have only the device in common: a parameter used in a
        call must not depend on one that is not. Without grad the copies are leaves, and never
        inference tensors, so that layers may differentiate by them and changes in place are seen.
        """
        grad = self._grad_enabled
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            (copy,) = self.copies.bring(i, (weight,), None)
            found: Tensor = copy if grad else copy.detach().requires_grad_(weight.requires_grad)
        return found

    def drop(self) -> None:
        """Forget every micro-batch, since nobody waits for the run any more. From any thread."""
        self._token = None  # it holds the graph of all earlier micro-batches

    def _join(self, x: Value) -> Value:
        """Tie the token to the input, and to no skip.

        If two values passed through one node, a backward that needs one of them would enter both.
        """
        xs, rebuild = differentiable(x)
        if not xs:
            return x  # a token that is not taken goes into the fork
        token, self._token = self._token, None
        return rebuild(order.join(token, *xs))
