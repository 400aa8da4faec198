"""Checks that modes save the memory they promise, and that memory stays the same over steps.

The checks count bytes of live tensors (``torch.cuda.max_memory_allocated``) beyond those before the
step. The chain keeps one activation per layer and micro-batch, so the differences are large: of
``m`` micro-batches 'always' keeps the inputs of all and the activations of one, '1f1b' the
activations of ``n - j`` on partition ``j``. A mode that promises to keep less must need less than
``BELOW`` times the other on each GPU; half or less is expected.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipert.check.finding import NOT_CHECKED, REPORTED, Finding, judged
from pipert.check.models import Case
from pipert.check.ways import CALL, SCHEDULES, WAYS, Devices, Trial, Way

__all__: list[str] = []

BELOW = 0.9
MODES_MEAN = "a mode does not save the memory that it is there for: models that should fit may not"
FLAT_MEANS = "each step leaves something behind: a training runs out of memory sooner or later"


def check(devices: Devices, case: Case, steps: int) -> Iterator[Finding]:
    """Check each way's peaks on each GPU, and the memory left after each of ``steps`` steps."""
    if not devices.gpus:
        yield Finding("peak memory", NOT_CHECKED, "no CUDA device: torch does not count on a CPU")
        return
    with devices.trial(case) as trial:
        for schedule in SCHEDULES:  # one-time allocations: workspaces of libraries, streams
            _peaks(trial, Way(schedule, "except_last"), devices)
        peaks = {way: _peaks(trial, way, devices) for way in WAYS}
        for way, sizes in peaks.items():
            seen = ", ".join(f"{size / 2**20:.1f} MiB" for size in sizes)
            yield Finding(f"peak memory of {way}", REPORTED, f"{seen} beyond the weights, by GPU")
        pairs = [(Way(s, "always"), Way(s, "never")) for s in (CALL, "gpipe")]
        pairs += [(Way("1f1b", "never"), Way(s, "never")) for s in (CALL, "gpipe")]
        seen = "'always' needs less than 'never', and 1f1b less than the others, on each GPU"
        yield judged("peak memory", _above(pairs, peaks, devices), seen, MODES_MEAN)
        yield _check_flat(trial, devices, steps)


def _peaks(trial: Trial, way: Way, devices: Devices) -> list[int]:
    """Runs a step; returns the peak on each GPU, in bytes beyond those before the step."""
    trial.pipe.zero_grad()
    devices.synchronize()
    before = [torch.cuda.memory_allocated(device) for device in devices.gpus]
    for device in devices.gpus:
        torch.cuda.reset_peak_memory_stats(device)
    trial.step(way)
    devices.synchronize()
    peaks = [torch.cuda.max_memory_allocated(device) for device in devices.gpus]
    return [peak - start for peak, start in zip(peaks, before, strict=True)]


def _above(
    pairs: list[tuple[Way, Way]], peaks: dict[Way, list[int]], devices: Devices
) -> list[str]:
    """Returns the faults: where a pair's first way does not need less memory than its second."""
    return [
        f"{device}: {less} needs {a / 2**20:.1f} MiB, {more} {b / 2**20:.1f}"
        for less, more in pairs
        for device, a, b in zip(devices.gpus, peaks[less], peaks[more], strict=True)
        if a >= BELOW * b
    ]


def _check_flat(trial: Trial, devices: Devices, steps: int) -> Finding:
    """Finds a fault if each step of the second half leaves more memory than each of the first.

    This tolerates a worker that still holds its last task for a moment when a step is over.
    """
    faults, reserved = [], []
    for way in (Way(CALL, "except_last"), Way("gpipe", "except_last"), Way("1f1b", "never")):
        left: list[list[int]] = []
        for _ in range(steps):
            trial.step(way)
            trial.pipe.zero_grad()
            devices.synchronize()
            left.append([torch.cuda.memory_allocated(device) for device in devices.gpus])
            reserved.append(sum(torch.cuda.memory_reserved(device) for device in devices.gpus))
        for device, after in zip(devices.gpus, zip(*left, strict=True), strict=True):
            early, late = max(after[: steps // 2]), min(after[steps // 2 :])
            if late > early:
                grown = f"{late - early} bytes more in the second half of {steps} steps"
                faults.append(f"{device}: {grown}, {way}")
    more = (reserved[-1] - reserved[0]) / 2**20
    seen = f"{3 * steps} steps; reserved by torch's allocator meanwhile: {more:+.0f} MiB"
    return judged("memory stays the same over steps", faults, seen, FLAT_MEANS)
