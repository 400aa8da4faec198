"""``R[i,j]`` of a step, in which it is an action. In a call it is a node of the graph."""

from __future__ import annotations

from pipert._typing import Value
from pipert.stage.links import NOWHERE
from pipert.stage.stage import How, Stage

__all__: list[str] = []


def recompute(stage: Stage) -> How:
    """Carry out ``R`` in this stage."""
    return How(NOWHERE.receive, stage.run.context.on_worker, _execute, NOWHERE.send)


def _execute(stage: Stage, i: int, _: Value) -> None:
    cut = stage.cut
    assert cut is not None
    kept = cut.kept.get(i)
    if kept is not None and kept.checkpoint is not None:
        kept.checkpoint.recompute(on_worker=True)
        # From now on it belongs to its slots, and goes with the last of them.
        cut.kept[i] = kept._replace(checkpoint=None)
