"""torch's stage of a partition: what torch's schedules call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pipert.distributed.halves import behind_one_node, can_be_split
from pipert.distributed.stages import Running

__all__: list[str] = []


def _gradient(dx: Tensor | None, of: Tensor, device: torch.device) -> Tensor | None:
    """A gradient as it is sent, zeros where there is none; nothing where none is awaited."""
    if not of.requires_grad:
        return None
    return torch.zeros_like(of, device=device) if dx is None else dx.contiguous()


class Stage(PipelineStage):
    """torch's stage, which goes on with zeros where its partition has failed.

    Args:
        module: a :class:`StageModule`, or what is wrapped around it.
        running: of the mini-batch; set before each, and taken back after it.
    """

    running: Running

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.running.i = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        running, i = self.running, bwd_chunk_id
        if not self.has_backward:
            return
        running.gone_back += 1
        full = full_backward or not self._can_be_split(i, loss)
        # torch counts second halves, too, which may have nothing to do: replicas would not meet.
        is_last = last_backward or full and running.gone_back == len(running.batch.sizes)

        def go_back() -> None:
            scaled = loss
            if scaled is not None and running.batch.loss is not None:
                scaled = scaled * running.batch.loss.gradient_of(i, scaled.detach())
            super(Stage, self).backward_one_chunk(i, scaled, full, is_last)

        if not running.backward(i, go_back):
            self.fwd_cache.pop(i, None)
        if running.arriving is not None:
            metas = running.arriving.metas
            found = zip(self.bwd_cache.get(i) or (None,) * len(metas), metas, strict=True)
            self.bwd_cache[i] = tuple([_gradient(dx, t, self.device) for dx, t in found])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if bwd_chunk_id not in self.dw_runner:
            return  # its other half has failed, or was the whole

        def go_back() -> None:
            super(Stage, self).backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

        self.running.backward(bwd_chunk_id, go_back)

    def _can_be_split(self, i: int, loss: Tensor | None) -> bool:
        """Whether the first half of a backward leaves the second all that weights need.

        torch tells nothing of a second half to what is wrapped around the partition, such as DDP.
        """
        if self.running.batch.is_wrapped or self.running.batch.is_sharded:
            return False
        if self.is_first:  # it begins in the second
            return True
        outputs, inputs = self.fwd_cache[i]
        if loss is None:
            outputs = behind_one_node(outputs)
        ends = [y for y in (outputs if loss is None else (loss,)) if y.requires_grad]
        if ends and not can_be_split(ends[0], inputs, self.submod.parameters()):
            return False
        self.fwd_cache[i] = outputs, inputs
        return True

    # torch's V-shaped schedules hand gradients over in a forward alone, too, where there are none.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        kept: Any = super()
        return kept.get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
