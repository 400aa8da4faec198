"""Tests skips on GPUs: the plain model's values, one copy each way, in the right streams.

What waits for nobody is found out by keeping streams busy, see ``sleep``, and by simulated GPUs.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd import streams as stream
from pipert.skip import Skippable, pop, stash
from tests.helpers.skip_layers import declaring

pytestmark = pytest.mark.cuda

Forward = Generator[Any, Any, Any]

MODES = ["always", "except_last", "never"]
modes = pytest.mark.parametrize("checkpoint", MODES)

ONE_GPU = [
    ["cuda:0", "cuda:0", "cuda:0"],
    ["cpu", "cuda:0", "cpu"],
    ["cuda:0", "cpu", "cuda:0"],
    ["cuda:0", "cpu", "cpu"],
    ["cuda:0", "cuda:0", "cpu"],
    ["cpu", "cpu", "cuda:0"],
    ["cpu", "cuda:0", "cuda:0"],
]
TWO_GPUS = [
    ["cuda:0", "cuda:1", "cuda:0"],
    ["cuda:0", "cuda:0", "cuda:1"],
    ["cuda:0", "cuda:1", "cuda:1"],
    ["cuda:0", "cpu", "cuda:1"],
]
THREE_GPUS = ["cuda:0", "cuda:1", "cuda:2"]

few = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
placements = pytest.mark.parametrize(
    "devices",
    [
        *[pytest.param(devices, id=",".join(devices)) for devices in ONE_GPU],
        *[
            pytest.param(devices, id=",".join(devices), marks=pytest.mark.multi_gpu)
            for devices in TWO_GPUS
        ],
        pytest.param(THREE_GPUS, id=",".join(THREE_GPUS), marks=[pytest.mark.multi_gpu, few]),
    ],
)
ROWS, WIDTH = 64, 1024  # long enough for a copy that is read too early to be seen


def sleep() -> None:
    """Keeps the current stream busy for some 20 ms, so that a missing wait shows."""
    sleep_for_cycles: Any = torch.cuda._sleep
    sleep_for_cycles(40_000_000)


def slowly(x: Tensor, factor: float = 1.0) -> Tensor:
    """``factor * x``, but for some time zero."""
    y = torch.zeros_like(x)
    if x.is_cuda:
        with torch.cuda.device(x.device):
            sleep()
    return y + factor * x


class Stash(Skippable):
    """Stashes what a function makes of its input times two; returns its input times three."""

    def __init__(self, function: Callable[[Tensor], Any] = torch.clone) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.double))
        self.function = function

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", self.function(x * self.factors[0]))
        return x * self.factors[1]


class Add(Skippable):
    """Adds what it pops, if anything; through a function, times a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(5.0, dtype=torch.double))
        self.function = function

    def forward(self, x: Tensor) -> Forward:
        if self.skip_pops:
            x = x + self.function((yield pop("a")))
        return x * self.factor


def model(
    put: Callable[[Tensor], Any] = torch.clone,
    take: Callable[[Tensor], Tensor] = torch.clone,
) -> nn.Sequential:
    """Makes three layers; the first stashes, the last pops."""
    stasher = declaring(Stash, stash=["a"])(put)
    return nn.Sequential(stasher, *[declaring(Add, pop=names)(take) for names in ([], ["a"])])


def pipe_of(module: nn.Sequential, devices: list[str], chunks: int = 4, **options: Any) -> Pipe:
    return Pipe(module, balance=[1, 1, 1], devices=devices, chunks=chunks, **options)


def nodes_behind(y: Tensor) -> set[Any]:
    """Returns all nodes of the graph of ``y``."""
    found, left = set[Any](), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [child for child, _ in node.next_functions]
    return found


def batch(requires_grad: bool = True) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=requires_grad)


