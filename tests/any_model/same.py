"""Decides whether the gradients of a pipe count as equal to the plain model's.

Each micro-batch is computed by the same operations on the same shapes, so only the order in which
gradients are summed may differ. In a gradient that would be zero without rounding, the difference
is as large as the rounding errors of other gradients. So all share one absolute tolerance.
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
    """Asserts that the same parameters have gradients, and that these are equal."""
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
    """Returns the largest absolute entry of all gradients."""
    return max((float(g.abs().max()) for g in gradients.values() if g is not None), default=0.0)


def tolerance_of(tensor: Tensor) -> float:
    """Returns the tolerance, which also allows for models that partly compute in float32."""
    return 1e-7 if tensor.dtype == torch.float64 else 2e-6


def _missing(gradients: dict[str, Tensor | None]) -> Iterable[str]:
    return {name for name, gradient in gradients.items() if gradient is None}
