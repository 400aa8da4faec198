"""Checks that outputs, loss and gradients are those of the plain module.

They are computed in the same precision and from the same weights, but summed in another order,
since a micro-batch has fewer rows than a mini-batch, and sometimes by another kernel. So they may
differ only by rounding. ``TOLERANCE`` is the allowed difference, relative to the largest entry of
each tensor:

* float64, which has no shortcuts such as TF32: the longest sums here have some thousand
  terms, each rounded to 1e-16, so 1e-13 is expected, and 1e-9 is 10,000 times that.
* float32, without TF32: 1e-5 is expected, even of convolutions by Winograd's method; 1e-3 is
  allowed.

A micro-batch that is lost, stale or counted twice makes a difference of 0.1 to 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pipert.check.finding import Finding, judged
from pipert.check.models import Model
from pipert.check.ways import WAYS, Devices, Results, gradients, leaf, step

__all__: list[str] = []

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
MEANS = "pipert computes something different from the plain module here: do not train with it"


def check(devices: Devices, models: Iterable[Model]) -> Iterator[Finding]:
    """Compares each model in each way with the plain module on the first device."""
    for model in models:
        expected = _plain_results(model, devices.partitions[0])
        with devices.trial(model) as trial:
            with torch.no_grad():
                evaluated: Results = {"output": trial.pipe(trial.x)}
            found = {"without gradients": difference(evaluated, {"output": expected["output"]})}
            for way in WAYS:
                found[str(way)] = difference(trial.results(way), expected)
        dtype = next(model.layers.parameters()).dtype
        faults = [
            f"{way}: {name} differs by {amount:.1e} of its largest entry"
            for way, (amount, name) in found.items() if amount > TOLERANCE[dtype]
        ]  # fmt: skip
        kind, worst = str(dtype).removeprefix("torch."), max(amount for amount, _ in found.values())
        seen = f"{len(found)} ways; largest difference {worst:.0e}, allowed {TOLERANCE[dtype]:.0e}"
        yield judged(f"values of the {model.name} ({kind})", faults, seen, MEANS)


def _plain_results(model: Model, device: torch.device) -> Results:
    """Returns the plain module's results for the whole mini-batch on ``device``."""
    plain, x = copy.deepcopy(model.layers).to(device), leaf(model.x, device)
    loss, output = step(plain, x, model.target.to(device), model.loss_fn)
    return {"output": output, "loss": loss, **gradients(plain, x)}


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """Returns the largest relative difference of two tensors, and the tensors' name.

    Each is relative to the tensor's largest entry, but to at least a thousandth of the largest
    gradient's, since a gradient may be zero except for rounding.
    """
    if found.keys() != expected.keys():
        return math.inf, f"the names of {sorted(found.keys() ^ expected.keys())}"
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
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    # Moved through the CPU, since a link between GPUs may be broken.
    moved = found.cpu().to(expected.device).double()
    largest = float((moved - expected).abs().max())
    return largest / max(_size(expected), floor, 1e-300)


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.abs().max())
