"""Keeps torch's stages and schedule for each shape of mini-batch, made when ranks first meet it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pipert.distributed.asked import Brought, Settings, Site
from pipert.distributed.boundary import Boundary
from pipert.distributed.meeting import meet
from pipert.distributed.schedules import make_schedule
from pipert.distributed.stages import Running
from pipert.distributed.torch_stage import Stage

__all__: list[str] = []

_MOST = 8  # shapes that are kept, each with receive buffers for all micro-batches


class Prepared(NamedTuple):
    """torch's schedule and stages for mini-batches of one shape."""

    schedule: Any
    stages: list[Stage]
    boundaries: dict[int, Boundary]
    """The boundaries of this rank's partitions, by receiving partition."""


class Shapes:
    """The schedules and stages of one pipe, for the shapes that it used last.

    Args:
        site: the place of the pipe's partitions.
        wrapped: for each of this rank's partitions, the module that torch's stage calls.
    """

    def __init__(self, site: Site, wrapped: Mapping[int, nn.Module]) -> None:
        self._site = site
        self._wrapped = wrapped
        self._kept: OrderedDict[Any, Prepared] = OrderedDict()

    def prepare(
        self,
        brought: Sequence[Brought],
        running: dict[int, Running],
        settings: Settings,
        is_step: bool,
    ) -> Prepared:
        """Return torch's schedule and stages for these shapes, made if they are new.

        All replicas make theirs together, of the same kinds of micro-batch.
        """
        control = self._site.control
        signatures = tuple([brought[first].signatures for first, _ in self._site.ends])
        key = signatures, brought[0].settings, tuple([one.parameters for one in brought])
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        mine = signatures[self._site.number]
        # The first micro-batch of each kind that any replica has.
        firsts = sorted({each.index(one) for each in signatures for one in each})
        kinds = [mine[i] for i in firsts]
        samples = meet(control, running, self._site.homes, firsts)
        kind_numbers = [kinds.index(one) for one in mine]
        with control.agreeing():
            boundaries = {j: Boundary(j, found, kind_numbers) for j, found in samples.items()}
            stages = [self._stage(j, boundaries) for j in running]
            # The last partition computes the loss itself.
            loss_fn = (lambda loss, _: loss) if is_step else None
            schedule = make_schedule(settings.schedule, stages, len(mine), loss_fn)
            prepared = Prepared(schedule, stages, boundaries)
        self._kept[key] = prepared
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return prepared

    def _stage(self, j: int, boundaries: dict[int, Boundary]) -> Stage:
        site, loss = self._site, (torch.empty(1, device="meta"),)
        n = len(site.homes)
        xs = boundaries[j].metas if j else ()
        ys = boundaries[j + 1].metas if j < n - 1 else loss
        return Stage(self._wrapped[j], j, n, site.device, xs, ys, group=site.group)

    def __repr__(self) -> str:
        return f"<Shapes: {len(self._kept)}>"


@contextmanager
def attached(prepared: Prepared, running: dict[int, Running]) -> Iterator[None]:
    """Attach this mini-batch to the stages in the block; drop all they keep of it afterwards."""
    for stage in prepared.stages:
        j = stage.stage_index
        running[j].arriving = prepared.boundaries.get(j)
        running[j].leaving = prepared.boundaries.get(j + 1)
        stage.running = running[j]
        running[j].module.forward_micro_batch = running[j].forward
    try:
        yield
    finally:
        for stage in prepared.stages:
            stage.running.module.forward_micro_batch = None
            del stage.running
            stage.clear_runtime_states()
            for kept in (stage.bwd_cache, stage.backward_state, stage.dw_runner):
                kept.clear()
            for arrived in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                _renew(arrived)


def _renew(arrived: Sequence[Any]) -> None:
    """Replace receive buffers: outputs, and tensors that hooks keep, may still use their memory."""
    for info in arrived:
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            info.buffer = torch.empty_like(buffer, requires_grad=buffer.requires_grad)