def assert_same_step(module: nn.Sequential, devices: list[str], **options: Any) -> None:
    """Asserts that a step on ``devices`` equals that on the CPU, outputs and gradients."""
    plain, x = copy.deepcopy(module), batch()
    expected = plain(x)
    expected.square().sum().backward()
    grad_of_x, x.grad = x.grad, None
    with pipe_of(module, devices, **options) as pipe:
        output = pipe(x)
        output.square().sum().backward()
        torch.testing.assert_close(output.cpu(), expected)
        torch.testing.assert_close(x.grad, grad_of_x)
        for parameter, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None and parameter.grad.device == parameter.device
            torch.testing.assert_close(parameter.grad.cpu(), other.grad)


# The plain model's results ------------------------------------------------------------------------


@placements
@modes
def test_a_step_is_that_of_the_plain_model(devices: list[str], checkpoint: str) -> None:
    assert_same_step(model(), devices, checkpoint=checkpoint)


# Copies -------------------------------------------------------------------------------------------


@placements
@modes
def test_a_skip_is_copied_once_and_its_gradient_once(
    devices: list[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The skip alone is a column wider."""
    copied: list[tuple[str, str]] = []
    real = stream.copy

    def spy(tensors: Any, device: torch.device, *args: Any) -> Any:
        wide = [tensor for tensor in tensors if tensor.shape[1] == WIDTH + 1]
        copied.extend((str(tensor.device), str(device)) for tensor in wide)
        return real(tensors, device, *args)

    def widen(x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :1]], 1)

    monkeypatch.setattr(stream, "copy", spy)
    module = model(put=widen, take=lambda skip: skip[:, :-1])
    with pipe_of(module, devices, chunks=2, checkpoint=checkpoint) as pipe:
        output = pipe(batch())
        there = list(copied)
        copied.clear()
        output.sum().backward()
    first, _, last = devices
    assert there == (2 * [(first, last)] if first != last else [])
    assert copied == (2 * [(last, first)] if first != last else [])


@placements
def test_one_thread_adds_up_the_gradients_of_a_tensor(devices: list[str]) -> None:
    """With gradients from two threads, torch may add to one that another node still passes on."""
    with pipe_of(model(), devices, checkpoint="never") as pipe:
        y = pipe(batch())
    threads = defaultdict[tuple[Any, int], set[torch.device]](set)
    for node in nodes_behind(y):
        for edge in node.next_functions:
            found = [metadata.device for metadata in node._input_metadata]
            threads[edge].add(max(found, key=lambda device: device.type != "cpu"))
    assert len(threads) > 10
    assert all(len(found) == 1 for edge, found in threads.items() if edge[0] is not None)


# Streams ------------------------------------------------------------------------------------------


@placements
@modes
def test_a_copy_waits_for_the_layer_that_stashes_and_a_layer_for_the_copy_it_pops(
    devices: list[str], checkpoint: str
) -> None:
    assert_same_step(model(put=slowly), devices, checkpoint=checkpoint)


@placements
@modes
def test_steps_on_a_stream_of_the_caller_s_own_are_right(
    devices: list[str], checkpoint: str
) -> None:
    own: Any = torch.cuda.Stream("cuda:0")  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own):
        for _ in range(3):
            assert_same_step(model(put=slowly), devices, checkpoint=checkpoint)


# Memory -------------------------------------------------------------------------------------------


def reserved() -> int:
    torch.cuda.synchronize()
    return sum(torch.cuda.memory_reserved(k) for k in range(torch.cuda.device_count()))


@pytest.mark.multi_gpu
def test_a_gpu_in_between_holds_no_skip() -> None:
    """The skip is a hundred times as wide as what goes through."""
    peaks: list[int] = []

    def widen(x: Tensor) -> Tensor:
        return x.repeat(1, 100)

    module = model(put=widen, take=lambda skip: skip[:, :WIDTH])
    with torch.no_grad(), pipe_of(module, ["cuda:0", "cuda:1", "cuda:0"], chunks=1) as pipe:
        pipe(batch())
        torch.cuda.synchronize("cuda:1")
        torch.cuda.reset_peak_memory_stats("cuda:1")
        pipe(batch())
        peaks.append(torch.cuda.max_memory_allocated("cuda:1"))
    assert peaks[0] < 50 * ROWS * WIDTH * 8
