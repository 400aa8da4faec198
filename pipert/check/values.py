"""Checks that outputs, loss and gradients are the plain module's, and a seed gives the same bits.

They are computed in the same precision and from the same weights, but summed in another order,
since a micro-batch has fewer rows than a mini-batch, and sometimes by another kernel. So they may
differ only by rounding. ``TOLERANCE`` is the allowed difference, relative to the largest entry of
each tensor:

* float64, which has no shortcuts such as TF32: the longest sums here have some thousand
  terms, each rounded to 1e-16, so 1e-13 is expected, and 1e-9 is 10,000 times that.
* float32, without TF32: 1e-5 is expected, even of convolutions by Winograd's method; 1e-3 is
  allowed.

A micro-batch that is lost, stale or counted twice makes a difference of 0.1 to 1.

A missing wait shows as a value that changes now and then, when a device reads data that has not
arrived. So steps are repeated from one seed, with dropout and under load: the chain's copies take
as long as its layers, and the devices are never idle in between. Only deterministic kernels are
used. If torch warns that a kernel is not deterministic, nothing is concluded.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pipert.check.finding import NOT_CHECKED, Finding, judged
from pipert.check.models import Case, transformer
from pipert.check.ways import CALL, NEVER, WAYS, Devices, Results, Trial, Way, gradients, leaf, step

__all__: list[str] = []

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
DROPOUT = 0.2
MEANS = "pipert computes something different from the plain module here: do not train with it"
BITS_MEAN = (
    "a seed does not reproduce a step here. If values do not hold either, a wait is missing; in any"
    " case results depend on timing"
)


def check(devices: Devices, cases: Iterable[Case]) -> Iterator[Finding]:
    """Compares each model in each way with the plain module on the first device."""
    for case in cases:
        expected = _plain_results(case, devices.partitions[0])
        with devices.trial(case) as trial:
            with torch.no_grad():
                evaluated: Results = {"output": trial.pipe(trial.x)}
            found = {"without gradients": difference(evaluated, {"output": expected["output"]})}
            for way in WAYS:
                found[str(way)] = difference(trial.results(way), expected)
        dtype = next(case.layers.parameters()).dtype
        faults = [
            f"{way}: {name} differs by {amount:.1e} of its largest entry"
            for way, (amount, name) in found.items() if amount > TOLERANCE[dtype]
        ]  # fmt: skip
        kind, worst = str(dtype).removeprefix("torch."), max(amount for amount, _ in found.values())
        seen = f"{len(found)} ways; largest difference {worst:.0e}, allowed {TOLERANCE[dtype]:.0e}"
        yield judged(f"values ({case.name}, {kind})", faults, seen, MEANS)


def _plain_results(case: Case, device: torch.device) -> Results:
    """Returns the plain module's results for the whole mini-batch on ``device``."""
    plain, x = copy.deepcopy(case.layers).to(device), leaf(case.x, device)
    loss, output = step(plain, x, case.target.to(device))
    return {"output": output, "loss": loss, **gradients(plain, x)}


def check_repeats(devices: Devices, repeats: int, chain: Case) -> Iterator[Finding]:
    """Repeats steps of the transformer in each way, and of ``chain`` in some of them."""
    torch.manual_seed(0)
    # Not tied: loss.backward() adds up the gradients of a weight that two devices share in the
    # order of their arrival, which may change the last bit.
    model = transformer(devices.n, torch.float32, DROPOUT, tied=False)
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
    gradient_sizes = [_size(tensor) for name, tensor in expected.items() if "gradient" in name]
    floor = 1e-3 * max(gradient_sizes, default=0.0)
    worst = (0.0, "nothing")
    for name, tensor in expected.items():
        amount = _difference(found[name], tensor, floor)
        if not amount <= worst[0]:  # NaN is the worst
            worst = (math.inf if math.isnan(amount) else amount, name)
    return worst


def _difference(found: Tensor | None, expected: Tensor | None, floor: float) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    # Moved through the CPU, since a link between GPUs may be broken.
    largest = (found.cpu().double() - expected.cpu().double()).abs().max()
    return float(largest) / max(_size(expected), floor, 1e-300)


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.abs().max())
