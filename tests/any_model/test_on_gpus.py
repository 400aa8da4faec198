"""Tests unchanged models on several GPUs: tensors of other devices are copied and waited for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from tests.any_model.piped import CHUNKS, How, each_how
from tests.helpers.ways import grads_of

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


def go_back(loss: Any) -> None:  # torch does not type it
    loss.backward()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = x + self.out(torch.tanh(self.into(x))) * scale
        return found


class Tied(nn.Module):
    """A model whose own code uses the first partition's tensors in all partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(8))
        self.embedding = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.ones(x.shape[0], 1, device=x.device)
        h = self.embedding(x) + self.position
        first, scale = h, h.mean(-1, keepdim=True)
        for layer in self.layers:
            h = layer(h, scale * mask * torch.ones(h.shape[0], 1, device=h.device))
            h = h + self.table + self.position
        return {"logits": self.head(h + first), "scale": scale}


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["logits"] - target).square().mean() + output["scale"].square().mean()


def train(
    model: nn.Module, cuts: list[str], devices: list[str], how: How, x: Tensor, target: Tensor,
    loss_fn: Callable[[Any, Tensor], Tensor] = nn.functional.mse_loss, **more: Any,
) -> Tensor:  # fmt: skip
    """Goes forward and backward in a pipe, and returns the loss."""
    options: dict[str, Any] = {"devices": devices, "chunks": CHUNKS}
    with pipert.pipeline(model, cuts, checkpoint=how.checkpoint, **options) as pipe:
        if how.schedule:
            loss: Tensor = pipe.forward_backward(
                x, loss_fn=loss_fn, target=target, schedule=how.schedule, **more
            )
            return loss
        loss = loss_fn(pipe(x), target.to(devices[-1]))
        go_back(loss)
    return loss.detach()


def take_step(
    model: nn.Module, how: How, x: Tensor, target: Tensor, gpus: tuple[int, ...] = (0, 1, 0)
) -> Tensor:
    devices = [f"cuda:{k}" for k in gpus]
    return train(model, ["layers.1", "layers.3"], devices, how, x, target, loss_of)


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Makes streams of the caller's own the current ones on two devices."""
    one, other = [torch.cuda.Stream(k) for k in range(2)]  # type: ignore[no-untyped-call]
    with torch.cuda.stream(one), torch.cuda.stream(other):
        yield


@each_how
def test_arguments_on_the_cpu_are_copied_if_all_partitions_share_one_gpu(how: How) -> None:
    model, (x, target) = Tied().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    expected = loss_of(model(x), target).detach()
    loss = take_step(model, how, x, target, gpus=(1, 1, 1))
    torch.testing.assert_close(loss.cpu(), expected)


@each_how
@pytest.mark.parametrize("hooked", [False, True])
def test_parameters_and_values_of_another_partition_are_copied(
    how: How, hooked: bool
) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    seen: list[Tensor] = []
    if hooked:
        model.position.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: seen.append(gradient.cpu())
        )
    plain, (x, target) = copy.deepcopy(model), torch.randn(2, 6, 8, dtype=torch.float64)
    expected = loss_of(plain(x), target)
    go_back(expected)
    seen.clear()
    loss = take_step(model, how, x, target)
    torch.testing.assert_close(loss.cpu(), expected.detach())
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)
    if hooked and how.schedule:
        (gradient,) = seen
        assert plain.position.grad is not None
        torch.testing.assert_close(gradient, plain.position.grad)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_parameters_and_values_are_copied_without_gradients(around: Callable[[], Any]) -> None:
    model, x = Tied().double(), torch.randn(6, 8, dtype=torch.float64)
    expected = model(x)["logits"]
    devices = ["cuda:0", "cuda:1", "cuda:0"]
    with pipert.pipeline(model, ["layers.1", "layers.3"], devices=devices, chunks=CHUNKS) as pipe:
        with around():
            output = pipe(x)
    assert output["logits"].device == output["scale"].device == torch.device("cuda:0")
    torch.testing.assert_close(output["logits"].cpu(), expected)


