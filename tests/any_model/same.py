"""When results of a pipe count as the plain model's.

Each micro-batch is computed by the same operations on the same shapes, so all that may differ is
the order in which gradients are summed. What is left of that in a gradient that is zero but for
rounding has the size of the rounding errors of others: there is one absolute tolerance for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

__all__ = ["assert_same", "scale_of", "tolerance_of"]


def assert_same(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], slack: float = 1.0
) -> None:
    """The same parameters have gradients, and these are equal."""
    assert _missing(actual) == _missing(expected)
    scale = scale_of(expected)
    for name, gradient in expected.items():
        found = actual[name]
        if gradient is not None and found is not None:
            tolerance = tolerance_of(gradient) * slack
            torch.testing.assert_close(
                found, gradient, rtol=tolerance, atol=tolerance * scale,
                msg=partial("{}: {}".format, name),
            )  # fmt: skip


def scale_of(gradients: dict[str, Tensor | None]) -> float:
    """The largest entry of any."""
    return max((float(g.abs().max()) for g in gradients.values() if g is not None), default=0.0)


def tolerance_of(tensor: Tensor) -> float:
    """Of models that compute some of what they do in float32, too."""
    return 1e-7 if tensor.dtype == torch.float64 else 2e-6


def _missing(gradients: dict[str, Tensor | None]) -> Iterable[str]:
    return {name for name, gradient in gradients.items() if gradient is None}
