"""Tests on real GPUs: the same results, in the right streams, in flat memory.

Additional proof. Tests that can run on CPU do so elsewhere; these need a device. All
are skipped without a CUDA device, those marked ``multi_gpu`` with only one.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from tests.cuda.streams import own_streams, sleep

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
def test_inference_gives_the_plain_module_s_output(devices: list[str]) -> None:
    plain = perceptron(len(devices))
    x = torch.randn(10, 16, dtype=torch.double)
    with torch.no_grad(), pipe_of(copy.deepcopy(plain), devices) as pipe:
        torch.testing.assert_close(pipe(x).cpu(), plain(x))


@placements
def test_the_output_is_on_the_last_device(devices: list[str]) -> None:
    with pipe_of(perceptron(len(devices)), devices) as pipe:
        y = pipe(torch.randn(4, 16, dtype=torch.double))
    assert y.device == torch.device(devices[-1])


@placements
def test_an_input_may_be_on_the_gpu_wherever_the_pipe_begins(devices: list[str]) -> None:
    plain = perceptron(len(devices))
    x = torch.randn(10, 16, dtype=torch.double)
    with pipe_of(copy.deepcopy(plain), devices) as pipe:
        torch.testing.assert_close(pipe(x.to("cuda:0")).cpu(), plain(x))


def test_a_gradient_goes_back_to_an_input_on_the_gpu_of_a_pipe_that_begins_on_cpu() -> None:
    x = torch.randn(4, 16, dtype=torch.double, device="cuda:0", requires_grad=True)
    with pipe_of(perceptron(2), ["cpu", "cuda:0"]) as pipe:
        pipe(x).sum().backward()
    assert x.grad is not None and x.grad.device == x.device


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


def test_a_device_may_be_named_by_its_index() -> None:
    with Pipe(perceptron(1), balance=[2], devices=[0]) as pipe:
        assert pipe.devices == [torch.device("cuda", 0)]


def test_the_default_devices_are_the_gpus() -> None:
    with Pipe(perceptron(1), balance=[2]) as pipe:
        assert pipe.devices == [torch.device("cuda", 0)]


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
def test_one_gpu_has_one_worker_when_the_cpu_comes_in_between() -> None:
    assert threads_of(["cuda:0", "cpu", "cuda:0"]) == {"pipert-cuda:0-0", "pipert-cpu-1"}


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


def test_a_call_leaves_the_caller_s_device_and_stream_alone() -> None:
    with own_streams("cuda:0") as (stream,), pipe_of(perceptron(2), ["cuda:0", "cpu"]) as pipe:
        pipe(torch.ones(4, 16, dtype=torch.double)).sum().backward()
        assert torch.cuda.current_stream("cuda:0") == stream
        assert torch.cuda.current_device() == 0


# Streams ------------------------------------------------------------------------------------------


@modes
def test_layers_compute_on_the_current_stream_of_the_caller(checkpoint: str) -> None:
    seen: list[tuple[bool, Any]] = []
    module = perceptron(1)
    module.append(Note(lambda x: seen.append((is_recomputing(), torch.cuda.current_stream()))))
    with pipe_of(module, ["cuda:0"], checkpoint=checkpoint) as pipe:
        with own_streams("cuda:0") as (stream,):
            pipe(torch.ones(4, 16, dtype=torch.double, device="cuda:0")).sum().backward()
    assert {found for _, found in seen} == {stream}
    assert any(again for again, _ in seen) == (checkpoint != "never")


@placements
def test_a_call_waits_for_the_pending_work_of_the_caller_s_stream(devices: list[str]) -> None:
    with pipe_of(nn.Sequential(*[nn.Identity() for _ in devices]), devices) as pipe:
        for attempt in range(3):
            with own_streams("cuda:0"):
                x = torch.zeros(64, 1024, device="cuda:0")
                sleep()
                x += attempt + 1
                y = pipe(x)
                total = y.sum().item()
            assert total == (attempt + 1) * 64 * 1024


@placements
def test_copies_wait_for_the_layers_and_layers_for_the_copies(devices: list[str]) -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            if x.is_cuda:
                with torch.cuda.device(x.device):
                    sleep()
            return y + x + 1

    with pipe_of(nn.Sequential(*[Slow() for _ in devices]), devices) as pipe, torch.no_grad():
        y = pipe(torch.zeros(64, 1024))
        assert torch.equal(y.cpu(), torch.full((64, 1024), float(len(devices))))


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        doubled = torch.zeros_like(grads[0])
        if doubled.is_cuda:
            sleep()
        return doubled + 2 * grads[0]


class SlowBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SlowBackward.apply(x)  # type: ignore[no-untyped-call]
        return y


@placements
@modes
def test_the_backward_copies_gradients_when_they_have_been_computed(
    devices: list[str], checkpoint: str
) -> None:
    x = torch.zeros(64, 1024, requires_grad=True)
    module = nn.Sequential(*[SlowBackward() for _ in devices])
    with pipe_of(module, devices, checkpoint=checkpoint) as pipe:
        pipe(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((64, 1024), 2.0 ** len(devices)))


@placements
def test_a_step_on_a_stream_of_the_caller_s_own_is_right(devices: list[str]) -> None:
    module = nn.Sequential(*[SlowBackward() for _ in devices])
    with pipe_of(module, devices) as pipe, own_streams("cuda:0"):
        for _ in range(3):
            x = torch.zeros(64, 1024, device="cuda:0", requires_grad=True)
            pipe(x).sum().backward()
            assert x.grad is not None
            total = x.grad.sum().item()
            assert total == 64 * 1024 * 2.0 ** len(devices)


def test_the_copy_streams_are_made_once() -> None:
    with pipe_of(perceptron(2), ["cuda:0", "cpu"]) as pipe:
        for _ in range(3):
            pipe(torch.ones(8, 16, dtype=torch.double)).sum().backward()
        assert repr(pipe._runtime._streams) == "<CopyStreams, 4 made>"


def test_partitions_on_one_gpu_need_no_copy_streams() -> None:
    with pipe_of(perceptron(2), ["cuda:0", "cuda:0"]) as pipe:
        pipe(torch.ones(8, 16, dtype=torch.double, device="cuda:0")).sum().backward()
        assert repr(pipe._runtime._streams) == "<CopyStreams, 0 made>"


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


def test_micro_batches_draw_different_numbers_on_the_gpu() -> None:
    with pipe_of(nn.Sequential(nn.Dropout()), ["cuda:0"]) as pipe:
        y = pipe(torch.ones(4, 64))
    assert len({tuple(row.tolist()) for row in y}) == 4


# Autocast -----------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_reaches_forward_and_recomputation(checkpoint: str, dtype: torch.dtype) -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    module = nn.Sequential(
        nn.Linear(16, 16), Note(lambda x: seen.append((is_recomputing(), x.dtype)))
    )
    with pipe_of(module, ["cuda:0"], checkpoint=checkpoint) as pipe:
        with torch.autocast("cuda", dtype=dtype):
            y = pipe(torch.ones(8, 16, device="cuda:0"))
        y.float().sum().backward()
    assert {found for _, found in seen} == {dtype}
    assert any(again for again, _ in seen) == (checkpoint != "never")


@modes
def test_gradients_under_autocast_are_those_of_the_plain_module(checkpoint: str) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to("cuda:0")
    x = torch.randn(8, 16, device="cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = torch.autograd.grad(plain(x).float().sum(), list(plain.parameters()))
    with Pipe(plain, [2, 1], devices=["cuda:0"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = pipe(x).float().sum()
        grads = torch.autograd.grad(loss, list(pipe.parameters()))
    for grad, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, right, rtol=2e-2, atol=2e-2)


# Memory -------------------------------------------------------------------------------------------


def allocated() -> int:
    torch.cuda.synchronize()
    return sum(torch.cuda.memory_allocated(k) for k in range(torch.cuda.device_count()))


def reserved() -> int:
    torch.cuda.synchronize()
    return sum(torch.cuda.memory_reserved(k) for k in range(torch.cuda.device_count()))


def settle(pipe: Pipe) -> None:
    """Makes a tiny call, since a worker drops its last task just after its caller continues."""
    with torch.no_grad():
        pipe(torch.ones(1, 256))


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


@placements
@modes
def test_pitfall_29_after_a_step_no_activation_is_left(devices: list[str], checkpoint: str) -> None:
    x = torch.randn(512, 256)
    with pipe_of(wide(len(devices)), devices, checkpoint=checkpoint) as pipe:
        levels = []
        for _ in range(3):
            pipe(x).sum().backward()
            settle(pipe)
            levels.append(allocated())  # gradients are kept from the first step on
    assert levels[2] <= levels[1]


@placements
def test_no_activation_is_left_after_inference(devices: list[str]) -> None:
    x = torch.randn(512, 256)
    with pipe_of(wide(len(devices)), devices) as pipe, torch.no_grad():
        pipe(x)
        settle(pipe)
        before = allocated()
        for _ in range(3):
            pipe(x)
        settle(pipe)
        assert allocated() <= before


def test_the_less_is_checkpointed_the_more_memory_waits_for_the_backward() -> None:
    x = torch.randn(4096, 256, device="cuda:0")
    levels = []
    module = wide(2)
    for checkpoint in MODES:
        with pipe_of(module, ["cuda:0", "cuda:0"], checkpoint=checkpoint) as pipe:
            pipe(x).sum().backward()  # workspaces of the libraries are there afterwards
            settle(pipe)
            before = allocated()
            y = pipe(x)
            settle(pipe)
            levels.append(allocated() - before)
            del y
    assert levels[0] < levels[1] < levels[2]


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


def test_no_activation_is_left_after_an_out_of_memory_error() -> None:
    module = wide(2)
    module[-1] = Greedy()
    x = torch.randn(512, 256)
    with pipe_of(module, ["cuda:0", "cuda:0"]) as pipe:
        settle(pipe)
        levels = []
        for _ in range(3):
            with contextlib.suppress(torch.OutOfMemoryError):
                pipe(x)
            settle(pipe)
            levels.append(allocated())
    assert levels[2] <= levels[0]


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


# Two GPUs -----------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_each_gpu_holds_the_parameters_of_its_partitions_alone() -> None:
    with pipe_of(wide(2), ["cuda:0", "cuda:1"]) as pipe:
        homes = [{p.device.index for p in partition.parameters()} for partition in pipe.partitions]
    assert homes == [{0}, {1}]


@pytest.mark.multi_gpu
def test_activations_are_on_the_gpu_of_their_partition() -> None:
    x = torch.randn(4096, 256, device="cuda:0")
    module = wide(2)
    with pipe_of(module, ["cuda:0", "cuda:1"], checkpoint="never") as pipe:
        pipe(x).sum().backward()
        before = [torch.cuda.memory_allocated(k) for k in range(2)]
        y = pipe(x)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        grown = [torch.cuda.memory_allocated(k) - before[k] for k in range(2)]
        del y
    batch = 4096 * 256 * 4
    # Each Tanh keeps what it computes; on the second GPU there are its input and the output, too.
    assert all(2 * batch <= size <= 6 * batch for size in grown)


@pytest.mark.multi_gpu
def test_each_gpu_computes_on_the_stream_that_is_current_on_it_for_the_caller() -> None:
    seen: list[Any] = []
    notes = [Note(lambda x: seen.append(torch.cuda.current_stream(x.device))) for _ in range(2)]
    with pipe_of(nn.Sequential(*notes), ["cuda:0", "cuda:1"], chunks=1) as pipe:
        with own_streams("cuda:0", "cuda:1") as streams:
            pipe(torch.ones(4, 1))
    assert seen == streams


@pytest.mark.multi_gpu
def test_there_are_copy_streams_for_each_gpu_and_micro_batch() -> None:
    with pipe_of(perceptron(2), ["cuda:0", "cuda:1"], chunks=4) as pipe:
        x = torch.ones(8, 16, dtype=torch.double, device="cuda:0")
        for _ in range(2):
            pipe(x).sum().backward()
        assert repr(pipe._runtime._streams) == "<CopyStreams, 8 made>"