@each_how
def test_arguments_and_the_caller_s_streams_may_be_anywhere(how: How) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    plain, (x, target) = copy.deepcopy(model), torch.randn(2, 6, 8, dtype=torch.float64)
    go_back(loss_of(plain(x), target))
    with own_streams():
        x, target = x.to("cuda:1"), target.to("cuda:1")
        take_step(model, how, x * 1, target * 1)
        grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(grads, [parameter.grad for parameter in plain.parameters()])


class Makes(Block):
    """A layer that makes tensors on the current device."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        assert torch.cuda.current_device() == x.device.index
        return super().forward(x, scale) + torch.ones(8, device="cuda")


class Table(nn.Module):
    """A layer that computes on the first device, wherever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(1.0, 9.0, device="cuda:0").exp().log()


class MakesElsewhere(nn.Module):
    """A model whose last partition makes a tensor on the device of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = Makes(), Makes(), Table()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, x[:, :1])
        y = self.last(y, y[:, :1])
        found: Tensor = y * self.table(y)
        return found


def test_tensors_made_on_another_device_are_copied() -> None:
    model, x = MakesElsewhere(), torch.randn(4, 8)
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "chunks": 2}
    with own_streams(), pipert.pipeline(model, ["last"], **options) as pipe:
        for _ in range(3):
            output = pipe(x).cpu()
        loss = pipe.forward_backward(x, loss_fn=lambda output, _: output.mean()).cpu()
    assert output.isfinite().all()
    torch.testing.assert_close(loss, output.mean())


class Warm(nn.Module):
    """A model whose last partition uses a tensor computed by its owner, and a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.warmth: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        for tensor in self.warmth:
            y = y * tensor
        return y


@each_how
def test_graphs_and_leaves_of_the_caller_may_be_on_another_device(how: How) -> None:
    torch.manual_seed(0)
    model, (x, target) = Warm().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    leaves = torch.rand(2, 8, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda:0"):
        own = copy.deepcopy(model)
        leaf, other = [row.to(device).requires_grad_() for row in leaves.clone()]
        own.warmth = [leaf * 2, other]
        if device == "cpu":
            go_back(nn.functional.mse_loss(own(x), target))
        else:
            train(own, ["last"], ["cuda:0", "cuda:1"], how, x, target)
        found.append([t.grad.cpu() for t in (leaf, other, *own.parameters()) if t.grad is not None])
    assert len(found[0]) == 6
    torch.testing.assert_close(*found)


class AddingLate(nn.Module):
    """Uses a tensor of the first partition when much of the second is done.

    So the copy's backward comes early, and one gradient tensor is shared with another node.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.a, self.b, self.shape = nn.Linear(8, 8), nn.Linear(8, 8), shape

    def forward(self, x: Tensor) -> Tensor:
        old = self.a(x).reshape(-1, *self.shape)
        y = self.b(x) * 2
        z = y.sin()
        found: Tensor = (old.reshape(-1, 8) + y) * 2 + z
        return found


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@each_how
def test_no_gradient_is_added_to_one_that_is_being_copied(how: How, shape: tuple[int, ...]) -> None:
    plain = AddingLate(shape)
    x = torch.randn(8, 8)
    go_back(plain(x).square().sum())
    model = copy.deepcopy(plain)
    model.zero_grad()
    devices = ["cuda:0", "cuda:1"]
    train(model, ["b"], devices, how, x, x, lambda y, _: y.square().sum(), reduction="sum")
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)


class Changing(nn.Module):
    """A model whose second partition changes a tensor of the first, which the third one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        mask = torch.zeros_like(x)
        z = self.second(y * 1)
        y.add_(z)
        mask.add_(1.0)
        found: Tensor = self.last(z) + y * mask
        return found


@each_how
@pytest.mark.parametrize("third", ["cuda:0", "cuda:1", "cuda:2"])
def test_later_partitions_see_an_in_place_change_of_a_copied_tensor(how: How, third: str) -> None:
    if int(third[-1]) >= torch.cuda.device_count():
        pytest.skip("needs another device")
    torch.manual_seed(0)
    model, (x, target) = Changing().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    plain, loss_fn = copy.deepcopy(model), nn.functional.mse_loss
    go_back(loss_fn(plain(x), target))
    train(model, ["second", "last"], ["cuda:0", "cuda:1", third], how, x, target)
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.second(torch.dropout(self.first(x), 0.5, True)), 0.5, True)


