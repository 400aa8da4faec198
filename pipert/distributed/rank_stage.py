"""Adapts torch's stage, which torch's schedules call, to a partition of a pipe.

torch's stage exchanges tensors of one shape, which it finds out beforehand. This one sends shapes
along (``rank_boundary``) and keeps no buffers. Of torch's it uses how wrappers such as DDP are
called. Which gradients a split backward puts off is up to ``autograd.weight_gradients``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pipert._typing import Tensors
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import leaves_behind
from pipert.autograd.order import ENTRANCE, edge_of
from pipert.autograd.weight_gradients import Deferral, DeferredGradients, compute_deferred
from pipert.distributed.rank_boundary import FAILED, SENT, Arrived, Parcel, transfers
from pipert.distributed.rank_partition import RankPartition
from pipert.distributed.rank_reports import Site


@dataclass(slots=True, eq=False)
class RankMicroBatch:
    """What a stage keeps of one micro-batch from its forward to its backward.

    What is sent, or is not needed again, is dropped, so that 1F1B keeps no boundary tensors of more
    micro-batches than there are partitions.
    """

    xs: Tensors
    """The leaves that came in with grad."""
    ys: Tensors
    """The tensors that left, or the loss."""
    parcel: Parcel
    """``SENT`` once that was sent, unless it is ``FAILED``."""
    dys: Sequence[Tensor] = ()
    """The gradients of those ``ys`` that require grad."""
    dxs: Sequence[Tensor] = ()
    """The gradients to send back."""
    deferred: list[DeferredGradients] = field(default_factory=list)
    """The gradients of weights that the second half of a split backward computes."""

    def take_parcel(self) -> Parcel:
        """Return what is to be sent, and drop it."""
        parcel = self.parcel
        if parcel is not FAILED:
            self.parcel = SENT
        return parcel


class RankStage(PipelineStage):
    """Partition ``j`` as torch's schedules see it: ``module`` is its module, maybe wrapped."""

    def __init__(self, module: nn.Module, j: int, site: Site) -> None:
        # Without shapes torch would run the module to find them. Nobody uses these.
        shape = torch.empty(1, device="meta")
        xs = () if j == 0 else shape
        super().__init__(module, j, len(site.homes), site.device, xs, shape, group=site.group)
        self._agreement, self._group = site.agreement, site.group
        self._before, _, self._after, *_ = (-1, *site.homes, -1)[j:]  # the neighbours' ranks

    def begin(self, partition: RankPartition) -> None:
        """Begin a mini-batch; :meth:`end` must follow."""
        self._partition = partition
        self._kept: dict[int, RankMicroBatch] = {}
        self._backwards = 0
        partition.module.forward_micro_batch = partition.forward

    def end(self) -> None:
        """Drop all that is kept of the mini-batch."""
        self._partition.module.forward_micro_batch = None
        del self._partition, self._kept

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Of torch 2.11: there a rank at the turn of a V would send to itself.
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.peer != dist.get_rank()]

    def get_fwd_recv_ops(self, i: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        header = self._agreement.receive(self._before)
        self.set_local_fwd_input(Parcel(header, ()), i)
        arrived = self._partition.arrived.get(i)
        tensors = () if arrived is None else arrived.tensors
        return transfers(dist.irecv, tensors, self._before, self._group)

    def set_local_fwd_input(self, parcel: Parcel, i: int) -> None:
        if parcel.header != FAILED.header:
            self._partition.arrived[i] = Arrived(parcel.header, self.device, parcel.tensors)

    def forward_one_chunk(self, i: int, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        kept = RankMicroBatch(*self._partition.compute(i, self.forward_maybe_with_nosync))
        self._kept[i], ys = kept, kept.ys
        if not self.has_backward:
            kept.xs = kept.ys = ()
            self._partition.arrived.pop(i, None)
        if self.is_last:
            return ys[0]
        if self._after == dist.get_rank():
            return kept.take_parcel()
        self._partition.batch.sent += self._agreement.send(kept.parcel.header, self._after)
        return None

    def get_fwd_send_ops(self, i: int) -> list[dist.P2POp]:
        tensors = self._kept[i].take_parcel().tensors
        return transfers(dist.isend, tensors, self._after, self._group)

    def get_bwd_recv_ops(self, i: int) -> list[dist.P2POp]:
        kept = self._kept[i]
        if kept.parcel is not FAILED and self.has_backward:
            kept.dys = [torch.empty_like(y.detach()) for y in kept.ys if y.requires_grad]
        return transfers(dist.irecv, kept.dys, self._after, self._group)

    def set_local_bwd_input(self, dys: Any, i: int) -> None:
        self._kept[i].dys = dys

    def backward_one_chunk(
        self, i: int, loss: Tensor | None = None, full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:  # fmt: skip
        if not self.has_backward:
            return
        self._backwards += 1
        partition, kept = self._partition, self._kept[i]
        dxs: list[Tensor | None] = [None] * len(kept.xs)

        def go_back() -> None:
            ends, dys = self._ends(i, kept, loss)
            batch = partition.batch  # a wrapper would not see the second half
            if full_backward or batch.is_wrapped or batch.is_sharded:
                # torch also counts second halves, which there are none of.
                is_last = last_backward or self._backwards == len(batch.sizes)
                given = {"stage_output": ends, "output_grads": dys, "input_values": kept.xs}
                dxs[:], _ = self.backward_maybe_with_nosync("full", given, is_last)
            else:
                dxs[:] = _differentiate_inputs(ends, dys, kept)

        partition.backward(i, go_back)
        kept.ys = kept.xs = kept.dys = ()
        if (arrived := partition.arrived.pop(i, None)) is not None:
            kept.dxs = arrived.gradients(dxs)

    def _ends(
        self, i: int, kept: RankMicroBatch, loss: Tensor | None
    ) -> tuple[Tensors, Sequence[Tensor | None]]:
        """Return the tensors to go backward from, and their gradients; ``None`` for a one."""
        of_batch = self._partition.batch.loss
        if loss is not None and of_batch is not None:
            return (loss,), (of_batch.gradient_of(i, loss.detach()),)
        if kept.parcel is FAILED:
            return (self._partition.zero(kept.ys),), (None,)
        left = iter(kept.dys)
        return kept.ys, [next(left) if y.requires_grad else None for y in kept.ys]

    def backward_weight_one_chunk(self, i: int, last_backward: bool = False) -> None:
        later = self._kept[i].deferred
        if later:  # else the first half failed, or did both
            self._partition.backward(i, lambda: _accumulate(*compute_deferred(later)))

    def get_bwd_send_ops(self, i: int) -> list[dist.P2POp]:
        return transfers(dist.isend, self.get_local_bwd_output(i), self._before, self._group)

    def get_local_bwd_output(self, i: int) -> Sequence[Tensor]:
        kept = self._kept[i]
        dxs, kept.dxs = kept.dxs, ()
        return dxs


def _differentiate_inputs(
    ys: Tensors, dys: Sequence[Tensor | None], kept: RankMicroBatch
) -> Sequence[Tensor | None]:
    """Return the gradients of what came in; add those of weights that cannot be put off."""
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad and dy is not None]
    edges = [edge_of(y) for y, _ in pairs]
    ends, count = [edge.node for edge in edges], len(kept.xs)
    deferral = Deferral(leaves_behind(ends, [*kept.xs, ENTRANCE]), ends)
    run = lambda wanted, ys, dys: differentiate(ys, wanted, dys)  # noqa: E731
    given = (*kept.xs, *deferral.leaves), edges, [dy for _, dy in pairs]
    found, kept.deferred = deferral.differentiate(run, *given)
    _accumulate(deferral.leaves, found[count:])
    return found[:count]


def _accumulate(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for leaf, dx in zip(leaves, gradients, strict=True):
        if dx is not None:  # it may share memory with others
            leaf.grad = dx.clone() if leaf.grad is None else leaf.grad + dx
