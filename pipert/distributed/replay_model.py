"""Runs any model over ranks: its partitions are computed by replays of its own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipert._torch import has_hooks
from pipert._typing import Value
from pipert.any_model.checkpointed_calls import checkpointed_call
from pipert.any_model.map_tensors import map_tensors
from pipert.batch.tensors import tensors_of
from pipert.distributed.placeholders import forward_replaced, inputs_unchanged
from pipert.distributed.rank_partition import RankBatch
from pipert.distributed.replay import Replay
from pipert.distributed.replay_plan import ReplayPlan, event_drawing
from pipert.layers.call import Layers
from pipert.layers.phase import is_recomputing
from pipert.layers.place import Place, describe_layer
from pipert.layers.segments import Segments
from pipert.model.calls import unchanged


@dataclass(eq=False)
class ReplayModel:
    """A model that keeps its own forward."""

    plan: ReplayPlan
    inputs: str

    def prepare(self, batch: RankBatch) -> Sequence[int]:
        """Find the records of the micro-batches; return those that need values to be recorded."""
        seed, first = batch.seed.number or 0, dict[Any, int]()
        for i, x in enumerate(batch.inputs):
            record = self.plan.record(i, x, seed)
            batch.records.append(record)
            if record is None:
                first.setdefault(self.plan.key(x), i)
        return [*first.values()]

    def note(self, batch: RankBatch, i: int, seen: Sequence[list[Any]]) -> None:
        """Make the record of micro-batch ``i``, and of those like it, from what ranks have seen."""
        self.plan.note(batch.inputs[i], [pair for of_rank in seen for pair in of_rank])
        seed = batch.seed.number or 0
        batch.records[:] = [self.plan.record(k, x, seed) for k, x in enumerate(batch.inputs)]

    def unchanged(self) -> AbstractContextManager[object]:
        """Return a block that restores the model's buffers."""
        return unchanged(self.plan.cuts.model)

    def computing(self, place: Place, layers: Layers, batch: RankBatch) -> ReplayComputing:
        """Return what computes a partition in a mini-batch."""
        return ReplayComputing(self.plan, place, layers, batch)


@dataclass(eq=False)
class ReplayComputing:
    """Computes one partition in a mini-batch by replays."""

    plan: ReplayPlan
    place: Place
    layers: Layers
    batch: RankBatch

    def forward(self, i: int, x: Value) -> Value:
        """Replay the forward of micro-batch ``i``, of which ``x`` has arrived."""
        batch, cuts, device = self.batch, self.plan.cuts, self.place.device
        drawing = event_drawing(batch.seed, i, device)
        segments = self.layers.segments(i) if i < batch.recomputed else None
        compute = partial(self._call, i, segments, drawing)
        replay = Replay(cuts, self.place.j, device, drawing, compute, batch.records[i])
        if self.place.j:
            replay.receive(*x)
        with inputs_unchanged(batch.inputs[i]):
            y = replay.run(cuts.model, batch.inputs[i])
        if batch.records[i] is None:
            self.plan.refuse_changed_buffers(replay)
            batch.seen.append((replay.made, replay.used))
        return y

    def _call(
        self, i: int, segments: Segments | None, drawing: Callable[[int], Any], module: nn.Module,
        event: int, call: Callable[..., Any], args: Any, kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        with drawing(event):
            if segments is None or not self.layers.recomputes(module):
                return self.layers.call_locked(module, call, *args, **kwargs)
            self.layers.refuse_replaced(module)
            again = partial(self._checkpoint, i, segments, module, partial(drawing, event))
            if not has_hooks(module):
                return again(call, *args, **kwargs)
            # Hooks stay outside, since the own code may use what they collect.
            with forward_replaced(module, partial(again, module.forward)):
                return call(*args, **kwargs)

    def _checkpoint(
        self, i: int, segments: Segments, module: nn.Module, drawing: Callable[[], Any],
        call: Callable[..., Any], /, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Call a layer to be recomputed; what it returns of its arguments stays the same tensor."""
        given = {id(tensor): tensor for tensor in tensors_of((args, kwargs))[0]}
        returned: list[Tensor] = []

        def noting(*args: Any, **kwargs: Any) -> Any:
            y = call(*args, **kwargs)
            if not is_recomputing():
                returned[:] = tensors_of(y)[0]
            return y

        name = describe_layer(self.plan.cuts.layers[module], module)
        compute = partial(self.layers.call_layer, i, module, name, noting)
        y = checkpointed_call(segments, name, compute, drawing, args, kwargs)
        tensors = tensors_of(y)[0]
        same = {
            id(tensor): given[id(one)]
            for tensor, one in zip(tensors, returned, strict=True)
            if id(one) in given
        }
        returned.clear()
        return map_tensors(y, lambda t: same.get(id(t), t)) if same else y

    def backward(self, i: int, go_back: Callable[[], Any]) -> None:
        """Differentiate under the random numbers of the backward."""
        self.layers.backward(i, go_back)
