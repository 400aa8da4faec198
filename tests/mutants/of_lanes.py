"""Mutants of the lanes: of what each asks of streams, in a call and in a step."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

LANE, STEP = "pipert/stage/lane.py", "pipert/stage/step_lane.py"

_COMPUTE_WAITS = "return self._wait(i, x, stream.compute_stream(self._device), copied)"
_COPY_WAITS = "y = self._wait(i, y, copying, stream.compute_stream(self._device))"
_LOSS_WAITS = "self._wait(i, target, stream.compute_stream(self._device), copied)"
_GRADIENT_WAITS = "self._wait(i, moved, stream.compute_stream(self._device), copied)"
_LET_COPY = "stream.wait(copying, stream.compute_stream(self._device))"

OF_CALLS = [
    Mutant(
        "compute-not-after-copy", LANE, "compute waits for the copies of a task's inputs",
        "x = self._wait_for(i, copied, x)", "pass",
    ),
    Mutant(
        "compute-not-after-weights", LANE, "compute waits for copies of borrowed weights",
        "(copy,) = self._wait_for(i, copied, (copy,))", "pass",
    ),
    Mutant(
        "skips-not-waited-for", LANE, "the wait for skips, beside that for the value",
        "skips = [self._wait_for(i, copied, skip) for skip in x.skips]", "skips = list(x.skips)",
    ),
    Mutant(
        "value-not-waited-for", LANE, "the wait for the value, beside that for skips",
        "return Carried(self._wait_for(i, copied, x.value), tuple(skips))",
        "return Carried(x.value, tuple(skips))",
    ),
    Mutant(
        "copy-waits-for-compute", LANE, "the direction of compute's wait for a copy",
        _COMPUTE_WAITS,
        "return self._wait(i, x, copied, stream.compute_stream(self._device))",
    ),
    Mutant(
        "no-wait-without-graph", LANE, "waits for values that need no gradient",
        "stream.wait(waiter, awaited)\n            return x", "return x",
    ),
    Mutant(
        "no-wait-back", LANE, "the waits of the backward: only the forward waits",
        "return rebuild(transfer.wait(xs, waiter, awaited))",
        "stream.wait(waiter, awaited)\n        return x",
    ),
    Mutant(
        "copy-not-after-compute", LANE, "the copy of an output waits for compute",
        _COPY_WAITS, "pass",
    ),
    Mutant(
        "compute-waits-to-be-copied", LANE, "the direction of the copy's wait for compute",
        _COPY_WAITS,
        "y = self._wait(i, y, stream.compute_stream(self._device), copying)",
    ),
    Mutant(
        "copy-of-another-waits", LANE, "the copy stream of this micro-batch, to wait for compute",
        "copying = self._run.streams.get(self._device, i)",
        "copying = self._run.streams.get(self._device, i + 1)",
    ),
    Mutant(
        "arguments-await-own-device", LANE, "the device of the arguments, whose caller is awaited",
        "compute = stream.compute_stream(device)",
        "compute = stream.compute_stream(self._device)",
    ),
    Mutant(
        "skips-are-not-copied", LANE, "the copy's wait where only a skip is copied from",
        "readers = [*range(len(run.devices))[j + 1 : j + 2], *(k for _, k in skips.leaving)]",
        "readers = [*range(len(run.devices))[j + 1 : j + 2]]",
    ),
    Mutant(
        "values-are-not-copied", LANE, "the copy's wait where only the value is copied from",
        "readers = [*range(len(run.devices))[j + 1 : j + 2], *(k for _, k in skips.leaving)]",
        "readers = [*(k for _, k in skips.leaving)]",
    ),
    Mutant(
        "target-is-compute", LANE, "the copy stream that values are written on",
        "target = self._run.streams.get(home, i)", "target = stream.compute_stream(home)",
    ),
    Mutant(
        "source-is-compute", LANE, "the copy stream that values are read on",
        "source = self._run.streams.get(device, i)", "source = stream.compute_stream(device)",
    ),
    Mutant(
        "read-and-not-noted", LANE, "the note of what is read of the caller's",
        "self._run.sources[device, i] = source", "pass",
    ),
    Mutant(
        "target-of-another", LANE, "the copy stream of this micro-batch, for writing",
        "target = self._run.streams.get(home, i)", "target = self._run.streams.get(home, i + 1)",
    ),
    Mutant(
        "source-of-another", LANE, "the copy stream of this micro-batch, for reading",
        "source = self._run.streams.get(device, i)",
        "source = self._run.streams.get(device, i + 1)",
    ),
    Mutant(
        "last-skip-decides", LANE, "the wait for a skip, if the next one was not copied",
        "copied = copied or target", "copied = target",
    ),
    Mutant(
        "copied-skips-forgotten", LANE, "the wait for skips, if the value was not copied",
        "tuple(skips)), copied or target", "tuple(skips)), target",
    ),
    Mutant(
        "copied-value-forgotten", LANE, "the wait for the value, if no skip was copied",
        "tuple(skips)), copied or target", "tuple(skips)), copied",
    ),
    Mutant(
        "arguments-not-awaited", LANE, "the copy of arguments waits for the caller",
        "moving = self._wait_for_input(device, moving, source, in_graph)", "pass",
    ),
    Mutant(
        "arguments-in-graph-not-awaited", LANE,
        "the copy of arguments in the graph waits for the caller",
        "return transfer.wait(tensors, source, compute)", "return tensors",
    ),
    Mutant(
        "caller-not-after-dx", LANE, "the caller waits for the gradients of arguments",
        "return transfer.wait(tensors, source, compute)",
        "stream.wait(source, compute)\n            return tensors",
    ),
    Mutant(
        "arguments-without-graph-not-awaited", LANE,
        "the copy of arguments without gradient waits for the caller",
        "stream.wait(source, compute)\n        return tensors", "return tensors",
    ),
    Mutant(
        "move-swapped", LANE, "source and target of a copy: swapped",
        "return move(tensors, self._device, source, target)",
        "return move(tensors, self._device, target, source)",
    ),
]  # fmt: skip

OF_STEPS = [
    Mutant(
        "step-not-after-weights", STEP, "compute waits for copies of borrowed weights",
        "stream.wait(stream.compute_stream(self._device), copied)", "pass",
    ),
    Mutant(
        "step-no-wait", STEP, "compute waits for copies: of values, targets and gradients",
        "stream.wait(waiter, awaited)", "pass",
    ),
    Mutant(
        "step-arguments-not-awaited", STEP, "the copy of arguments waits for the caller",
        "stream.wait(source, stream.compute_stream(device))", "pass",
    ),
    Mutant(
        "step-move-swapped", STEP, "source and target of a copy: swapped",
        "moved = stream.copy(plain, self._device, source, target)",
        "moved = stream.copy(plain, self._device, target, source)",
    ),
    Mutant(
        "loss-not-after-target", STEP, "the loss waits for the copy of the target",
        _LOSS_WAITS, "pass",
    ),
    Mutant(
        "output-not-after-compute", STEP, "the copy of an output waits for compute",
        "self._let_copy(i)\n        ys, rebuild", "ys, rebuild",
    ),
    Mutant(
        "gradient-not-after-compute", STEP, "the copy of a gradient waits for compute",
        "self._let_copy(i)  # before the sums: the copy needs none of them", "pass",
    ),
    Mutant(
        "step-copy-not-after-compute", STEP, "copies wait for compute",
        _LET_COPY, "pass",
    ),
    Mutant(
        "step-compute-waits-to-be-copied", STEP, "the direction of the copy's wait for compute",
        _LET_COPY, "stream.wait(stream.compute_stream(self._device), copying)",
    ),
    Mutant(
        "step-copy-of-another-waits", STEP,
        "the copy stream of this micro-batch, to wait for compute",
        "copying = self._run.streams.get(self._device, i)",
        "copying = self._run.streams.get(self._device, i + 1)",
    ),
    Mutant(
        "step-outputs-are-not-copied", STEP, "the copy's wait where only outputs are copied from",
        "if self._is_copied or self._copies:", "if self._copies:",
    ),
    Mutant(
        "step-gradients-are-not-copied", STEP,
        "the copy's wait where only gradients are copied from",
        "if self._is_copied or self._copies:", "if self._is_copied:",
    ),
    Mutant(
        "backward-not-after-copy", STEP, "the backward waits for the copy of its gradient",
        _GRADIENT_WAITS, "pass",
    ),
    Mutant(
        "copy-waits-for-backward", STEP, "the direction of the backward's wait for its gradient",
        _GRADIENT_WAITS, "self._wait(i, moved, copied, stream.compute_stream(self._device))",
    ),
]  # fmt: skip

MUTANTS = [*OF_CALLS, *OF_STEPS]
