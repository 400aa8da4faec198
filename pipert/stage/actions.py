"""Maps each kind of action to the function that tells how a stage carries it out."""

from __future__ import annotations

from collections.abc import Callable

from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE
from pipert.stage.backward import backward
from pipert.stage.forward import compute_layers, forward
from pipert.stage.recompute import recompute
from pipert.stage.recorded import recorded_forward
from pipert.stage.stage import How, Stage

__all__: list[str] = []


def _forward(stage: Stage) -> How:
    if stage.run.notifier.recorder is None:
        return forward(stage, compute_layers)
    return recorded_forward(stage)


Actions = dict[str, Callable[[Stage], How]]

ACTIONS: Actions = {
    FORWARD: _forward,
    RECOMPUTE: recompute,
    BACKWARD: backward,
}
"""One row per kind of action. A row of ``schedules.action.RULES`` says what it depends on."""
