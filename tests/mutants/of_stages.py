"""Lists mutants of the stages' use of streams, in a call and in a step."""

from __future__ import annotations

from tests.mutants.mutant import Row

__all__ = ["MUTANTS"]

COPIES = "pipert/stage/copies.py"
IN_GRAPH, CUT = "pipert/stage/call_boundary.py", "pipert/stage/step_boundary.py"
BACKWARD, RECORDED = "pipert/stage/backward.py", "pipert/stage/recorded.py"

_BRING_WAITS = "return x if copied is None else self.wait(i, x, copied)"
_COMPUTE_WAITS = "return self.transport.wait(i, x, streams.compute_stream(self._device), copied)"
_COPY_WAITS = (
    "compute = streams.compute_stream(self._device)\n"
    "                y = self.copies.transport.wait(i, y, copying, compute)"
)
_READERS = "readers = [*range(len(run.devices))[j + 1 : j + 2], *[k for _, k in skips.leaving]]"
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
    ("brought-not-after-copy", COPIES,
     "compute's wait for copies of weights and targets, and in a step of values and gradients",
     _BRING_WAITS, "return x"),
    ("copy-waits-for-compute", COPIES, "the direction of compute's wait for a copy",
     _COMPUTE_WAITS,
     "return self.transport.wait(i, x, copied, streams.compute_stream(self._device))"),
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
     "return x if copied is None else self.copies.wait(i, x, copied)", "return x"),
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
]  # fmt: skip

OF_STEPS: list[Row] = [
    ("output-not-after-compute", CUT, "the wait of an output's copy for compute",
     "self.copies.let_others_copy(i)\n        ys, _", "ys, _"),
    ("gradient-not-after-compute", BACKWARD, "the wait of a gradient's copy for compute",
     "cut.copies.let_others_copy(i)  # before the sums: the copy needs none of them", "pass"),
    ("move-swapped", COPIES, "source and target of a copy outside the graph: swapped",
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
