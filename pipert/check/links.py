"""Checks that copies between GPUs arrive intact without pipert, and measures how fast they are.

On some machines copies are broken: peer access is announced, but PCIe settings (ACS, an IOMMU) make
them arrive as zeros. No pipeline can work there, and it helps to know why gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from pipert.check.finding import NOT_CHECKED, Finding, Found, Measurement, judged
from pipert.check.load import timed
from pipert.check.ways import Devices

__all__: list[str] = []

MEANS = (
    "copies between these GPUs are broken without pipert: look at ACS and IOMMU in the settings of"
    " the machine"
)
REPEATS = 5

Link = tuple[torch.device, torch.device]


def links(devices: Devices) -> list[Link]:
    """Returns each pair of GPUs that hold consecutive partitions."""
    pairs = pairwise(devices.partitions)
    return sorted({(a, b) for a, b in pairs if a != b and a.type == b.type == "cuda"}, key=str)


def why_no_links(devices: Devices) -> str | None:
    """Returns why there is no link between GPUs, or ``None`` if there is one."""
    if len(devices.gpus) < 2:
        return ("no CUDA device", "there is one GPU")[len(devices.gpus)]
    return None if links(devices) else "no two GPUs follow each other"


def check(devices: Devices, size: int) -> Iterator[Found]:
    """Copy ``size`` bytes over each link, in both directions."""
    name = "copies by torch alone"
    reason = why_no_links(devices)
    if reason is not None:
        yield Finding(name, NOT_CHECKED, reason)
        return
    faults, rows = [], []
    for a, b in links(devices):
        rates = []
        for source, target in ((a, b), (b, a)):
            rate, is_same = _copy(source, target, size)
            rates.append(f"{rate:.1f}")
            if not is_same:
                faults.append(f"{source} to {target}: something else arrives")
        rows.append((f"{a}, {b}", *rates))
    columns = ("GPUs", "there, GB/s", "back, GB/s")
    title = f"Copies by torch alone, {size / 2**20:.3g} MiB each"
    yield Measurement(title, columns, tuple(rows))
    yield judged(name, faults, "what is sent arrives, in both directions", MEANS)


def _copy(source: torch.device, target: torch.device, size: int) -> tuple[float, bool]:
    """Returns GB/s, and whether the data arrives intact."""
    sent = torch.arange(size // 8).to(source)
    received = sent.to(target)
    both = Devices((source, target))
    seconds = min(timed(both, lambda: received.copy_(sent)) for _ in range(REPEATS))
    received.zero_()
    received.copy_(sent)
    return size / max(seconds, 1e-9) / 1e9, torch.equal(received.cpu(), torch.arange(size // 8))
