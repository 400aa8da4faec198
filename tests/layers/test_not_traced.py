"""Tests that tools which trace modules into graphs refuse a pipe by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipert import Pipe, TransformError

X = torch.ones(4, 3)
jit: Any = torch.jit
BY: dict[str, Callable[[nn.Module], Any]] = {
    "torch.export": lambda module: torch.export.export(module, (X,)),
    "torch.jit.trace": lambda module: jit.trace(module, X),
}


class Around(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Any) -> Any:
        return self.inside(x)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda pipe: pipe, Around], ids=["itself", "within"])
@pytest.mark.parametrize("by", BY)
def test_the_refusal_says_what_to_pass_instead(
    by: str, around: Callable[[nn.Module], nn.Module]
) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with Pipe(layers, [1, 1], devices=["cpu"] * 2) as pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        with pytest.raises(TransformError, match=r"torch.export.* nn.Sequential\(\*pipe\)"):
            BY[by](around(pipe))
        made = BY[by](nn.Sequential(*pipe))
        made = made.module() if by == "torch.export" else made
        assert torch.equal(made(X), pipe(X))
