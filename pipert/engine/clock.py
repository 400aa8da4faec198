"""Posts the actions of a run to the workers' in-queues, in the order of its plan.

The clock thread fixes the total order and does not wait for a diagonal to finish: a worker starts
``F[i,j]`` the moment its input arrives. The clock is a separate thread, so that the runs of several
callers are posted whole, one after the other, and overlap in the pipeline (section 3.2.1 of the
paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipert.queues.closable import Once
from pipert.stage.stage import Stage
from pipert.stage.stage import Task as StageTask
from pipert.workers.worker import Task


class Posting:
    """The clock's task for one run. Posts or abandons the run once, however often it is put.

    The tasks of ``stages`` go to ``put``, which hands them to workers or abandons them.
    """

    def __init__(self, stages: Sequence[Stage], put: Callable[[int, Task], None]) -> None:
        self.stages = stages
        self.is_done = False  # whether all tasks are posted
        self._put = put
        self._due = Once((stages[0].run.plan,))  # taken by whoever posts or abandons the run
        self.what = stages[0].run.number, stages[0].run.plan.order[0]

    def receive(self) -> Any:
        return ()

    def execute(self, received: Any) -> Any:
        put, stages = self._put, self.stages
        for plan in self._due.take() or ():
            for action in plan.order:
                put(plan.placement[action.j], StageTask(stages[action.j], action))
            self.is_done = True
        return ()

    def send(self, result: Any) -> None:
        """Do nothing: nobody waits for the clock."""

    def abandon(self, error: BaseException) -> None:
        for plan in self._due.take() or ():
            for action in plan.order:
                StageTask(self.stages[action.j], action).abandon(error)
            self.is_done = True
