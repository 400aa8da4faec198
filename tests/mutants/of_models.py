"""Lists breakages around users' models: skips, layers, placing, balancing, and measuring."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BREAKAGES"]

ROUTES, STORE = "pipert/skip/routes.py", "pipert/skip/store.py"
RANDOM, BUFFERS = "pipert/layers/random_numbers.py", "pipert/layers/buffers.py"
EFFECTS = "pipert/layers/effects.py"
NORM, TIED = "pipert/layers/batchnorm.py", "pipert/layers/tied.py"
SPLIT, DEVICES = "pipert/model/split.py", "pipert/model/devices.py"

OF_SKIPS = [
    Mutant(
        "skip-for-the-first-alone", ROUTES,
        "a skip that several partitions pop is sent only to the first of them",
        "for k in sorted(pops[key]) if k != j]", "for k in sorted({*pops[key]} - {j})[:1]]",
        ("tests/contract/test_skips.py",),
    ),
    Mutant(
        "skips-not-cleared", STORE,
        "skips that a task stashed and nothing popped stay in the context in which it ran",
        "        self._values.clear()", "        pass",
        ("tests/skip/test_lifecycle.py",),
    ),
    Mutant(
        "skip-changed-unnoticed", STORE,
        "a skip modified in place after it was stashed is popped all the same",
        "if _versions(self._tensors) != self._versions:", "if False:",
        ("tests/skip/test_values_in_pipe.py",),
    ),
]  # fmt: skip

OF_LAYERS = [
    Mutant(
        "recomputation-draws-others", RANDOM,
        "a run draws a new seed for each task, so a recomputation draws other numbers than its "
        "forward",
        "_mix(run.number ^ _mix(number))", "id(self)",
        ("tests/autograd/test_random.py",),
    ),
    Mutant(
        "generator-not-moved", RANDOM,
        "a run does not advance the caller's generator, so the next run draws the same numbers",
        "if self.used or states is None:", "if states is None:",
        ("tests/autograd/test_random.py",),
    ),
    Mutant(
        "state-of-others-seen", "pipert/layers/cpu_draws.py",
        "a layer saves and restores the state of the generator that all threads share",
        "torch.default_generator if task is None else task.generator(CPU)",
        "torch.default_generator",
        ("tests/layers/test_saved_states.py",),
    ),
    Mutant(
        "statistics-updated-again", BUFFERS,
        "a recomputation updates running statistics a second time",
        "if self._may_change(buffer):", "if False:",
        ("tests/layers/test_buffers.py",),
    ),
    Mutant(
        "copies-found-by-others", BUFFERS,
        "another caller's forward finds the copies of buffers that a recomputation has",
        "if _run.get() is None:", "if True:\n        return NOTHING\n    if _run.get() is None:",
        ("tests/layers/test_buffers.py",),
    ),
    Mutant(
        "other-values-unnoticed", EFFECTS,
        "a recomputation that returns other values than its forward is not refused",
        "        if found:\n", "        if False:\n",
        ("tests/layers/test_effects.py",),
    ),
    Mutant(
        "other-nan-unnoticed", EFFECTS,
        "a recomputation that returns nan where its forward did not is not refused",
        "before.isnan() & after.isnan()", "after.isnan()",
        ("tests/layers/test_effects.py",),
    ),
    Mutant(
        "copy-not-handed-on", TIED,
        "a layer that passes a borrowed weight as a keyword argument passes the one on the other "
        "device",
        "**self._swap(kwargs or {})", "**(kwargs or {})",
        ("tests/test_tied.py",),
    ),
    Mutant(
        "variance-within-alone", NORM,
        "the deferred running variance leaves out the variance between the means of micro-batches",
        " + (note.mean - mean) ** 2 * note.rows", "",
        ("tests/test_batchnorm.py",),
    ),
]  # fmt: skip

OF_MODELS = [
    Mutant(
        "layers-left-over", SPLIT,
        "a balance that sums to less than the number of layers is accepted, and the last layers "
        "never run",
        "if sum(balance) != layers:", "if sum(balance) > layers:",
        ("tests/test_pipe.py",),
    ),
    Mutant(
        "one-cpu-worker", DEVICES,
        "all 'cpu' entries of devices share one worker, so nothing runs concurrently",
        'object() if device == torch.device("cpu") else device for device', "device for device",
        ("tests/test_device.py",),
    ),
    Mutant(
        "shared-parameter-moves-on", SPLIT,
        "a parameter that several partitions use is moved to the device of the last one",
        "        if shared or buffers:\n", "        if False:\n",
        ("tests/test_partition.py",),
    ),
    Mutant(
        "containers-are-layers", "pipert/model/cuts.py",
        "a list of layers that is never called counts as a layer, and its elements are placed "
        "nowhere",
        "if is_called(module) and cut_modules", "if cut_modules",
        ("tests/model/test_cuts.py",),
    ),
]  # fmt: skip

OF_MEASURES = [
    Mutant(
        "own-code-for-nothing", "pipert/balance/calls.py",
        "the backward of a loss inside the model counts for no partition",
        "Cost(seconds, 2 * seconds, 2 * seconds)", "Cost(seconds)",
        ("tests/balance/test_calls.py",),
    ),
    Mutant(
        "back-to-other-layers", "pipert/balance/measure.py",
        "the backward of a layer that uses what another layer has kept goes on through that layer, "
        "too, and fails",
        "torch.autograd.grad, roots, wanted, ones, allow_unused=True",
        "torch.autograd.backward, roots, ones",
        ("tests/balance/test_calls.py",),
    ),
    Mutant(
        "search-ends-early", "pipert/balance/blocks.py",
        "the search for a balance ends before it has found the best one",
        "least > found[0] or", "least > 0 or",
        ("tests/balance/test_by_cost.py",),
    ),
    Mutant(
        "inner-interval-cuts", "pipert/timeline/intervals.py",
        "a device counts as idle after a short task inside a longer one",
        "max(end, merged[-1][1])", "end",
        ("tests/timeline/test_report.py",),
    ),
    Mutant(
        "metrics-keep-the-pipe", "pipert/prometheus.py",
        "a pipe whose metrics are shown is never dropped, and its threads never end",
        "(weakref.ref(pipe), durations)", "(lambda: pipe, durations)",
        ("tests/test_prometheus.py",),
    ),
    Mutant(
        "note-hides-the-error", "pipert/errors.py",
        "if the note of an error cannot be made, the error from making it replaces the first one",
        "    except Exception:\n", "    except ZeroDivisionError:\n",
        ("tests/faults/test_hooks.py",),
    ),
]  # fmt: skip

BREAKAGES = [*OF_SKIPS, *OF_LAYERS, *OF_MODELS, *OF_MEASURES]
