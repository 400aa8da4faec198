"""Checks copies, values, repeated steps, memory, overlap and speed (docs/limits.md).

A missing wait shows as a value that changes now and then, when a device reads data that has not
arrived. So steps are repeated from one seed, with dropout and under load: the chain's copies take
as long as its layers, and the devices are never idle in between. Memory is that of live tensors:
the chain keeps one activation per layer and micro-batch, so what modes save is large.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, pairwise
from statistics import median, median_high

import torch
from torch import Tensor

from pipert.check.ways import (
    BROKEN,
    CALL,
    NEVER,
    NOT_CHECKED,
    REPORTED,
    WAYS,
    Case,
    Devices,
    Finding,
    Results,
    Trial,
    Way,
    gradients,
    judged,
    leaf,
    step,
    transformer,
)
from pipert.observe.event import COMPUTE, FORWARD
from pipert.timeline.report import length, overlap, times_of, union
from pipert.timeline.timeline import Timeline

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to each tensor's largest entry
SIZE = 1 << 26  # bytes of each copy by torch alone
BELOW = 0.9  # of the other's peak must a mode need that promises less; half or less is expected
LONG_ENOUGH = 1e-3  # seconds per task: clocks of two GPUs agree to some 50 us
NEGLIGIBLE = 0.01  # share of the time
COPIES_MEAN = (
    "copies between these GPUs are broken without pipert: look at ACS and IOMMU in the settings of"
    " the machine"
)
VALUES_MEAN = "pipert computes something different from the plain module here: do not train with it"
BITS_MEAN = (
    "a seed does not reproduce a step here. If values do not hold either, a wait is missing; in any"
    " case results depend on timing"
)
MODES_MEAN = "a mode does not save the memory that it is there for: models that should fit may not"
FLAT_MEANS = "each step leaves something behind: a training runs out of memory sooner or later"
TURNS_MEAN = "the GPUs take turns, so there is no gain from having several of them"


def check_copies(devices: Devices) -> Iterator[Finding]:
    """Copy, without pipert, between each two GPUs of consecutive partitions, in both directions.

    Where PCIe settings (ACS, an IOMMU) let copies arrive as zeros, no pipeline can work.
    """
    name = "copies by torch alone"
    pairs = {(a, b) for a, b in pairwise(devices.partitions) if a != b and a.type == b.type}
    if not pairs:
        yield Finding(name, NOT_CHECKED, "no two GPUs follow each other")
        return
    faults, rates = [], []
    for source, target in sorted({*pairs, *((b, a) for a, b in pairs)}, key=str):
        sent = torch.arange(SIZE // 8).to(source)
        received, both = sent.to(target), Devices((source, target))
        seconds = min(both.timed(partial(received.copy_, sent)) for _ in range(5))
        rates.append(f"{source} to {target} {SIZE / max(seconds, 1e-9) / 1e9:.1f} GB/s")
        received.zero_()
        received.copy_(sent)
        if not torch.equal(received.cpu(), torch.arange(SIZE // 8)):
            faults.append(f"{source} to {target}: something else arrives")
    yield judged(name, faults, f"{SIZE >> 20} MiB arrive as sent: {', '.join(rates)}", COPIES_MEAN)


def check_values(devices: Devices, cases: Iterable[Case]) -> Iterator[Finding]:
    """Compares each model in each way with the plain module on the first device."""
    first = devices.partitions[0]
    for case in cases:
        plain, x = copy.deepcopy(case.layers).to(first), leaf(case.x, first)
        loss, output = step(plain, x, case.target.to(first))
        expected = {"output": output, "loss": loss, **gradients(plain, x)}
        with devices.trial(case) as trial:
            with torch.no_grad():
                evaluated: Results = {"output": trial.pipe(trial.x)}
            found = {"without gradients": difference(evaluated, {"output": output})}
            for way in WAYS:
                found[str(way)] = difference(trial.results(way), expected)
        allowed = TOLERANCE[output.dtype]
        faults = [
            f"{way}: {name} differs by {amount:.1e} of its largest entry"
            for way, (amount, name) in found.items() if amount > allowed
        ]  # fmt: skip
        kind = str(output.dtype).removeprefix("torch.")
        worst = max(amount for amount, _ in found.values())
        seen = f"{len(found)} ways; largest difference {worst:.0e}, allowed {allowed:.0e}"
        yield judged(f"values ({case.name}, {kind})", faults, seen, VALUES_MEAN)


def check_repeats(devices: Devices, repeats: int, chain: Case) -> Iterator[Finding]:
    """Repeats steps of the transformer in each way, and of ``chain`` in some of them."""
    torch.manual_seed(0)
    # Not tied: loss.backward() adds up the gradients of a weight that two devices share in the
    # order of their arrival, which may change the last bit.
    model = transformer(devices.n, torch.float32, 0.2, tied=False)
    with devices.trial(model) as trial:
        yield _repeat(f"{model.name} with dropout", trial, WAYS, repeats)
    with devices.trial(chain) as trial:
        yield _repeat(chain.name, trial, (Way(CALL, "always"), *NEVER[1:]), 2 * repeats)


def _repeat(name: str, trial: Trial, ways: tuple[Way, ...], repeats: int) -> Finding:
    check, faults = f"repeated steps ({name})", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way in ways:
            # All steps run before any result is read, so the host does not wait between them.
            first, *others = [trial.results(way) for _ in range(repeats)]
            different = sum(difference(other, first)[0] > 0.0 for other in others)
            if different:
                faults.append(f"{way}: {different} of {len(others)} repeats have other bits")
    for warning in caught:
        if "deterministic" in str(warning.message):
            return Finding(check, NOT_CHECKED, str(warning.message).partition(". ")[0])
    seen = f"{len(ways)} ways, {repeats} times each: the same bits"
    return judged(check, faults, seen, BITS_MEAN)


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """Returns the largest relative difference of two tensors, and the tensors' name.

    Each is relative to the tensor's largest entry, but to at least a thousandth of the largest
    gradient's, since a gradient may be zero except for rounding.
    """
    sizes = {name: _size(tensor) for name, tensor in expected.items()}
    floor = max([1e-3 * size for name, size in sizes.items() if "gradient" in name], default=0.0)
    worst = (0.0, "nothing")
    for name, tensor in expected.items():
        other, amount = found[name], 0.0
        if tensor is not None and other is not None:
            # Moved through the CPU, since a link between GPUs may be broken.
            apart = _size(other.cpu().double() - tensor.cpu().double())
            amount = apart / max(sizes[name], floor, 1e-300)
        elif tensor is not other:
            amount = math.inf
        if not amount <= worst[0]:  # NaN is the worst
            worst = (math.inf if math.isnan(amount) else amount, name)
    return worst


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.abs().max())


def check_memory(devices: Devices, case: Case, steps: int) -> Iterator[Finding]:
    """Check each way's peaks on each GPU, and the memory left after each of ``steps`` steps."""
    if not devices.gpus:
        yield Finding("peak memory", NOT_CHECKED, "no CUDA device: torch does not count on a CPU")
        return
    with devices.trial(case) as trial:
        for way in WAYS[1::3]:  # one-time allocations: workspaces of libraries, streams
            _peaks(trial, way, devices)
        peaks = {way: _peaks(trial, way, devices) for way in WAYS}
        for way, sizes in peaks.items():
            seen = ", ".join(f"{size / 2**20:.1f} MiB" for size in sizes)
            yield Finding(f"peak memory of {way}", REPORTED, f"{seen} beyond the weights, by GPU")
        pairs = [(Way(s, "always"), Way(s, "never")) for s in (CALL, "gpipe")]
        pairs += [(Way("1f1b", "never"), Way(s, "never")) for s in (CALL, "gpipe")]
        faults = [
            f"{device}: {less} needs {a / 2**20:.1f} MiB, {more} {b / 2**20:.1f}"
            for less, more in pairs
            for device, a, b in zip(devices.gpus, peaks[less], peaks[more], strict=True)
            if a >= BELOW * b
        ]
        seen = "'always' needs less than 'never', and 1f1b less than the others, on each GPU"
        yield judged("peak memory", faults, seen, MODES_MEAN)
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
            grown = min(after[steps // 2 :]) - max(after[: steps // 2])
            if grown > 0:
                more = f"{grown} bytes more in the second half of {steps} steps"
                faults.append(f"{device}: {more}, {way}")
    change = (reserved[-1] - reserved[0]) / 2**20
    seen = f"{3 * steps} steps; reserved by torch's allocator meanwhile: {change:+.0f} MiB"
    return judged("memory stays the same over steps", faults, seen, FLAT_MEANS)


def check_overlap(devices: Devices, case: Case) -> Iterator[Finding]:
    """Measures how much of a step partitions compute concurrently, and copy while computing."""
    together, hidden, forwards = [], [], []
    with devices.trial(case) as trial:
        for way in NEVER:
            trial.step(way)
            devices.synchronize()
            with trial.pipe.record() as timeline:
                trial.step(way)
                trial.step(way)
                devices.synchronize()
            forwards.append(median_high(e.seconds for e in timeline.events if e.kind == FORWARD))
            together.append(share_together(timeline))
            copying, beside = copy_seconds(timeline)
            if copying:
                hidden.append(beside / copying)
    yield judge_overlap(devices, together, min(forwards), case.name)
    if hidden:
        seen = f"{min(hidden):.0%} to {max(hidden):.0%} of the time of copies their source computes"
        yield Finding("copies while computing", REPORTED, seen)


def judge_overlap(devices: Devices, shares: list[float], forward: float, what: str) -> Finding:
    """Makes the finding from the shares of all schedules, and the time of a forward task."""
    check = "partitions at the same time"
    seen = f"{min(shares):.0%} to {max(shares):.0%} of the time two or more compute ({what})"
    excuses = {
        "there are no two GPUs": len(devices.gpus) < 2,
        "a CPU takes part": torch.device("cpu") in devices.partitions,
        "tasks are too short to tell": forward < LONG_ENOUGH,
        "CUDA_LAUNCH_BLOCKING is set": os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
    }
    excuse = next((excuse for excuse, holds in excuses.items() if holds), "")
    if not excuse and max(shares) < NEGLIGIBLE:
        return Finding(check, BROKEN, seen, TURNS_MEAN)
    return Finding(check, REPORTED, seen + f"; not judged: {excuse}" * bool(excuse))


def share_together(timeline: Timeline) -> float:
    """Returns the share of computing time in which two or more lanes compute."""
    numbers = range(len(timeline.lanes))
    events = timeline.events
    lanes = [times_of((e for e in events if timeline.lane(e) == k), COMPUTE) for k in numbers]
    several = union(both for a, b in combinations(lanes, 2) for both in overlap(a, b))
    return length(several) / max(length(union(sum(lanes, []))), 1e-9)


def copy_seconds(timeline: Timeline) -> tuple[float, float]:
    """Returns the seconds of copies between GPUs, in all and while their source GPU computed.

    The source GPU timestamps both.
    """
    copying = hidden = 0.0
    for event in timeline.events:
        source = event.source
        if source is not None and source.type == event.device.type == "cuda":
            computing = times_of((e for e in timeline.events if e.device == source), COMPUTE)
            copying += event.seconds
            hidden += length(overlap([(event.start, event.end)], computing))
    return copying, hidden


def check_speed(devices: Devices, case: Case, rounds: int) -> Iterator[Finding]:
    """Measures each way, and the plain module, once a round, after one to warm up.

    The ideal is that of ``n`` equal devices and free copies (section 2.1 of the paper).
    """
    first, plain = devices.partitions[0], "plain module"
    module, target = copy.deepcopy(case.layers).to(first), case.target.to(first)
    with devices.trial(case) as trial:
        steps: dict[str, Callable[[], object]] = {
            plain: lambda: step(module, trial.x, target),
            **{str(way): partial(trial.step, way) for way in (*NEVER, Way(CALL, "except_last"))},
        }
        rows = [[devices.timed(one) for one in steps.values()] for _ in range(rounds + 1)]
    times = dict(zip(steps, map(median, zip(*rows[1:], strict=True)), strict=True))
    alone = times.pop(plain)
    yield Finding("time of a step", REPORTED, f"{1e3 * alone:.1f} ms, {plain} on {first}")
    for name, seconds in times.items():
        seen = f"{alone / seconds:.2f} ({1e3 * seconds:.1f} ms)"
        yield Finding(f"speed-up of {name}", REPORTED, seen)
    m, n = case.chunks, devices.n
    ideal = f"{m * n / (m + n - 1):.2f} on {n} equal devices, without recomputation"
    yield Finding("ideal speed-up", REPORTED, ideal)
