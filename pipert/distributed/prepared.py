"""torch's stages and schedule for a shape: made when ranks meet it, kept for the next time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert.distributed.asked import Brought, Settings, Site
from pipert.distributed.boundary import Boundary
from pipert.distributed.meeting import meet
from pipert.distributed.schedules import make_schedule
from pipert.distributed.stages import Running
from pipert.distributed.torch_stage import Stage

__all__: list[str] = []

_KEPT = 8  # shapes whose stages are kept, each with buffers for all micro-batches


class Prepared(NamedTuple):
    """What is kept for mini-batches of one shape."""

    schedule: Any
    stages: list[Stage]
    boundaries: dict[int, Boundary]
    """Those of this rank's partitions, by the partition that receives."""


class Shapes:
    """What is kept of the shapes of one pipe.

    Args:
        site: where its partitions are.
        wrapped: what torch's stages run for each of this rank's.
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
        """torch's schedule and stages for these shapes, in all replicas alike."""
        control = self._site.control
        looks = tuple([brought[first].signatures for first, _ in self._site.ends])
        key = looks, brought[0].settings, tuple([one.parameters for one in brought])
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        mine = looks[self._site.number]
        firsts = sorted({of.index(look) for of in looks for look in of})  # of kinds, anywhere
        kinds = [mine[i] for i in firsts]
        samples = meet(control, running, self._site.homes, firsts)
        numbers = [kinds.index(look) for look in mine]
        with control.agreeing():
            boundaries = {j: Boundary(j, found, numbers) for j, found in samples.items()}
            stages = [self._stage(j, boundaries) for j in running]
            loss_fn = _as_it_is if is_step else None
            schedule = make_schedule(settings.schedule, stages, len(mine), loss_fn)
            prepared = Prepared(schedule, stages, boundaries)
        self._kept[key] = prepared
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return prepared

    def _stage(self, j: int, boundaries: dict[int, Boundary]) -> Stage:
        site, result = self._site, (torch.empty(1, device="meta"),)
        n = len(site.homes)
        arriving = boundaries[j].metas if j else ()
        leaving = boundaries[j + 1].metas if j < n - 1 else result
        run = self._wrapped[j]
        return Stage(run, j, n, site.device, arriving, leaving, group=site.group)

    def __repr__(self) -> str:
        return f"<Shapes: {len(self._kept)}>"


@contextmanager
def attached(prepared: Prepared, running: dict[int, Running]) -> Iterator[None]:
    """Let the stages run this mini-batch in the block, and keep nothing of it afterwards."""
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
    """Let the next mini-batch arrive in other memory: outputs, or what hooks keep, are in this."""
    for info in arrived:
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            info.buffer = torch.empty_like(buffer, requires_grad=buffer.requires_grad)


def _as_it_is(output: Tensor, _: Tensor) -> Tensor:
    """The loss, which the last partition computes itself."""
    return output