class Calling(nn.Module):
    def __init__(self, pipe: nn.Module) -> None:
        super().__init__()
        self.layer, self.__dict__["pipe"] = nn.Linear(8, 8), pipe

    def forward(self, x: Tensor) -> Any:
        return self.__dict__["pipe"](self.layer(x))


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_a_pipe_that_draws_may_be_called_in_a_task_on_the_same_gpus(where: str) -> None:
    settings: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "chunks": 2, "timeout": 30}
    x = torch.randn(4, 8)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout())
    with pipert.Pipe(layers, [2, 2], **settings) as inner:
        model, teach = Dropping(), torch.no_grad()(inner.forward)
        if where == "layer":
            model.first = Calling(inner)  # type: ignore[assignment]
        with pipert.pipeline(model, ["second"], **settings) as outer:
            loss = outer.forward_backward(
                x, loss_fn=lambda y, _: (y - teach(y) if where == "loss" else y).square().mean()
            )
    assert loss.isfinite()


class Reused(nn.Module):
    """Uses what its first layer makes on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        for layer in self.layers:
            x = layer(x + h).tanh() * h
        return x


REUSED_CUTS = [f"layers.{k}" for k in range(3)]
FOUR = [f"cuda:{k}" for k in range(4)]


@pytest.mark.parametrize("how", [{"cuts": ["layers.1"]}, {"cuts": REUSED_CUTS}, {"partitions": 2}])
def test_an_example_may_run_where_an_earlier_pipe_has_spread_the_model(how: Any) -> None:
    model, x = Reused(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with pipert.pipeline(model, REUSED_CUTS, devices=FOUR, chunks=2, example=x) as pipe:
        pipe(x)
    devices = FOUR[: 1 + len(how.get("cuts", [0]))]
    with pipert.pipeline(model, devices=devices, chunks=2, example=x, **how) as pipe:
        torch.testing.assert_close(pipe(x).cpu(), plain(x))


def test_a_tensor_that_several_gpus_use_gets_the_same_bits_in_each_step() -> None:
    found = set()
    for _ in range(4):
        torch.manual_seed(0)
        model, x = Reused(), torch.randn(8, 8)
        with pipert.pipeline(model, REUSED_CUTS, devices=FOUR, chunks=4) as pipe:
            pipe.forward_backward(x, loss_fn=lambda y, _: y.square().sum())
        found.add(tuple(str(p.grad.tolist()) for p in model.parameters() if p.grad is not None))
    assert len(found) == 1


def test_arguments_may_be_on_a_gpu_though_the_model_is_on_the_cpu() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(4, 3)
    expected = model(x)
    for cuts in ([], ["1"]):
        with pipert.pipeline(model, cuts, devices=["cpu"] * (1 + len(cuts)), chunks=2) as pipe:
            torch.testing.assert_close(pipe(x.cuda()), expected)


def test_a_recorded_call_dates_the_backward_of_a_weight_that_two_devices_share() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    options: dict[str, Any] = {"devices": ["cuda:2", "cuda:0"], "chunks": 4}
    with pipert.pipeline(layers, ["1"], **options) as pipe:
        for _ in range(40):
            with pipe.record() as seen:
                loss: Any = pipe(torch.ones(4, 4)).sum()
                loss.backward()
            assert all(0 <= event.end - event.start < 60 for event in seen.events)
