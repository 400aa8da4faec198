"""Tests that each wait between streams exists, in settings where no other wait replaces it.

The numbers are right even without the wait. The test fails because the simulated GPUs report
unordered accesses, or memory reused while it is still read; so on
real GPUs these tests show little. ``python -m tests.mutants`` shows which of them notices what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Skippable, pop, skippable
from tests.cuda.streams import own_streams
from tests.helpers.skip_layers import popping, stashing
from tests.layers import Apply

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

ROWS, WIDTH = 8, 4


class Scale(nn.Module):
    """A layer whose backward needs its input and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def stash_two() -> nn.Module:
    return stashing(make=lambda x: x * 2, after=lambda x: x * 3)


def scales(n: int) -> nn.Sequential:
    return nn.Sequential(*[Scale() for _ in range(n)])


def with_skip() -> nn.Sequential:
    return nn.Sequential(stash_two(), Scale(), popping(take=torch.mul))


def pipe_of(module: nn.Sequential, devices: list[str], **options: Any) -> Pipe:
    return Pipe(module, [1] * len(devices), devices=devices, chunks=4, **options)


def batch(device: str = "cuda:0", grad: bool = False) -> Tensor:
    x = torch.randn(ROWS, WIDTH, device=device)
    return x.requires_grad_(grad)


def square(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


PLACES = {
    "there and back": ["cuda:0", "cuda:1", "cuda:0"],
    "on": ["cuda:0", "cuda:1", "cuda:2"],
    "skip alone": ["cuda:0", "cuda:1", "cuda:1"],
    "late": ["cuda:0", "cuda:0", "cuda:1"],
}
places = pytest.mark.parametrize("devices", PLACES.values(), ids=PLACES.keys())


def call(pipe: Pipe, x: Tensor) -> None:
    y = pipe(x)
    y.square().mean().backward()


def step(pipe: Pipe, x: Tensor) -> None:
    target = torch.randn(ROWS, WIDTH, device=pipe.devices[-1])
    pipe.forward_backward(x, target=target, loss_fn=square)


ways = pytest.mark.parametrize("train", [call, step])
modes = pytest.mark.parametrize("checkpoint", ["always", "never"])


@pytest.fixture(params=["default", "own"])
def streams(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets the caller compute on the default streams, or on streams of its own."""
    with contextlib.ExitStack() as stack:
        if request.param == "own":
            for k in range(3):
                stream: Any = torch.cuda.Stream(f"cuda:{k}")  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(stream))
        yield


# Values and gradients from partition to partition -------------------------------------------------


@places
@modes
@ways
@pytest.mark.parametrize("make", [lambda: scales(3), with_skip], ids=["plain", "skip"])
def test_a_step_needs_no_synchronisation(
    make: Callable[[], nn.Sequential], train: Callable[[Pipe, Tensor], None], checkpoint: str,
    devices: list[str], streams: None,
) -> None:  # fmt: skip
    with pipe_of(make(), devices, checkpoint=checkpoint) as pipe:
        x = batch(grad=True)
        for _ in range(2):
            train(pipe, x)


@places
@pytest.mark.parametrize("make", [lambda: scales(3), with_skip], ids=["plain", "skip"])
def test_repeated_calls_without_grad_need_no_synchronisation(
    make: Callable[[], nn.Sequential], devices: list[str], streams: None
) -> None:
    """Without a backward, no copy stream waits for the reader of its last copy."""
    with pipe_of(make(), devices) as pipe, torch.no_grad():
        x = batch()
        for _ in range(3):
            pipe(x)


@skippable(pop=["skip"])
class PopOne(Skippable):
    """A layer in which only one of value and skip gets a gradient."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x.detach() + skip * skip if self.skip else x * x + skip.detach()


@places
@ways
@pytest.mark.parametrize("skip", [True, False])
def test_a_gradient_of_a_skip_or_a_value_alone_needs_no_synchronisation(
    skip: bool, train: Callable[[Pipe, Tensor], None], devices: list[str], streams: None
) -> None:
    module = nn.Sequential(stash_two(), Scale(), PopOne(skip))
    with pipe_of(module, devices, checkpoint="never") as pipe:
        for _ in range(2):
            train(pipe, batch(grad=True))


@places
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_needs_no_synchronisation(devices: list[str], streams: None) -> None:
    """Anomaly detection reads the gradients of each node at once."""
    with pipe_of(with_skip(), devices) as pipe, torch.autograd.detect_anomaly():
        for _ in range(2):
            call(pipe, batch(grad=True))


# Arguments, targets, weights ----------------------------------------------------------------------


@ways
@pytest.mark.parametrize("grad", [False, True])
def test_arguments_from_elsewhere_need_no_synchronisation(
    train: Callable[[Pipe, Tensor], None], grad: bool, streams: None
) -> None:
    with pipe_of(scales(1), ["cuda:0"]) as pipe:
        for _ in range(2):
            x = batch("cuda:1").mul(2).requires_grad_(grad)
            train(pipe, x)
            if x.grad is not None:
                x.grad.mul_(2)


def test_a_target_from_elsewhere_needs_no_synchronisation(streams: None) -> None:
    with pipe_of(scales(2), ["cuda:0", "cuda:1"]) as pipe:
        for _ in range(2):
            target = batch("cuda:2").mul(2)
            pipe.forward_backward(batch(), target=target, loss_fn=square)


class Times(nn.Module):
    """A layer that scales by another layer's weight."""

    def __init__(self, other: Scale) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_autograd_knows_the_stream_that_the_gradient_of_a_weight_is_written_on() -> None:
    """Otherwise autograd warns that this is not the weight's stream, and synchronises more."""
    new: Any = torch.cuda.Stream
    new("cuda:1")  # or streams of both devices have the same numbers, which is all it looks at
    with own_streams("cuda:0", "cuda:1"):
        first = Scale()
        with pipe_of(nn.Sequential(first, Times(first)), ["cuda:0", "cuda:1"]) as pipe:
            for _ in range(2):
                call(pipe, batch())


@ways
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]], ids=",".join)
def test_a_tied_weight_needs_no_synchronisation(
    train: Callable[[Pipe, Tensor], None], devices: list[str], streams: None
) -> None:
    first = Scale()
    with pipe_of(nn.Sequential(first, Times(first)), devices) as pipe:
        for _ in range(2):
            train(pipe, batch())
            with torch.no_grad():
                first.weight.sub_(first.weight)


