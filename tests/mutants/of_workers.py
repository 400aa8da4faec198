"""Lists mutants around a task: current streams and devices, generators, and measuring."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

CONTEXT, WORKER = "pipert/workers/context.py", "pipert/workers/worker.py"
THREAD = "pipert/workers/thread_state.py"
RUNTIME, RUN = "pipert/engine/runtime.py", "pipert/stage/run.py"
GENERATORS = "pipert/layers/default_generators.py"
NUMBERS = "pipert/layers/random_numbers.py"

_CAPTURED = "self._streams = [torch.cuda.current_stream(device) for device in devices]"

MUTANTS = [
    Mutant(
        "streams-not-captured", CONTEXT, "the caller's current streams",
        _CAPTURED, "self._streams: list[torch.cuda.Stream] = []",
    ),
    Mutant(
        "default-streams-captured", CONTEXT, "the caller's current streams: default ones instead",
        _CAPTURED, "self._streams = [torch.cuda.default_stream(device) for device in devices]",
    ),
    Mutant(
        "forward-without-streams", CONTEXT, "the caller's streams around F[i,j]",
        "with current_streams(self._streams), self._all(clear_cache=False):",
        "with self._all(clear_cache=False):",
    ),
    Mutant(
        "backward-without-streams", CONTEXT, "the caller's streams around B[i,j] of a step",
        "with current_streams(self._streams), modes(self._functions, self._dispatches):",
        "with modes(self._functions, self._dispatches):",
    ),
    Mutant(
        "streams-left-on", THREAD, "putting streams back after a task",
        "_set_streams(before, device)", "pass",
    ),
    Mutant(
        "streams-not-put-on", THREAD, "putting the caller's streams on before a task",
        "_set_streams(streams, device)\n    try", "try",
    ),
    Mutant(
        "default-streams-put-back", THREAD,
        "the previous streams: default ones are put back instead",
        "before = [torch.cuda.current_stream(stream.device) for stream in streams]",
        "before = [torch.cuda.default_stream(stream.device) for stream in streams]",
    ),
    Mutant(
        "streams-not-set", THREAD, "putting streams on",
        "torch.cuda.set_stream(stream)", "continue",
    ),
    Mutant(
        "device-left-on", THREAD, "the worker's device, after streams of other devices are put on",
        "torch.cuda.set_device(device)", "pass",
    ),
    Mutant(
        "worker-without-device", WORKER, "the current device of a worker",
        "torch.cuda.set_device(device)", "pass",
    ),
    Mutant(
        "pipe-streams-not-carried", RUNTIME, "the caller's streams on the pipe's devices",
        'on_cuda = {device for device in self.devices if device.type == "cuda"}',
        "on_cuda = set[torch.device]()",
    ),
    Mutant(
        "other-streams-not-carried", RUNTIME, "the caller's streams on devices outside of the pipe",
        "on_cuda.update(devices_with_own_streams())", "pass",
    ),
    Mutant(
        "run-follows-nobody", RUNTIME, "the wait of a run's copies for the caller's earlier work",
        "self._streams.follow_the_caller(on_cuda)", "pass",
    ),
    Mutant(
        "nothing-returned", RUNTIME, "the caller's wait, after a run, for reads of his tensors",
        "run.return_what_was_read()", "pass",
    ),
    Mutant(
        "returned-without-wait", RUN, "the wait for reads of the caller's tensors",
        "wait(compute_stream(device), source)", "pass",
    ),
    Mutant(
        "returned-reversed", RUN, "the direction of the wait for reads of the caller's tensors",
        "wait(compute_stream(device), source)", "wait(source, compute_stream(device))",
    ),
    Mutant(
        "device-generator-not-seeded", NUMBERS, "the seed of a device's generator in a task",
        "default.generator.manual_seed(self._seed)", "pass",
    ),
    Mutant(
        "device-generator-not-put-back", GENERATORS, "putting a device's generator back",
        "self.generator.set_state(self._uses[-1].before)", "pass",
    ),
    Mutant(
        "time-while-busy", "pipert/balance/measure.py",
        "waiting until a device is idle before the time is read",
        "torch.cuda.synchronize(device)", "pass",
    ),
    Mutant(
        "dry-run-moves-generator", "pipert/model/calls.py", "putting the device's generator back",
        "torch.random.fork_rng(indices)", "torch.random.fork_rng([])",
    ),
]  # fmt: skip
