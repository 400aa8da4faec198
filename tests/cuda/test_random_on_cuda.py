"""Random numbers on GPUs: a task has its device's default generator to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert import Pipe, pipeline
from tests.layers import Apply
from tests.simulated_gpus.simulation import Simulation

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

GPUS = ["cuda:0", "cuda:1"]
MODES = ["always", "except_last", "never"]
PATIENCE = 30  # s


def by_another_library(x: Tensor) -> Tensor:
    return x * 2 * torch.ops.other_library.mask(x.detach())  # type: ignore[no-any-return]


def with_a_state_set(x: Tensor) -> Tensor:
    torch.cuda.manual_seed(int(torch.randint(1 << 30, ())))
    return F.dropout(x)


def in_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[x.device.index]):
        return F.dropout(x)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "on the CPU": lambda x: x * float(torch.rand(())),
    "manual_seed": with_a_state_set,
    "fork_rng": in_a_fork,
    "checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=True),
    "another library": by_another_library,
}


def states() -> list[bytes]:
    found = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in GPUS)]
    return [bytes(state.tolist()) for state in found]


def jittering(function: Callable[[Tensor], Tensor], waits: int) -> nn.Module:
    def call(x: Tensor) -> Tensor:
        for _ in range(waits):
            torch.ones(64, 64).sum()
        return function(x)

    return Apply(call)


def outcome(way: Any, mode: str, schedule: str | None, waits: int = 0) -> tuple[Any, ...]:
    layers = nn.Sequential(jittering(way, waits), nn.Dropout(), jittering(way, 0), nn.Dropout())
    x = torch.ones(8, 64, device=GPUS[0], requires_grad=True)
    torch.manual_seed(0)
    before = states()
    with Pipe(layers, [2, 2], devices=GPUS, chunks=4, checkpoint=mode) as pipe:
        if schedule is None:
            y = pipe(x)
            after = states()
            y.sum().backward()
        else:
            _, y = pipe.forward_backward(
                x, loss_fn=lambda y, _: y.sum(), reduction="sum", schedule=schedule,
                return_outputs=True,
            )  # fmt: skip
            after = states()
    assert after[1:] == before[1:] and after[0] != before[0]
    assert x.grad is not None
    return y.cpu(), x.grad.cpu(), after


@pytest.fixture
def library(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["way"] == "another library":
        request.getfixturevalue("gpus")


@pytest.fixture
def gpus() -> Simulation:
    from tests import simulated_gpus

    found = simulated_gpus.running()
    if found is None:
        pytest.skip("has the library: python -m pytest --simulated-gpus")
    return found


CASES = [
    pytest.param(way, mode, schedule, id=f"{way}-{mode}-{schedule or 'call'}")
    for way in WAYS
    for mode in MODES
    for schedule in (None, "gpipe", "1f1b")
    if way != "reentrant checkpoint" or schedule is None  # it is refused in a step
]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("way", "mode", "schedule"), CASES)
def test_gradients_are_those_of_the_forward_whatever_draws(
    way: str, mode: str, schedule: str | None
) -> None:
    y, gradient, after = outcome(WAYS[way], mode, schedule)
    torch.testing.assert_close(gradient, y)
    assert len(set(y.flatten().tolist())) > 1
    again = outcome(WAYS[way], mode, schedule, waits=50)
    assert torch.equal(again[0], y) and torch.equal(again[1], gradient) and again[2] == after


class Model(nn.Module):
    """A model that draws in its own code, on its device and on the CPU, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k == 2 or float(torch.rand(())) < 0.8:  # the cut is always called
                x = F.dropout(layer(x), 0.2, self.training)
        return x


