"""Tests functions made by torch.compile that a model calls between its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.any_model.family import ROWS, Family, Made
from tests.any_model.piped import HOWS, How, assert_equal, each_how, pipeline, results

pytestmark = [
    pytest.mark.slow,  # the first compilation imports for seconds
    pytest.mark.usefixtures("forget_compiled"),
    # Of dynamo: about itself, and of NumPy, which need not be there.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
each_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])

Function = Callable[..., Any]


class Calling(nn.Module):
    """A model that calls a function in its second partition, with a tensor of each partition."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 20, nn.Linear(4, 4)) for _ in range(3)
        )
        self.function, self.clones = function, True

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) * 1
        z = self.b(y + 1)
        given = y.clone() if self.clones else y
        return self.c(self.function(given, z)) * y


def family(function: Function) -> Family:
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    return Family("calling", lambda: Made(Calling(function).double(), batch), ("b", "c"))


def reads(y: Tensor, z: Tensor) -> Tensor:
    return F.gelu(y) * z.sigmoid() + y


def breaks(y: Tensor, z: Tensor) -> Tensor:
    y = y * z
    torch._dynamo.graph_break()
    return y.exp() + z


def writes(y: Tensor, z: Tensor) -> Tensor:
    return y.add_(z).exp()


@pytest.mark.pairwise
@each_how
@each_backend
@pytest.mark.parametrize("function", [reads, breaks, writes])
def test_a_compiled_function_may_be_called_between_layers(
    function: Function, backend: str, how: How
) -> None:
    compiled = torch.compile(function, backend=backend, dynamic=True)
    own = family(compiled)
    assert_equal(*results(own.make(), own, how))


@each_backend
def test_a_function_is_compiled_once_for_all_micro_batches(backend: str) -> None:
    graphs = []
    own = family(torch.compile(reads, backend=backend, fullgraph=True))
    for _ in range(2):
        results(own.make(), own, HOWS[3])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_a_compiled_function_may_be_called_in_a_loss() -> None:
    own = family(reads)
    compiled = torch.compile(own.loss, backend="eager")
    one = dataclasses.replace(own, loss=lambda output: compiled(output))
    assert_equal(*results(own.make(), one, HOWS[3]))


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.parametrize("schedule", ["", "1f1b"], ids=["call", "step"])
def test_a_compiled_function_gets_no_tensor_copied_from_another_device(schedule: str) -> None:
    compiled = torch.compile(reads, backend="aot_eager")
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    for refused in (False, True):
        own = family(compiled)
        model: Any = own.make().model
        model.clones = not refused
        devices = ["cuda:0", "cuda:1", "cuda:0"]
        with pipeline(model, own, "never", devices=devices) as pipe:
            if not refused:
                run(pipe, x, schedule)
                continue
            with pytest.raises(RuntimeError, match="same device") as caught:
                run(pipe, x, schedule)
            assert "make it a module" in caught.value.__notes__[-1]


def run(pipe: Any, x: Tensor, schedule: str) -> None:
    if schedule:
        pipe.forward_backward(x, loss_fn=mean_of, schedule=schedule)
    else:
        mean_of(pipe(x)).backward()


def mean_of(output: Any, _: Any = None) -> Any:
    return output.square().mean()
