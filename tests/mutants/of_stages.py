"""Lists mutants of the stages' use of streams, in a call and in a step."""

from __future__ import annotations

from tests.mutants.mutant import Row

__all__ = ["MUTANTS"]

COPIES = "pipert/stage/copies.py"
IN_GRAPH, CUT = "pipert/stage/call_boundary.py", "pipert/stage/step_boundary.py"
BACKWARD, RECORDED = "pipert/stage/backward.py", "pipert/stage/recorded.py"

_COMPUTE_WAITS = (
    "compute = streams.compute_stream(self._device)\n"
    "        return self.copies.transport.wait(i, x, compute, copied)"
)
_COPY_WAITS = (
    "compute = streams.compute_stream(self._device)\n"
    "                y = self.copies.transport.wait(i, y, copying, compute)"
)
_READERS = "readers = [*range(len(run.devices))[j + 1 : j + 2], *[k for _, k in skips.leaving]]"
_LOSS_WAITS = (
    "compute = streams.compute_stream(device)\n"
    "            self.copies.transport.wait(i, target, compute, copied)"
)
_INPUT_WAITS = (
    "compute = streams.compute_stream(self._place.device)\n"
    "            self.copies.transport.wait(i, x, compute, copied)"
)
_GRADIENT_WAITS = (
    "compute = streams.compute_stream(self._place.device)\n"
    "            self.copies.transport.wait(i, moved, compute, copied)"
)
_LET_COPY = "streams.wait(copying, streams.compute_stream(self._device))"

OF_COPIES: list[Row] = [
    ("skips-are-not-copied", COPIES, "the copy's wait if only a skip is copied from the device",
     _READERS, "readers = [*range(len(run.devices))[j + 1 : j + 2]]"),
    ("values-are-not-copied", COPIES, "the copy's wait if only the value is copied from the device",
     _READERS, "readers = [*[k for _, k in skips.leaving]]"),
    ("own-stream-of-another", COPIES, "the copy stream of this micro-batch, on this device",
     "return self._run.streams.get(self._device, i)",
     "return self._run.streams.get(self._device, i + 1)"),
    ("target-is-compute", COPIES, "the copy stream on which values are written",
     "target = self.stream(i)", "target = streams.compute_stream(home)"),
    ("source-is-compute", COPIES, "the copy stream on which values are read",
     "source = self._run.streams.get(device, i)", "source = streams.compute_stream(device)"),
    ("read-and-not-noted", COPIES, "the note of which of the caller's tensors are read",
     "self._run.sources[device, i] = source", "pass"),
    ("target-of-another", COPIES, "the copy stream of this micro-batch, for writing",
     "target = self.stream(i)", "target = self.stream(i + 1)"),
    ("source-of-another", COPIES, "the copy stream of this micro-batch, for reading",
     "source = self._run.streams.get(device, i)", "source = self._run.streams.get(device, i + 1)"),
    ("last-skip-decides", COPIES, "the wait for a skip, if the next one was not copied",
     "copied = copied or target", "copied = target"),
    ("copied-skips-forgotten", COPIES, "the wait for skips, if the value was not copied",
     "tuple(skips)), copied or target", "tuple(skips)), target"),
    ("copied-value-forgotten", COPIES, "the wait for the value, if no skip was copied",
     "tuple(skips)), copied or target", "tuple(skips)), copied"),
    ("arguments-not-awaited", COPIES, "the wait of the arguments' copy for the caller",
     "moving = self.transport.wait(i, moving, source, compute)", "pass"),
    ("arguments-await-own-device", COPIES,
     "the arguments' device, on which the caller is waited for",
     "compute = streams.compute_stream(device)", "compute = streams.compute_stream(home)"),
    ("caller-not-after-dx", COPIES,
     "the wait in the graph, by which autograd knows the stream of an argument's gradient",
     "moving = self.transport.wait(i, moving, source, compute)", "streams.wait(source, compute)"),
    ("stage-copy-swapped", COPIES, "source and target of every copy: swapped",
     "moved = self.transport.copy(i, moving, source, target, origin)",
     "moved = self.transport.copy(i, moving, target, source, origin)"),
    ("step-copy-not-after-compute", COPIES, "the wait of a step's copies for compute", _LET_COPY,
     "pass"),
    ("step-compute-waits-to-be-copied", COPIES, "the direction of the copy's wait for compute",
     _LET_COPY, "streams.wait(streams.compute_stream(self._device), self.stream(i))"),
    ("step-copy-of-another-waits", COPIES,
     "the copy stream of this micro-batch, which waits for compute", _LET_COPY,
     "streams.wait(self.stream(i + 1), streams.compute_stream(self._device))"),
    ("step-outputs-are-not-copied", COPIES,
     "the copy's wait if only outputs are copied from the device",
     "if self.go_out or self.come_in:", "if self.come_in:"),
    ("step-gradients-are-not-copied", COPIES,
     "the copy's wait if only gradients are copied from the device",
     "if self.go_out or self.come_in:", "if self.go_out:"),
]  # fmt: skip

