"""The actions of a model with its own ``forward``.

``F[i,j]`` hands off its partition to a micro-batch thread. The others are as for layers that are
called one by one.
"""

from __future__ import annotations

import threading
from typing import Any

from pipert._typing import Value
from pipert.any_model.around_layers import ModelRun
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.any_model.microbatch_thread import MicroBatchThreads
from pipert.errors import SharedStateWarning, add_note
from pipert.schedules.action import FORWARD
from pipert.stage.actions import ACTIONS, Actions
from pipert.stage.stage import Stage


class ModelActions:
    """Carries out the actions of one run."""

    def __init__(self, model_run: ModelRun, threads: MicroBatchThreads) -> None:
        self._model_run = model_run
        self._threads = threads
        self._microbatches: dict[int, MicroBatchForward] = {}

    def table(self) -> Actions:
        """Return the function that carries out each kind of action."""
        return {**ACTIONS, FORWARD: self.forward}

    def forward(self, stage: Stage, i: int, x: Value) -> Value:
        """Carry out ``F[i,j]``: hand off to micro-batch ``i``, which partition 0 starts."""
        if stage.place.j == 0:
            microbatch = MicroBatchForward(self._model_run, i, x, self._threads.release)
            self._microbatches[i] = microbatch
            self._threads.start(microbatch)
        microbatch = self._microbatches[i]
        worker: Any = threading.current_thread()
        worker.executed_by = microbatch.thread
        try:
            return microbatch.hand_off(stage)
        finally:
            worker.executed_by = None

    def finish(self) -> None:
        """End each ``forward`` and wait for them, however the run ended (H3). In the caller."""
        microbatches = list(self._microbatches.values())
        for microbatch in microbatches:
            microbatch.unwind()
        if not self._model_run.run.dropped:
            for microbatch in microbatches:
                microbatch.wait()
        if (inspection := self._model_run.inspection) is not None:
            error = self._model_run.run.outcome.first_error()
            if error is not None and not isinstance(error, SharedStateWarning):
                add_note(error, inspection.note)
        self._microbatches.clear()
        self._model_run.clear()
