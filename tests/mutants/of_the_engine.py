"""Lists breakages of the engine: workers' loops, runs, steps, schedules, observers.

Each description is in terms of the contract, so that the breakage can be moved along when the code
that keeps the contract moves.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

WORKER, CONTEXT = "pipert/workers/worker.py", "pipert/workers/context.py"
RUNTIME, WAITING = "pipert/engine/runtime.py", "pipert/engine/waiting.py"
STAGE, STEP = "pipert/stage/stage.py", "pipert/stage/step.py"

OF_WORKERS = [
    Mutant(
        "idle-worker-keeps-its-task", WORKER,
        "a worker that waits for its next task still references the last one, and so its tensors "
        "(W2)",
        "task = value = None  # W2", "last, task, value = task, None, None  # noqa: F841",
        ("tests/workers/test_worker.py",),
    ),
    Mutant(
        "threads-nameless-outside", WORKER,
        "the operating system does not learn the names of the workers' threads (P6)",
        "set_thread_name(name[:15])  # what Linux takes", "pass",
        ("tests/workers/test_pool.py",),
    ),
    Mutant(
        "autocast-lost", CONTEXT,
        "tasks run without the caller's autocast, in float32 (W4)",
        "stack.enter_context(autocast(self._autocast, clear_cache))", "pass",
        ("tests/contract/test_callers_context.py",),
    ),
]  # fmt: skip

OF_RUNS = [
    Mutant(
        "untrusted-worker-goes-on", STAGE,
        "a worker hit by an exception while it entered or left the caller's context goes on, and "
        "autocast may be on in its next tasks (W4)",
        "            self._fail(error)\n            raise\n",
        "            return self._fail(error)\n",
        ("tests/faults/test_dying_workers.py",),
    ),
    Mutant(
        "first-error-in-time", "pipert/stage/outcome.py",
        "of several failures the earliest in time is raised, not the first in schedule order (R3)",
        "errors[min(errors)] if errors", "errors[next(iter(errors))] if errors",
        ("tests/contract/test_first_error.py",),
    ),
    Mutant(
        "tasks-start-after-a-failure", STAGE,
        "tasks after a failed one in the schedule are still executed if they have their input (R4)",
        """\
        if self._position >= self._stage.outcome.failed_at:
            return NOT_RUN
        try:
            received = self._how.receive(self._action.i)
        except BaseException as error:  # noqa: B036  raised in the caller
            return self._fail(error)
        # Checked again, since it may have waited for long; a task left out here is not counted.
        return received if self._position < self._stage.outcome.failed_at else NOT_RUN
""",
        """\
        try:
            received = self._how.receive(self._action.i)
        except BaseException as error:  # noqa: B036  raised in the caller
            return self._fail(error)
        return received
""",
        ("tests/test_runtime.py",),
    ),
    Mutant(
        "interrupt-does-not-wait", WAITING,
        "an interrupted call returns while tasks of its run are still executing (R2)",
        "if not self._wait(run, posting, threads, 0.0 if interrupts > 1 else timeout):",
        "if False:",
        ("tests/test_runtime.py", "tests/faults/test_interrupts.py"),
    ),
    Mutant(
        "except-last-of-those-asked-for", "pipert/pipes/base.py",
        "`except_last` counts the requested chunks: with fewer rows the last micro-batch is "
        "recomputed, too",
        "recomputed_in_each(self.checkpoint, len(inputs), len(self._partitions))",
        "recomputed_in_each(self.checkpoint, self._chunks, len(self._partitions))",
        ("tests/test_microbatch.py", "tests/layers/test_call.py"),
    ),
]  # fmt: skip

OF_STEPS = [
    Mutant(
        "gradients-of-a-failed-step", RUNTIME,
        "a step that fails adds the gradients summed so far to `.grad`",
        "            self._execute(run, Posting(stages, self.pool.put), threads, timeout)\n"
        "            try:",
        """\
            try:
                self._execute(run, Posting(stages, self.pool.put), threads, timeout)
            except Exception:
                step.commit([stage.cut.gradients for stage in stages if stage.cut is not None])
                raise
            try:""",
        ("tests/contract/test_faults.py", "tests/step/test_step_errors.py"),
    ),
    Mutant(
        "hooks-see-parts", STEP,
        "gradients of a step are delivered separately: the hook of a parameter that partitions "
        "share sees the share of each",
        "for end in [delivery(arriving) for arriving in turns if arriving]:",
        "for end in [delivery([one]) for arriving in turns for one in arriving]:",
        ("tests/contract/test_hooks_are_called.py",),
    ),
    Mutant(
        "losses-count-alike", "pipert/stage/loss.py",
        "the loss of a mini-batch is the unweighted mean over its micro-batches, though these "
        "differ in rows",
        "weight / total for weight in weights", "1 / len(weights) for weight in weights",
        ("tests/step/test_equals_plain.py",),
    ),
    Mutant(
        "caller-s-graph-freed", "pipert/stage/backward.py",
        "the first micro-batch that goes backward through a graph of the caller's frees it",
        "retain_graph=bool(behind.others)", "retain_graph=False",
        ("tests/step/test_graphs_of_the_caller.py",),
    ),
    Mutant(
        "gradients-share-memory", "pipert/stage/gradients.py",
        "a gradient of one micro-batch becomes `.grad` though others have its memory, too",
        "copy=not self.is_own", "copy=False",
        ("tests/step/test_gradients.py",),
    ),
    Mutant(
        "casts-of-other-threads", "pipert/autograd/leaves.py",
        "the cast of a weight that autocast shares belongs to another graph than the user's (V2)",
        "others = [node for node in strange if not is_cast_of_leaf(node)]", "others = strange",
        ("tests/autograd/test_leaves.py",),
    ),
    Mutant(
        "casts-left-behind", "pipert/any_model/checkpointed_calls.py",
        "a call recomputed under the model's own autocast leaves its casts to the next step",
        "autocast((False, self._autocast[1]), False)", "autocast(self._autocast, False)",
        ("tests/contract/test_autocast.py",),
    ),
    Mutant(
        "denominator-lost", "pipert/stage/loss.py",
        "gradients are not divided by the denominator",
        "factor = factor / self._denominator", "pass",
        ("tests/step/test_denominator.py",),
    ),
    Mutant(
        "failed-after-its-tasks", RUNTIME,
        "a step whose gradients cannot be delivered counts as successful",
        'notifier.outcome = "failed"  # but no task has, so none is reported to observers',
        'notifier.outcome = "succeeded"',
        ("tests/step/test_step_seen.py",),
    ),
    Mutant(
        "1f1b-keeps-more", "pipert/schedules/one_f_one_b.py",
        "under 1F1B every partition keeps n micro-batches, not n - j",
        "_keeping(m, [n - j for j in range(n)], placement)",
        "_keeping(m, [n for j in range(n)], placement)",
        ("tests/properties/test_any_plan.py", "tests/schedules/test_plan.py"),
    ),
    Mutant(
        "failing-observer-stays", "pipert/observe/notifier.py",
        "an observer that raises still gets every later event, and fills the log",
        "                self._observers.pop(id(observer), None)\n", "",
        ("tests/test_observe.py",),
    ),
]  # fmt: skip

BREAKAGES = [*OF_WORKERS, *OF_RUNS, *OF_STEPS]
