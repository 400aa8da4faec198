"""Does the same seed give the same bits, whatever the timing?

A missing wait shows as a value that changes now and then, when a device reads
data that has not arrived. So steps are repeated from one seed, with dropout and under load: the
chain's copies take as long as its layers, and the devices never rest in between.

Only deterministic kernels are used. If torch warns that one of them is not, bits may differ
for that reason, and nothing is concluded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from pipert.check.finding import NOT_CHECKED, Finding, judged
from pipert.check.models import Loss, chain, gpt, language_model
from pipert.check.ways import CALL, WAYS, Devices, Way, step
from pipert.pipe import Pipe

__all__: list[str] = []

MEANS = (
    "a seed does not reproduce a step here. If values do not hold either, a wait is missing; in any"
    " case results depend on timing"
)
DROPOUT = 0.2


def check_repeats(devices: Devices, repeats: int, width: int, rows: int) -> Iterator[Finding]:
    """Check the GPT in each way, and a chain of ``width`` with ``rows`` per micro-batch."""
    torch.manual_seed(0)
    # Not tied: loss.backward() adds the gradients of a weight shared by two devices in the
    # order of arrival, which may change the last bit.
    model = language_model(gpt(devices.n, DROPOUT, tied=False))
    with devices.pipe(model.layers, model.balance(devices.n), 4) as pipe:
        it = pipe, WAYS, model.x, model.target, model.loss_fn, repeats
        yield _repeat("GPT with dropout", *it)
    m = 2 * devices.n
    x = torch.randn(m * rows, width).to(devices.partitions[0])
    target = torch.randn(m * rows, width).to(devices.partitions[-1])
    ways = (Way(CALL, "always"), Way("gpipe", "never"), Way("1f1b", "never"))
    layers = chain(devices.n, 1, width, DROPOUT)
    with devices.pipe(layers, [1] * devices.n, m) as pipe:
        copies = f"{rows * width * 4 / 2**20:.3g} MiB a copy"
        yield _repeat(f"chain, {copies}", pipe, ways, x, target, mse_loss, 2 * repeats)


def _repeat(
    name: str, pipe: Pipe, ways: tuple[Way, ...], x: Tensor, target: Tensor, loss_fn: Loss,
    repeats: int,
) -> Finding:  # fmt: skip
    check, faults = f"repeated steps ({name})", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way in ways:
            first = _bits(pipe, way, x, target, loss_fn)
            others = [_bits(pipe, way, x, target, loss_fn) for _ in range(repeats - 1)]
            differ = sum(not _equal(first, other) for other in others)
            if differ:
                faults.append(f"{way}: {differ} of {len(others)} repeats have other bits")
    for warning in caught:
        if "deterministic" in str(warning.message):
            return Finding(check, NOT_CHECKED, str(warning.message).partition(". ")[0])
    return judged(check, faults, f"{len(ways)} ways, {repeats} times each: the same bits", MEANS)


def _bits(pipe: Pipe, way: Way, x: Tensor, target: Tensor, loss_fn: Loss) -> list[Tensor | None]:
    torch.manual_seed(7)
    pipe.zero_grad()
    loss, _ = step(pipe, way, x, target, loss_fn)
    # Cloned on the device: the host does not wait for it before the next step.
    return [loss, *[None if p.grad is None else p.grad.clone() for p in pipe.parameters()]]


def _equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )
