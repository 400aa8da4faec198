"""Mutants of what surrounds a task: current streams and devices, generators, and measuring."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

CONTEXT, WORKER = "pipert/workers/context.py", "pipert/workers/worker.py"
RUNTIME, RANDOM = "pipert/runtime.py", "pipert/autograd/random_state.py"

_CAPTURED = "self._streams = [torch.cuda.current_stream(device) for device in devices]"
_FORWARD = "with _current_streams(self._streams):\n                return"
_DEFAULTS = "self._defaults.append(torch.cuda.default_generators[device.index])"

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
        _FORWARD, "if True:\n                return",
    ),
    Mutant(
        "backward-without-streams", CONTEXT, "the caller's streams around B[i,j] of a step",
        "with _current_streams(self._streams), _modes(*modes):", "with _modes(*modes):",
    ),
    Mutant(
        "streams-left-on", CONTEXT, "streams are put back after a task",
        "_set_streams(before, device)", "pass",
    ),
    Mutant(
        "streams-not-set", CONTEXT, "putting streams on",
        "torch.cuda.set_stream(stream)", "continue",
    ),
    Mutant(
        "device-left-on", CONTEXT, "the worker's device, after streams of others are put on",
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
        "input-streams-not-carried", RUNTIME, "the caller's streams on the inputs' devices",
        "on_cuda.update(tensor.device for tensor in select(inputs[0], _is_cuda)[0])", "pass",
    ),
    Mutant(
        "device-generator-not-lent", RANDOM, "the device's generator, lent to a task",
        _DEFAULTS, "pass",
    ),
    Mutant(
        "time-while-busy", "pipert/balance/by_time.py", "times are read when a device is idle",
        "torch.cuda.synchronize(device)", "pass", ("tests/balance",),
    ),
    Mutant(
        "probe-moves-generator", "pipert/balance/probe.py", "the device's generator is put back",
        'generators = [where.index] if where.type == "cuda" else []', "generators = list[int]()",
        ("tests/balance",),
    ),
]  # fmt: skip
