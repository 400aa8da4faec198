"""Checks that the same seed gives the same bits, whatever the timing.

A missing wait shows as a value that changes now and then, when a device reads data that has not
arrived. So steps are repeated from one seed, with dropout and under load: the chain's copies take
as long as its layers, and the devices are never idle in between.

Only deterministic kernels are used. If torch warns that a kernel is not deterministic, bits may
differ for that reason, and nothing is concluded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from pipert.check.finding import NOT_CHECKED, Finding, judged
from pipert.check.load import Load
from pipert.check.models import gpt, language_model
from pipert.check.values import difference
from pipert.check.ways import CALL, NEVER, WAYS, Devices, Results, Trial, Way

__all__: list[str] = []

MEANS = (
    "a seed does not reproduce a step here. If values do not hold either, a wait is missing; in any"
    " case results depend on timing"
)
DROPOUT = 0.2


def check(devices: Devices, repeats: int, load: Load) -> Iterator[Finding]:
    """Checks the GPT in each way, and the chain of ``load`` in some of them."""
    torch.manual_seed(0)
    # Not tied: loss.backward() adds up the gradients of a weight that two devices share in the
    # order of their arrival, which may change the last bit.
    model = language_model(gpt(devices.n, DROPOUT, tied=False))
    with devices.trial(model) as trial:
        yield _repeat("GPT with dropout", trial, WAYS, repeats)
    ways = (Way(CALL, "always"), *NEVER[1:])
    copies = f"{load.micro_batch_bytes / 2**20:.3g} MiB a copy"
    with devices.trial(load.model(dropout=DROPOUT)) as trial:
        yield _repeat(f"chain, {copies}", trial, ways, 2 * repeats)


def _repeat(name: str, trial: Trial, ways: tuple[Way, ...], repeats: int) -> Finding:
    check, faults = f"repeated steps ({name})", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way in ways:
            # All steps run before any result is read, so the host does not wait between them.
            first, *others = [_seeded(trial, way) for _ in range(repeats)]
            different = sum(difference(other, first)[0] > 0.0 for other in others)
            if different:
                faults.append(f"{way}: {different} of {len(others)} repeats have other bits")
    for warning in caught:
        if "deterministic" in str(warning.message):
            return Finding(check, NOT_CHECKED, str(warning.message).partition(". ")[0])
    return judged(check, faults, f"{len(ways)} ways, {repeats} times each: the same bits", MEANS)


def _seeded(trial: Trial, way: Way) -> Results:
    torch.manual_seed(7)
    return trial.results(way)
