"""Checks that copies between GPUs arrive intact without pipert, and measures how fast they are.

On some machines copies are broken: peer access is announced, but PCIe settings (ACS, an IOMMU) make
them arrive as zeros. No pipeline can work there, and it helps to know why gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from pipert.check.finding import NOT_CHECKED, Finding, judged
from pipert.check.ways import Devices

__all__: list[str] = []

MEANS = (
    "copies between these GPUs are broken without pipert: look at ACS and IOMMU in the settings of"
    " the machine"
)
SIZE = 1 << 26  # bytes of each copy
REPEATS = 5


def check(devices: Devices) -> Iterator[Finding]:
    """Copy between each two GPUs of consecutive partitions, in both directions."""
    name = "copies by torch alone"
    pairs = {(a, b) for a, b in pairwise(devices.partitions) if a != b and a.type == b.type}
    if not pairs:
        yield Finding(name, NOT_CHECKED, "no two GPUs follow each other")
        return
    faults, rates = [], []
    for source, target in sorted({*pairs, *((b, a) for a, b in pairs)}, key=str):
        rate, is_same = _copy(source, target)
        rates.append(f"{source} to {target} {rate:.1f} GB/s")
        if not is_same:
            faults.append(f"{source} to {target}: something else arrives")
    seen = f"{SIZE / 2**20:.3g} MiB arrive as sent: {', '.join(rates)}"
    yield judged(name, faults, seen, MEANS)


def _copy(source: torch.device, target: torch.device) -> tuple[float, bool]:
    """Returns GB/s, and whether the data arrives intact."""
    sent = torch.arange(SIZE // 8).to(source)
    received = sent.to(target)
    both = Devices((source, target))
    seconds = min(both.timed(lambda: received.copy_(sent)) for _ in range(REPEATS))
    received.zero_()
    received.copy_(sent)
    return SIZE / max(seconds, 1e-9) / 1e9, torch.equal(received.cpu(), torch.arange(SIZE // 8))
