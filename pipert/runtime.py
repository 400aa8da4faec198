"""The engine of a pipe: its threads, and one mini-batch's way through them.

Guarantees:

* **R1** a result belongs to one run: each has queues and outputs of its own, and nothing survives
  it.
* **R2** when :meth:`Runtime.forward` returns, raises or is interrupted, no task of its run is
  queued or executing.
* **R3**, **R4** see ``progress``.
* **R5** after any failure the runtime is usable at once and holds no tensor of the failed run: it
  holds no run at all. Lanes reference the run's progress, not the other way round, so no cycle
  delays that.
* **R6** every wait notices a dead worker: its tasks are abandoned, and an abandoned task sends what
  its successor waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.batchnorm import DeferredStats
from pipert.clock import Posting
from pipert.device import assign_workers
from pipert.errors import ReentrantCallError
from pipert.lane import Lane
from pipert.progress import Progress
from pipert.queues.closable import ClosableQueue
from pipert.run import Run
from pipert.schedule import Schedule
from pipert.skip import store
from pipert.skip.routes import PartitionSkips
from pipert.stream import CopyStreams
from pipert.value import select
from pipert.workers.context import CallerContext
from pipert.workers.pool import Pool

__all__: list[str] = []

_log = logging.getLogger("pipert")

# The runtimes whose tasks the current code runs inside of, carried into workers like all variables.
# Each by an object that stands for it: a graph keeps its context, and would keep the runtime.
_inside: ContextVar[tuple[object, ...]] = ContextVar("pipert_inside", default=())


class Runtime:
    """Runs mini-batches through partitions.

    Args:
        partitions: each on its device already.
        devices: one for each partition.
        skips: of each partition.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        skips: Sequence[PartitionSkips],
    ) -> None:
        self._partitions = tuple(partitions)
        self.skips = tuple(skips)
        self._devices = tuple(devices)
        self._workers = assign_workers(list(devices))
        self._streams = CopyStreams()
        self._identity = object()
        served = [devices[self._workers.index(w)] for w in range(len(set(self._workers)))]
        names = [f"pipert-{device}-{w}" for w, device in enumerate(served)]
        self._cpu_workers = sum(device.type == "cpu" for device in served)
        self._clock = len(names)
        self.pool = Pool([*names, "pipert-clock"], [*served, torch.device("cpu")])

    def forward(
        self, inputs: list[Value], checkpointed: int, stats: DeferredStats | None = None
    ) -> list[Value]:
        """Compute all micro-batches; the first ``checkpointed`` of them with checkpointing.

        Args:
            inputs: what ``microbatch.scatter`` returns. Emptied as the run goes on.
            checkpointed: from 0 to ``len(inputs)``.
            stats: where running statistics are noted, if they are deferred.

        Returns:
            The last partition's output for each micro-batch.
        """
        if self._identity in _inside.get():
            raise ReentrantCallError(
                "a layer called the pipe that is running it, whose worker would wait for itself; "
                "call the layers it needs directly"
            )
        self.pool.start()
        run = self._run(inputs, checkpointed)
        progress = run.progress
        outputs: list[Value] = []
        lanes = self._lanes(run, inputs, outputs, stats)
        posting = Posting(lanes, self._workers, self.pool.put)
        try:
            self.pool.put(self._clock, posting)
            progress.wait()
        except BaseException:
            self._call_off(progress, posting)
            raise
        error = progress.take_error()
        if error is None:
            return outputs
        try:
            raise error
        finally:
            del error  # it references this frame

    def _call_off(self, progress: Progress, posting: Posting) -> None:
        """R2 for an interrupted caller: the layers that are executing cannot be interrupted."""
        while True:
            try:
                progress.cancel()
                # Again, since nobody knows how far the interrupted call came. It posts once.
                self.pool.put(self._clock, posting)
                progress.wait()
                progress.take_error()
                return
            except BaseException:  # noqa: B036  the first interrupt is being raised
                _log.warning("interrupted again; still waiting for the layers that are executing")

    def _run(self, inputs: list[Value], checkpointed: int) -> Run:
        on_cuda = {device for device in self._devices if device.type == "cuda"}
        on_cuda.update(tensor.device for tensor in select(inputs[0], _is_cuda)[0])
        context = CallerContext(list(on_cuda), self._cpu_workers)
        context.set_variable(_inside, (*_inside.get(), self._identity))
        context.set_variable(store.of_task, store.NEW)
        schedule = Schedule(len(inputs), len(self._partitions))
        return Run(schedule, checkpointed, self._devices, context, self._streams)

    def _lanes(
        self, run: Run, inputs: list[Value], outputs: list[Value], stats: DeferredStats | None
    ) -> list[Lane]:
        n = len(self._partitions)
        queues: list[ClosableQueue[Value]] = [ClosableQueue() for _ in range(n - 1)]
        return [
            Lane(
                run,
                j,
                self._partitions[j],
                self.skips[j],
                stats.partitions[j] if stats else None,
                queues[j - 1] if j > 0 else inputs,
                queues[j].put if j < n - 1 else outputs.append,
            )
            for j in range(n)
        ]

    def close(self) -> None:
        """End the threads; join them, unless a task of this runtime is what calls."""
        self.pool.close(join=self._identity not in _inside.get())

    def __repr__(self) -> str:
        return f"<Runtime of {len(self._partitions)} partitions, {self.pool!r}>"


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda
