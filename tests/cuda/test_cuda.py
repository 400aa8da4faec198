"""Tests on real GPUs: the same results, in the right streams, in flat memory.

Additional proof. Tests that can run on CPU do so elsewhere; these need a device. All
are skipped without a CUDA device, those marked ``multi_gpu`` with only one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe

pytestmark = pytest.mark.cuda

MODES = ["always", "except_last", "never"]

ONE_GPU = [
    ["cuda:0"],
    ["cuda:0", "cuda:0"],
    ["cuda:0", "cuda:0", "cuda:0"],
    ["cuda:0", "cpu"],
    ["cpu", "cuda:0"],
    ["cpu", "cuda:0", "cpu"],
    ["cuda:0", "cpu", "cuda:0"],
]
TWO_GPUS = [
    ["cuda:0", "cuda:1"],
    ["cuda:1", "cuda:0"],
    ["cuda:0", "cuda:1", "cuda:0"],
    ["cuda:0", "cpu", "cuda:1"],
]

modes = pytest.mark.parametrize("checkpoint", MODES)
placements = pytest.mark.parametrize(
    "devices",
    [
        *[pytest.param(devices, id=",".join(devices)) for devices in ONE_GPU],
        *[
            pytest.param(devices, id=",".join(devices), marks=pytest.mark.multi_gpu)
            for devices in TWO_GPUS
        ],
    ],
)


class Note(nn.Module):
    """A layer that returns its input after showing it to ``function``."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.function(x)
        return x


def perceptron(partitions: int, width: int = 16) -> nn.Sequential:
    """Makes two layers per partition, in double precision to allow comparison with the CPU."""
    layers: list[nn.Module] = []
    for _ in range(partitions):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers).double()


def pipe_of(module: nn.Sequential, devices: list[str], chunks: int = 4, **options: Any) -> Pipe:
    """Makes a pipe with equally many layers on each device."""
    n = len(devices)
    balance = [len(module) // n] * n
    return Pipe(module, balance=balance, devices=devices, chunks=chunks, **options)


# The plain module's results -----------------------------------------------------------------------


@placements
@modes
def test_outputs_and_gradients_are_those_of_the_plain_module(
    devices: list[str], checkpoint: str
) -> None:
    plain = perceptron(len(devices))
    x = torch.randn(10, 16, dtype=torch.double, requires_grad=True)
    expected = plain(x)
    expected.pow(2).sum().backward()
    grads = [parameter.grad for parameter in plain.parameters()]
    grad_of_x, x.grad = x.grad, None
    module = copy.deepcopy(plain)
    module.zero_grad()
    with pipe_of(module, devices, checkpoint=checkpoint) as pipe:
        y = pipe(x)
        y.pow(2).sum().backward()
        torch.testing.assert_close(y.cpu(), expected)
        torch.testing.assert_close(x.grad, grad_of_x)
        for parameter, grad in zip(pipe.parameters(), grads, strict=True):
            assert parameter.grad is not None and parameter.grad.device == parameter.device
            torch.testing.assert_close(parameter.grad.cpu(), grad)


@placements
def test_an_input_may_be_on_the_gpu_wherever_the_pipe_begins(devices: list[str]) -> None:
    plain = perceptron(len(devices))
    x = torch.randn(10, 16, dtype=torch.double)
    with pipe_of(copy.deepcopy(plain), devices) as pipe:
        torch.testing.assert_close(pipe(x.to("cuda:0")).cpu(), plain(x))


def test_what_a_layer_keeps_on_cpu_on_purpose_stays_there() -> None:
    class Lengths(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.ones(len(x), dtype=torch.long, device="cpu")

    found: list[str] = []

    class Look(nn.Module):
        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            found.extend(tensor.device.type for tensor in value)
            return value[0]

    with pipe_of(nn.Sequential(Lengths(), Look()), ["cuda:0", "cuda:0"], chunks=1) as pipe:
        pipe(torch.ones(4, 16))
    assert found == ["cuda", "cpu"]


# Threads ------------------------------------------------------------------------------------------


def threads_of(devices: list[str]) -> set[str]:
    """Returns the names of the threads that compute the partitions."""
    names: set[str] = set()
    notes = [Note(lambda x: names.add(threading.current_thread().name)) for _ in devices]
    with pipe_of(nn.Sequential(*notes), devices) as pipe, torch.no_grad():
        pipe(torch.ones(8, 1))
    return names


@pytest.mark.layered  # names of threads
def test_one_gpu_has_one_worker_however_many_partitions_it_holds() -> None:
    assert threads_of(["cuda:0", "cuda:0", "cuda:0"]) == {"pipert-cuda:0-0"}


@pytest.mark.layered  # names of threads
@pytest.mark.multi_gpu
def test_each_gpu_has_a_worker() -> None:
    assert threads_of(["cuda:0", "cuda:1"]) == {"pipert-cuda:0-0", "pipert-cuda:1-1"}


@pytest.mark.multi_gpu
def test_partitions_on_two_gpus_run_at_once() -> None:
    both = threading.Barrier(2)

    class Meet(nn.Module):
        def __init__(self, j: int) -> None:
            super().__init__()
            self.j = j

        def forward(self, x: Tensor) -> Tensor:
            if (int(x[0, 0].item()), self.j) in {(1, 0), (0, 1)}:
                both.wait(5)
            return x

    with pipe_of(nn.Sequential(Meet(0), Meet(1)), ["cuda:0", "cuda:1"], chunks=2) as pipe:
        x = torch.arange(2.0).unsqueeze(1)
        assert torch.equal(pipe(x).cpu(), x)


@pytest.mark.multi_gpu
def test_the_current_device_of_a_layer_is_the_one_of_its_partition() -> None:
    found: list[int] = []
    notes = [Note(lambda x: found.append(torch.cuda.current_device())) for _ in range(2)]
    with pipe_of(nn.Sequential(*notes), ["cuda:0", "cuda:1"], chunks=1) as pipe:
        pipe(torch.ones(4, 1))
    assert found == [0, 1]


# Random numbers -----------------------------------------------------------------------------------


@placements
@modes
def test_dropout_is_reproducible_with_a_seed(devices: list[str], checkpoint: str) -> None:
    module = nn.Sequential()
    for _ in devices:
        module.append(nn.Linear(16, 16))
        module.append(nn.Dropout())
    results = []
    with pipe_of(module, devices, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            torch.manual_seed(3)
            y = pipe(torch.ones(8, 16))
            results.append((y, *torch.autograd.grad(y.sum(), list(pipe.parameters()))))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@modes
def test_a_recomputation_replays_the_mask_of_a_dropout(checkpoint: str) -> None:
    x = torch.ones(8, 256, device="cuda:0", requires_grad=True)
    module = nn.Sequential(nn.Dropout(), nn.Dropout(0.2))
    with pipe_of(module, ["cuda:0", "cuda:0"], checkpoint=checkpoint) as pipe:
        y = pipe(x)
        torch.rand(1000, device="cuda:0")  # the caller draws, too
        (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, y)


def test_a_recomputation_leaves_the_gpu_s_generator_alone() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout())
    with pipe_of(module, ["cuda:0"], checkpoint="always") as pipe:
        y = pipe(torch.ones(8, 16))
        state = torch.cuda.get_rng_state("cuda:0")
        y.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state("cuda:0"), state)


def test_a_model_that_draws_on_the_gpu_alone_moves_the_cpu_s_generator_by_one_draw() -> None:
    """The run's seed is drawn on the CPU for any device; the GPU's own generator does not move."""
    on_gpu = torch.cuda.get_rng_state("cuda:0")
    state = torch.get_rng_state()
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    with pipe_of(nn.Sequential(nn.Dropout()), ["cuda:0"]) as pipe:
        pipe(torch.ones(8, 16))
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.equal(torch.cuda.get_rng_state("cuda:0"), on_gpu)


# Memory -------------------------------------------------------------------------------------------


def reserved() -> int:
    torch.cuda.synchronize()
    return sum(torch.cuda.memory_reserved(k) for k in range(torch.cuda.device_count()))


def wide(partitions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(partitions):
        layers += [nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*layers)


@pytest.mark.slow
@placements
@modes
def test_pitfall_29_reserved_memory_stays_flat(devices: list[str], checkpoint: str) -> None:
    x = torch.randn(512, 256)
    with pipe_of(wide(len(devices)), devices, checkpoint=checkpoint) as pipe:
        sizes = []
        for step in range(300):
            pipe(x).sum().backward()
            pipe.zero_grad()
            if step in (99, 299):
                sizes.append(reserved())
    assert sizes[1] <= sizes[0]


# Failures -----------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """A layer that asks for more memory than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = True

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and x.size(0) > 1:
            total = torch.cuda.get_device_properties("cuda:0").total_memory
            torch.empty(2 * total, dtype=torch.uint8, device="cuda:0")
        return x


@placements
def test_the_pipe_is_usable_after_an_out_of_memory_error(devices: list[str]) -> None:
    greedy = Greedy()
    module = wide(len(devices))
    module[-1] = greedy
    x = torch.randn(512, 256)
    with pipe_of(module, devices) as pipe:
        with pytest.raises(torch.OutOfMemoryError):
            pipe(x)
        greedy.armed = False
        pipe(x).sum().backward()
        assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.layered  # a model without cuts is one layer
def test_a_note_names_the_gpu() -> None:
    def fail(x: Tensor) -> None:
        raise ValueError

    with pipe_of(nn.Sequential(Note(fail)), ["cuda:0"], chunks=2) as pipe:
        with pytest.raises(ValueError) as info:
            pipe(torch.ones(4, 3))
    assert info.value.__notes__ == [
        "in forward F[0,0]: partition 0 on cuda:0, layer '0' (Note), micro-batch 0 of 2, "
        "input float32[2, 3]"
    ]
