"""Are outputs, loss and gradients those of the plain module?

They are computed in the same precision and from the same weights, but summed in another order,
since a micro-batch has fewer rows than a mini-batch, and sometimes by another kernel. So only
rounding may differ. ``TOLERANCE`` is the allowed difference, relative to the largest entry of
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
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert.check.finding import Finding, judged
from pipert.check.models import Model, chain, small_models
from pipert.check.ways import WAYS, Devices, backward, step

__all__: list[str] = []

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
CHUNKS = 4
MEANS = "pipert computes something different from the plain module here: do not train with it"

Results = dict[str, Tensor | None]


def check_values(devices: Devices, dtypes: Sequence[torch.dtype]) -> Iterator[Finding]:
    """Compare each model in each way with the plain module on the first device."""
    for dtype in dtypes:
        for model in small_models(devices.n, dtype):
            yield _compare(model, devices, dtype, CHUNKS)


def check_values_under_load(devices: Devices, width: int, rows: int) -> Iterator[Finding]:
    """Compare a chain with slow copies, where data read too early has not arrived yet."""
    m = 2 * devices.n
    x, target = (torch.randn(m * rows, width) for _ in range(2))
    model = Model("chain under load", chain(devices.n, 1, width), x, target, mse_loss)
    yield _compare(model, devices, torch.float32, m)


def _compare(model: Model, devices: Devices, dtype: torch.dtype, chunks: int) -> Finding:
    plain = copy.deepcopy(model.layers).to(devices.partitions[0])
    expected = plain_results(plain, model)
    faults, worst = [], 0.0
    with devices.pipe(model.layers, model.balance(devices.n), chunks) as pipe:
        with torch.no_grad():
            evaluated: Results = {"output": pipe(model.x.to(devices.partitions[0]))}
        found = {"without gradients": difference(evaluated, {"output": expected["output"]})}
        for way in WAYS:
            pipe.zero_grad()
            x = leaf(model.x, devices.partitions[0])
            loss, output = step(pipe, way, x, model.target, model.loss_fn, outputs=True)
            results: Results = {"output": output, "loss": loss, **gradients(pipe, x)}
            found[str(way)] = difference(results, expected)
    for way_name, (amount, name) in found.items():
        worst = max(worst, amount)
        if not amount <= TOLERANCE[dtype]:
            faults.append(f"{way_name}: {name} differs by {amount:.1e} of its largest entry")
    kind = str(dtype).removeprefix("torch.")
    seen = f"{len(found)} ways; largest difference {worst:.0e}, allowed {TOLERANCE[dtype]:.0e}"
    return judged(f"values of the {model.name} ({kind})", faults, seen, MEANS)


def plain_results(plain: nn.Sequential, model: Model) -> Results:
    """Returns the plain module's results for the whole mini-batch."""
    device = next(plain.parameters()).device
    x = leaf(model.x, device)
    output = plain(x)
    loss = model.loss_fn(output, model.target.to(device))
    backward(loss)
    return {"output": output.detach(), "loss": loss.detach(), **gradients(plain, x)}


def leaf(x: Tensor, device: torch.device) -> Tensor:
    """Copies an input to ``device`` as a leaf that requires grad if it can."""
    return x.to(device, copy=True).requires_grad_(x.is_floating_point())


def gradients(module: nn.Module, x: Tensor) -> Results:
    """Returns the gradient of each parameter, and of the input."""
    found: Results = {f"the gradient of {k}": p.grad for k, p in module.named_parameters()}
    return {**found, "the gradient of the input": x.grad}


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """Returns the largest difference of two tensors relative to the largest entry, and its name.

    A gradient that is zero except for rounding is compared with the largest of all.
    """
    if found.keys() != expected.keys():
        return math.inf, f"the names of {sorted(found.keys() ^ expected.keys())}"
    of_gradients = [_size(tensor) for name, tensor in expected.items() if "gradient" in name]
    floor = 1e-3 * max(of_gradients, default=0.0)
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
    # Through the CPU, since a link between GPUs may be broken.
    there = found.cpu().to(expected.device).double()
    largest = float((there - expected).abs().max())
    return largest / max(_size(expected), floor, 1e-300)


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.abs().max())
