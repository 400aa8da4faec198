"""Lists mutants around a task: current streams and devices."""

from __future__ import annotations

from tests.mutants.mutant import Row

__all__ = ["MUTANTS"]

CONTEXT, WORKER = "pipert/workers/context.py", "pipert/workers/worker.py"
THREAD = "pipert/workers/thread_state.py"
RUNTIME, RUN = "pipert/engine/runtime.py", "pipert/stage/run.py"

_CAPTURED = "self.streams = [torch.cuda.current_stream(device) for device in devices]"

MUTANTS: list[Row] = [
    ("streams-not-captured", CONTEXT, "the caller's current streams", _CAPTURED,
     "self.streams: list[torch.cuda.Stream] = []"),
    ("default-streams-captured", CONTEXT, "the caller's current streams: default ones instead",
     _CAPTURED, "self.streams = [torch.cuda.default_stream(device) for device in devices]"),
    ("forward-without-streams", CONTEXT, "the caller's streams around F[i,j]",
     "with current_streams(self.streams), self._all():", "with self._all():"),
    ("backward-without-streams", CONTEXT, "the caller's streams around B[i,j] of a step",
     "with current_streams(self.streams), modes(self._functions, self._dispatches):",
     "with modes(self._functions, self._dispatches):"),
    ("streams-left-on", THREAD, "putting streams back after a task", "_set_streams(before, device)",
     "pass"),
    ("streams-not-put-on", THREAD, "putting the caller's streams on before a task",
     "_set_streams(streams, device)\n    try", "try"),
    ("default-streams-put-back", THREAD, "the previous streams: default ones are put back instead",
     "before = [torch.cuda.current_stream(stream.device) for stream in streams]",
     "before = [torch.cuda.default_stream(stream.device) for stream in streams]"),
    ("streams-not-set", THREAD, "putting streams on", "torch.cuda.set_stream(stream)", "continue"),
    ("device-left-on", THREAD, "the worker's device, after streams of other devices are put on",
     "torch.cuda.set_device(device)", "pass"),
    ("worker-without-device", WORKER, "the current device of a worker",
     "torch.cuda.set_device(device)", "pass"),
    ("pipe-streams-not-carried", RUNTIME, "the caller's streams on the pipe's devices",
     'on_cuda = {device for device in self.devices if device.type == "cuda"}',
     "on_cuda = set[torch.device]()"),
    ("other-streams-not-carried", RUNTIME, "the caller's streams on devices outside of the pipe",
     "on_cuda.update(devices_with_own_streams())", "pass"),
    ("run-follows-nobody", RUNTIME, "the wait of a run's copies for the caller's earlier work",
     "self._streams.follow_the_caller(on_cuda)", "pass"),
    ("nothing-returned", RUNTIME, "the caller's wait, after a run, for reads of his tensors",
     "run.return_what_was_read()", "pass"),
    ("returned-without-wait", RUN, "the wait for reads of the caller's tensors",
     "wait(compute_stream(device), source)", "pass"),
    ("returned-reversed", RUN, "the direction of the wait for reads of the caller's tensors",
     "wait(compute_stream(device), source)", "wait(source, compute_stream(device))"),
]  # fmt: skip
