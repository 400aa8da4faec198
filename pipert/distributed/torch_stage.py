"""Adapts torch's stage, which torch's schedules call, to a partition of a pipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pipert.distributed.halves import behind_one_node, can_be_split
from pipert.distributed.stages import Running

__all__: list[str] = []


def _gradient(dx: Tensor | None, x: Tensor, device: torch.device) -> Tensor | None:
    """Return the gradient of ``x`` to send: zeros if it has none, ``None`` if none is expected."""
    if not x.requires_grad:
        return None
    return torch.zeros_like(x, device=device) if dx is None else dx.contiguous()


class Stage(PipelineStage):
    """A stage that goes on with zeros after its partition has failed.

    Its module is a :class:`StageModule`, or a wrapper around one.
    """

    running: Running
    """The partition in the current mini-batch; set only while one runs."""

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
        running.backwards += 1
        full = full_backward or not self._can_be_split(i, loss)
        # torch also counts second halves, which may have nothing left to do: then replicas would
        # never reduce their gradients.
        is_last = last_backward or full and running.backwards == len(running.batch.sizes)

        def go_back() -> None:
            scaled = loss
            if scaled is not None and running.batch.loss is not None:
                scaled = scaled * running.batch.loss.gradient_of(i, scaled.detach())
            super(Stage, self).backward_one_chunk(i, scaled, full, is_last)

        if not running.backward(i, go_back):
            self.fwd_cache.pop(i, None)
        if running.arriving is not None:
            metas = running.arriving.metas
            pairs = zip(self.bwd_cache.get(i) or (None,) * len(metas), metas, strict=True)
            self.bwd_cache[i] = tuple([_gradient(dx, x, self.device) for dx, x in pairs])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if bwd_chunk_id not in self.dw_runner:
            return  # the first half failed, or did both

        def go_back() -> None:
            super(Stage, self).backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

        self.running.backward(bwd_chunk_id, go_back)

    def _can_be_split(self, i: int, loss: Tensor | None) -> bool:
        """Whether the backward of micro-batch ``i`` can be split; prepares its outputs if so.

        A wrapper around the partition, such as DDP, would not be told of the second half.
        """
        if self.running.batch.is_wrapped or self.running.batch.is_sharded:
            return False
        if self.is_first:  # torch does all of it in the second half
            return True
        outputs, inputs = self.fwd_cache[i]
        if loss is None:
            outputs = behind_one_node(outputs)
        ends = [y for y in (outputs if loss is None else (loss,)) if y.requires_grad]
        if ends and not can_be_split(ends[0], inputs, self.submod.parameters()):
            return False
        self.fwd_cache[i] = outputs, inputs
        return True

    # torch's V-shaped schedules hand gradients over even in a forward-only run, which has none.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        kept: Any = super()
        return kept.get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
