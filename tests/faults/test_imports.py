"""Tests R6: a layer that imports what its caller is importing waits for nobody for ever."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.activations import until

# A service makes and warms up its model at its import; a layer imports the service.
SERVICE = """
import torch
from torch import nn

import pipert

FACTOR = 2.0


class Scale(nn.Module):
    def forward(self, x):
        from warmed_service import FACTOR

        return x * FACTOR


two = nn.Sequential(nn.Linear(4, 4), Scale())
x = torch.ones(4, 4)
settings = dict(devices=["cpu", "cpu"], chunks=2, timeout={timeout})
pipe = {make}
error = None
try:
    {run}
except pipert.PipertError as raised:
    error = raised
"""
MAKES = ("pipert.Pipe(two, [1, 1], **settings)", "pipert.pipeline(two, ['1'], **settings)")
RUNS = {
    "call": "pipe(x)",
    "step": "pipe.forward_backward(x, loss_fn=lambda y, _: y.sum())",
    "map": "list(pipe.map([x, x]))",
    "left": "with pipe:\n        pipe(x)",
}

makes = pytest.mark.parametrize("make", MAKES, ids=["Pipe", "any model"])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("apart")]  # it takes a look each 0.5 s


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "warmed_service", raising=False)


@makes
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_a_layer_that_imports_what_its_caller_is_importing_is_refused(
    make: str, run: str, tmp_path: Path
) -> None:
    source = SERVICE.format(make=make, run=run, timeout=None)
    (tmp_path / "warmed_service.py").write_text(source)
    service: Any = importlib.import_module("warmed_service")
    message = str(service.error)
    assert type(service.error).__name__ == "ReentrantCallError"
    assert "'warmed_service'" in message and "after that import" in message
    service.error = None
    service.pipe.close()


def test_afterwards_the_pipe_is_usable(tmp_path: Path) -> None:
    source = SERVICE.format(make=MAKES[0], run="pipe(x)", timeout=None)
    (tmp_path / "warmed_service.py").write_text(source)
    service: Any = importlib.import_module("warmed_service")
    service.error = None
    with service.pipe as pipe:
        until(lambda: pipe.statistics().workers[1].doing is None)  # the layer goes on
        assert pipe(service.x).equal(service.two(service.x))
