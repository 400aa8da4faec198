"""Lists breakages of guarantees of the queues, the workers and the runs (docs/design.md).

Each says which promise is broken, so that it can be moved along when the code that keeps the
promise moves.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

BREAKAGES = [
    Mutant(
        "queue-loses-an-item", "pipert/queues/closable.py",
        "an item put while the queue closes is neither received nor returned nor refused (Q1)",
        "if self._closed and cell.take() is not None:", "if False:",
        ("tests/queues/test_closable.py",),
    ),
    Mutant(
        "idle-worker-keeps-its-task", "pipert/workers/worker.py",
        "a worker that waits for its next task still references the last one, and so its tensors "
        "(W2)",
        "task = value = None  # W2", "last, task, value = task, None, None  # noqa: F841",
        ("tests/workers/test_worker.py",),
    ),
    Mutant(
        "autocast-lost", "pipert/workers/context.py",
        "tasks run without the caller's autocast, in float32 (W4)",
        "stack.enter_context(autocast(self._autocast, clear_cache))", "pass",
        ("tests/contract/test_callers_context.py",),
    ),
    Mutant(
        "untrusted-worker-goes-on", "pipert/stage/stage.py",
        "a worker hit by an exception while it entered or left the caller's context goes on, and "
        "autocast may be on in its next tasks (W4)",
        "            self._fail(error)\n            raise\n",
        "            return self._fail(error)\n",
        ("tests/faults/test_dying_workers.py",),
    ),
    Mutant(
        "interrupt-does-not-wait", "pipert/engine/waiting.py",
        "an interrupted call returns while tasks of its run are still executing (R2)",
        "if not self._wait(run, posting, threads, 0.0 if interrupts > 1 else timeout):",
        "if False:",
        ("tests/test_runtime.py", "tests/faults/test_interrupts.py"),
    ),
    Mutant(
        "first-error-in-time", "pipert/stage/outcome.py",
        "of several failures the earliest in time is raised, not the first in schedule order (R3)",
        "errors[min(errors)] if errors", "errors[next(iter(errors))] if errors",
        ("tests/contract/test_first_error.py",),
    ),
    Mutant(
        "tasks-start-after-a-failure", "pipert/stage/outcome.py",
        "tasks after a failed one in the schedule are still executed if they have their input (R4)",
        "self.failed_at = min(self.failed_at, position)", "pass",
        ("tests/test_runtime.py",),
    ),
    Mutant(
        "join-ties-nothing", "pipert/autograd/order.py",
        "the backward of a micro-batch does not wait for that of the next one: the token is "
        "dropped",
        "join = applied(_Join)", "join = lambda token, *xs: xs  # noqa: E731",
        ("tests/autograd/test_order.py",),
    ),
]  # fmt: skip