OF_CALLS: list[Row] = [
    ("compute-not-after-copy", IN_GRAPH, "compute's wait for the copies of a task's inputs",
     "return x if copied is None else self._wait_for(i, copied, x)", "return x"),
    ("compute-not-after-weights", IN_GRAPH, "compute's wait for copies of borrowed weights",
     "(copy,) = self._wait_for(i, copied, (copy,))", "pass"),
    ("skips-not-waited-for", IN_GRAPH, "the wait for skips, beside that for the value",
     "skips = [self._wait_for(i, copied, skip) for skip in x.skips]", "skips = list(x.skips)"),
    ("value-not-waited-for", IN_GRAPH, "the wait for the value, beside that for skips",
     "return Carried(self._wait_for(i, copied, x.value), tuple(skips))",
     "return Carried(x.value, tuple(skips))"),
    ("copy-waits-for-compute", IN_GRAPH, "the direction of compute's wait for a copy",
     _COMPUTE_WAITS,
     "return self.copies.transport.wait(" "i, x, copied, streams.compute_stream(self._device))"),
    ("copy-not-after-compute", IN_GRAPH, "the wait of an output's copy for compute", _COPY_WAITS,
     "pass"),
    ("compute-waits-to-be-copied", IN_GRAPH, "the direction of the copy's wait for compute",
     _COPY_WAITS,
     "y = self.copies.transport.wait(" "i, y, streams.compute_stream(self._device), copying)"),
    ("copy-of-another-waits", IN_GRAPH,
     "the copy stream of this micro-batch, which waits for compute",
     "copying = self.copies.stream(i)", "copying = self.copies.stream(i + 1)"),
    ("no-wait-without-graph", COPIES, "the waits for values that need no gradient",
     "                return rebuild(transfer.wait(xs, waiter, awaited))\n"
     "        streams.wait(waiter, awaited)\n",
     "                return rebuild(transfer.wait(xs, waiter, awaited))\n"),
    ("no-wait-back", COPIES, "the waits of the backward: only the forward waits",
     "return rebuild(transfer.wait(xs, waiter, awaited))",
     "streams.wait(waiter, awaited)\n                return x"),
    ("graph-move-swapped", COPIES, "source and target of a copy in the graph: swapped",
     "return transfer.copy(i, tensors, self._device, source, target, to_caller)",
     "return transfer.copy(i, tensors, self._device, target, source, to_caller)"),
    ("move-swapped", COPIES, "source and target of a copy without gradient: swapped",
     "return streams.copy(tensors, self._device, source, target)",
     "return streams.copy(tensors, self._device, target, source)"),
]  # fmt: skip

OF_STEPS: list[Row] = [
    ("step-not-after-weights", CUT, "compute's wait for copies of borrowed weights",
     "streams.wait(streams.compute_stream(self._place.device), copied)", "pass"),
    ("step-input-not-after-copy", CUT, "compute's wait for the copies of a task's inputs",
     _INPUT_WAITS, "pass"),
    ("step-copy-waits-for-compute", CUT, "the direction of compute's wait for a copy", _INPUT_WAITS,
     "self.copies.transport.wait(" "i, x, copied, streams.compute_stream(self._place.device))"),
    ("loss-not-after-target", CUT, "the loss's wait for the copy of the target", _LOSS_WAITS,
     "pass"),
    ("output-not-after-compute", CUT, "the wait of an output's copy for compute",
     "self.copies.let_others_copy(i)\n        ys, rebuild", "ys, rebuild"),
    ("backward-not-after-copy", CUT, "the backward's wait for the copy of its gradient",
     _GRADIENT_WAITS, "pass"),
    ("copy-waits-for-backward", CUT, "the direction of the backward's wait for its gradient",
     _GRADIENT_WAITS,
     "self.copies.transport.wait(" "i, moved, copied, streams.compute_stream(self._place.device))"),
    ("gradient-not-after-compute", BACKWARD, "the wait of a gradient's copy for compute",
     "cut.copies.let_others_copy(i)  # before the sums: the copy needs none of them", "pass"),
    ("step-no-wait", COPIES, "compute's waits for copies: of values, targets and gradients",
     "-> Value:\n        streams.wait(waiter, awaited)\n", "-> Value:\n"),
    ("step-move-swapped", COPIES, "source and target of a copy: swapped",
     "moved = streams.copy(plain, self._device, source, target)",
     "moved = streams.copy(plain, self._device, target, source)"),
]  # fmt: skip

OF_RECORDED: list[Row] = [
    ("recorded-wait-lost", RECORDED, "the wait itself, if it is recorded",
     "return self._transport.wait(i, x, waiter, awaited)\n        y", "return x\n        y"),
    ("recorded-copy-swapped", RECORDED, "source and target of a recorded copy: swapped",
     "moved = self._transport.copy(i, tensors, source, target, origin)",
     "moved = self._transport.copy(i, tensors, target, source, origin)"),
    ("unrecorded-wait-lost", RECORDED, "the wait itself, if its backward is recorded",
     "y = self._transport.wait(i, x, waiter, awaited)", "y = x"),
]  # fmt: skip

MUTANTS = [*OF_COPIES, *OF_CALLS, *OF_STEPS, *OF_RECORDED]