@ways
def test_a_tied_weight_alone_is_copied_and_needs_no_synchronisation(
    train: Callable[[Pipe, Tensor], None], streams: None
) -> None:
    """Its partition's input is on the device already, so no wait for that replaces this one."""
    first = Scale()
    module = nn.Sequential(first, Scale(), Times(first))
    with pipe_of(module, ["cuda:0", "cuda:1", "cuda:1"]) as pipe:
        for _ in range(2):
            train(pipe, batch())


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]], ids=",".join)
def test_a_tied_weight_that_was_just_changed_is_copied_after_that(
    devices: list[str], streams: None
) -> None:
    first = Scale()
    with pipe_of(nn.Sequential(first, Times(first)), devices) as pipe, torch.no_grad():
        for _ in range(3):
            first.weight.mul_(0.5)
            pipe(batch())


# Independent callers ------------------------------------------------------------------------------


def test_steps_on_two_streams_need_no_synchronisation_between_them() -> None:
    """They share copy streams, whose memory the next step reuses."""
    pipe = pipe_of(scales(2).requires_grad_(False), ["cuda:0", "cuda:1"], checkpoint="never")
    with pipe:
        for _ in range(4):
            with contextlib.ExitStack() as stack:
                for k in range(2):
                    stream: Any = torch.cuda.Stream(f"cuda:{k}")  # type: ignore[no-untyped-call]
                    stream.wait_stream(torch.cuda.default_stream(k))  # for the weights
                    stack.enter_context(torch.cuda.stream(stream))
                call(pipe, batch(grad=True))
        for k in range(2):
            torch.cuda.synchronize(k)  # before the weights may go


def test_a_gradient_is_recorded_on_the_stream_that_the_forward_computed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The autograd thread that copies it has another current stream on that device."""
    own: Any = torch.cuda.Stream("cuda:0")  # type: ignore[no-untyped-call]
    recorded: list[Any] = []
    record: Any = Tensor.record_stream

    def note(tensor: Tensor, stream: Any) -> None:
        recorded.append(stream)
        record(tensor, stream)

    monkeypatch.setattr(Tensor, "record_stream", note)
    with pipe_of(scales(2), ["cuda:0", "cuda:1"]) as pipe, torch.cuda.stream(own):
        y = pipe(batch())
        recorded.clear()
        y.sum().backward()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert own in recorded and torch.cuda.default_stream(0) not in recorded


class Conjugating(nn.Linear):
    """A layer whose output is conjugated or negated lazily, when it is used."""

    def __init__(self, imaginary: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.imaginary = imaginary

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(super().forward(x), x).conj()
        return y.imag if self.imaginary else y


@ways
@modes
@pytest.mark.parametrize("imaginary", [False, True], ids=["conjugate", "negative"])
def test_lazily_conjugated_tensors_need_no_synchronisation(
    imaginary: bool, train: Callable[[Pipe, Tensor], None], checkpoint: str
) -> None:
    module = nn.Sequential(Conjugating(imaginary), Apply(lambda y: (y * y.conj()).real))
    with pipe_of(module, ["cuda:0", "cuda:1"], checkpoint=checkpoint) as pipe:
        train(pipe, batch(grad=True))
