"""Tests that compiled functions run backward in contexts of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.layers import compiling

pytestmark = [
    pytest.mark.slow,  # the first compilation imports for seconds
    pytest.mark.usefixtures("forget_compiled"),
    # Of dynamo: about itself, and of NumPy, which need not be there.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("make", [nn.Tanh, lambda: nn.ReLU(inplace=True)], ids=["new", "in place"])
def test_a_compiled_layer_has_its_own_backward_context_and_earlier_ones_have_not(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(compiling, "_use_own_context", called.append)
    before: Any = torch.compile(make(), backend="aot_eager")
    layer: Any = torch.compile(make(), backend="aot_eager")
    x = before(torch.ones(3, requires_grad=True).clone())
    makers = [x.grad_fn]
    y = layer(x)
    compiling.give_own_contexts([y], makers)
    y.sum().backward()
    assert len(called) == 1