@pytest.mark.parametrize("schedule", [None, "1f1b"], ids=["call", "1f1b"])
def test_a_model_that_keeps_its_forward_draws_the_same_again(schedule: str | None) -> None:
    found = []
    for mode in ("always", "always", "never"):
        torch.manual_seed(1)
        model = Model()
        with pipeline(model, ["layers.2"], devices=GPUS, chunks=3, checkpoint=mode) as pipe:
            torch.manual_seed(0)
            before = states()
            x = torch.ones(6, 8, device=GPUS[0])
            if schedule is None:
                pipe(x).sum().backward()
            else:
                pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), schedule=schedule)
            assert states()[1:] == before[1:]
            found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(functions)

    def call(k: int) -> None:
        found[k] = functions[k]()

    threads = [threading.Thread(target=call, args=(k,), daemon=True) for k in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return found


def repeated(schedule: str | None, device: str) -> Callable[[], bool]:
    """Makes a function that trains a pipe of its own; returns whether all gradients were right."""

    def train() -> bool:
        right = True
        layers = nn.Sequential(nn.Dropout(), nn.Dropout())
        with Pipe(layers, [1, 1], devices=[device] * 2, chunks=4, checkpoint="always") as pipe:
            for _ in range(10):
                x = torch.ones(4, 64, device=device, requires_grad=True)
                if schedule is None:
                    y = pipe(x)
                    y.sum().backward()
                else:
                    _, y = pipe.forward_backward(
                        x, loss_fn=lambda y, _: y.sum(), schedule=schedule, reduction="sum",
                        return_outputs=True,
                    )  # fmt: skip
                assert x.grad is not None
                right &= torch.equal(x.grad, y)
        return right

    return train


@pytest.mark.parametrize("other", [None, "gpipe", "1f1b"])
def test_two_pipes_may_share_a_device(other: str | None) -> None:
    assert in_threads(repeated(None, GPUS[0]), repeated(other, GPUS[0])) == [True, True]


def test_pipes_inside_of_layers_on_each_other_s_devices_do_not_wait_for_each_other() -> None:
    inner = [
        Pipe(nn.Sequential(nn.Dropout(), nn.Dropout()), [1, 1], devices=devices, chunks=2)
        for devices in (GPUS, GPUS[::-1])
    ]

    def layer(pipe: Pipe, device: str) -> nn.Module:
        return Apply(lambda x: F.dropout(pipe(F.dropout(x)).to(device)))

    outer = nn.Sequential(layer(inner[0], GPUS[0]), layer(inner[1], GPUS[1]))

    def train() -> tuple[Tensor, Tensor]:
        x = torch.ones(8, 256, device=GPUS[0], requires_grad=True)
        torch.manual_seed(0)
        y = pipe(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y.cpu(), gradient.cpu()

    with inner[0], inner[1], Pipe(
        outer, [1, 1], devices=GPUS, chunks=4, checkpoint="always"
    ) as pipe:  # fmt: skip
        (first,), (again,) = in_threads(train), in_threads(train)
    assert torch.equal(first[0], again[0]) and torch.equal(*first) and torch.equal(*again)


class Race:
    """The events of two recomputations that go on at once, on autograd's threads of two GPUs."""

    def __init__(self) -> None:
        self.late_in, self.early_in, self.late_out = (threading.Event() for _ in range(3))


class At(torch.autograd.Function):
    """Calls a function with the number of its micro-batch in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[int], object]) -> Tensor:
        ctx.act, ctx.number = act, int(x[0, 0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.act(ctx.number)
        return dy, None


def test_a_backward_leaves_the_state_of_the_cpu_though_checkpoints_in_layers_set_it_at_once() -> (
    None
):
    """Of the second partition's first micro-batch, beside the first partition's second one.

    A checkpoint saves the state, sets that of its forward, and puts back what it has saved. Here
    the first one in is the first one out, so the second one puts back what the first had set.
    """
    race = Race()
    is_going_back = False

    def first(x: Tensor) -> Tensor:
        if is_going_back and int(x[0, 0]) == 1:
            race.early_in.set()
            assert race.late_out.wait(PATIENCE)
        return x + x.sin() * 0  # saves its input

    def second(x: Tensor) -> Tensor:
        if is_going_back and int(x[0, 0]) == 0:
            race.late_in.set()
            assert race.early_in.wait(PATIENCE)
        return x + x.sin() * 0  # saves its input

    def begins(number: int) -> None:
        assert number == 0 or race.late_in.wait(PATIENCE)

    def ends(number: int) -> None:
        if number == 0:
            race.late_out.set()

    at: Any = At.apply
    layers = [
        Apply(lambda x: at(checkpoint(first, x, use_reentrant=False), begins)),
        Apply(lambda x: checkpoint(second, at(x, ends), use_reentrant=False)),
    ]
    x = torch.arange(2.0).view(2, 1).requires_grad_()
    with Pipe(nn.Sequential(*layers), [1, 1], devices=GPUS, chunks=2, checkpoint="never") as pipe:
        torch.manual_seed(0)
        y = pipe(x)
        before, is_going_back = torch.get_rng_state(), True
        y.sum().backward()
    assert race.late_out.is_set() and torch.equal(torch.get_rng_state(), before)
