"""Carries out ``R[i,j]`` of a step. In a call, ``R[i,j]`` is a node of the graph."""

from __future__ import annotations

from pipert._typing import Value
from pipert.stage.links import NOWHERE
from pipert.stage.stage import How, Stage

__all__: list[str] = []


def recompute(stage: Stage) -> How:
    """Return how ``stage`` carries out ``R``."""
    return How(NOWHERE.receive, stage.run.context.on_worker, _execute, NOWHERE.send)


def _execute(stage: Stage, i: int, _: Value) -> None:
    cut = stage.cut
    assert cut is not None
    kept = cut.kept.get(i)
    if kept is not None and kept.recomputation is not None:
        graph = kept.recomputation.compute(True)
        cut.kept[i] = kept._replace(graphs=(*kept.graphs, graph), recomputation=None)
