"""Tests steps that compute gradients of weights apart: what is put off, and that it is exact."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import pipert
from pipert import Pipe
from pipert.autograd.leaves import find_leaves
from pipert.autograd.weight_gradients import find_uses
from tests.helpers.activations import Activations
from tests.helpers.ways import MODES, grads_of, linear, mean, same

ZB = ["zb-h1", "zb-h2"]


def put_off_of(module: nn.Module, y: Tensor) -> set[str]:
    """Returns the names of the parameters whose gradients are put off."""
    ends: Any = [y.grad_fn]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    uses = find_uses(find_leaves(ends))
    return {names[id(leaf)] for use in uses.values() for leaf in use.leaves}


class Conv1D(nn.Module):
    """As that of transformers: its weight is not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 3), self.weight).view(*x.shape[:-1], 4)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    expected: set[str]


def conv(kind: Any, d: int, **options: Any) -> Case:
    return Case(lambda: kind(4, 6, 3, **options), (2, 4, *[5] * d), {"weight", "bias"})


class Twice(nn.Module):
    """Uses a weight in two ways, of which one is not known."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.known = known

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.inner(x))
        return y if self.known else y * self.inner.weight.sum()


class Scaled(nn.Module):
    """Multiplies by an alpha, which the rule does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.weight[0].detach(), x, self.weight, alpha=2)


CASES = {
    "Linear": Case(lambda: nn.Linear(3, 4), (2, 3), {"weight"}),
    "Linear, 3-D": Case(lambda: nn.Linear(3, 4), (2, 5, 3), {"weight"}),
    "Linear, no bias": Case(lambda: nn.Linear(3, 4, bias=False), (2, 5, 3), {"weight"}),
    "Conv1D": Case(Conv1D, (2, 5, 3), {"weight"}),
    "Conv1d": conv(nn.Conv1d, 1, stride=2),
    "Conv2d, grouped": conv(nn.Conv2d, 2, groups=2, padding=1),
    "Conv3d, dilated": conv(nn.Conv3d, 3, dilation=2),
    "ConvTranspose2d": conv(nn.ConvTranspose2d, 2, stride=2, output_padding=1),
    "used twice": Case(lambda: Twice(True), (2, 3), {"inner.weight"}),
    "used in another way, too": Case(lambda: Twice(False), (2, 3), set()),
    "alpha": Case(Scaled, (2, 3), set()),
    "frozen": Case(lambda: nn.Linear(3, 4).requires_grad_(False), (2, 3), set()),
    "parametrized": Case(lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (2, 3), set()),
    "LayerNorm": Case(lambda: nn.LayerNorm(3), (2, 3), set()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_products_and_convolutions_are_put_off(name: str, autocast: bool) -> None:
    make, shape, expected = CASES[name]
    torch.manual_seed(0)
    layers = nn.Sequential(make())
    x = torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layers(x)
    if autocast and name == "alpha":  # the weight's cast is one of another kind
        expected = set()
    assert put_off_of(layers, y) == {f"0.{each}" for each in expected}


@pytest.mark.pairwise
@pytest.mark.parametrize("schedule", ZB)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "frozen"])
def test_gradients_are_those_of_1f1b(name: str, checkpoint: str, schedule: str) -> None:
    make, shape, _ = CASES[name]
    torch.manual_seed(0)
    last = make() if name in SAME else nn.ReLU()
    layers = nn.Sequential(make(), nn.Tanh(), last)
    x = torch.randn(6, *shape[1:], dtype=torch.float64)
    layers.double()
    found = []
    for each in ("1f1b", schedule):
        own = copy.deepcopy(layers)
        devices = ["cpu"] * 2
        with Pipe(own, [1, 2], devices=devices, chunks=3, checkpoint=checkpoint) as pipe:
            loss = pipe.forward_backward(x, loss_fn=mean, schedule=each)
        found.append((loss, grads_of(own)))
    same(found[1], found[0], rtol=1e-12, atol=1e-12)


SAME = ("used twice", "used in another way, too", "alpha")  # whose outputs fit their inputs


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **kwargs or {})


def test_the_backward_computes_no_gradient_of_a_weight_that_is_put_off() -> None:
    """One product forward, one for the input in B unless it needs no gradient, one in W."""
    layers = nn.Sequential(*[linear(3, 3) for _ in range(4)])
    counts = []
    for schedule in ("1f1b", "zb-h1"):
        with Pipe(layers, [2, 2], devices=["cpu"] * 2, chunks=2) as pipe, Products() as products:
            pipe.checkpoint = "never"
            x = torch.randn(4, 3, dtype=torch.float64)
            pipe.forward_backward(x, loss_fn=mean, schedule=schedule)
        counts.append(products.count)
    assert counts == [2 * (4 + 3 + 4)] * 2


class Keeps(nn.Module):
    """Counts its inputs that are alive, which its linear layer saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(3, 3)
        self.inputs, self.most = Activations(), 0

    def forward(self, x: Tensor) -> Any:
        x = self.inputs.add(x * 2)
        self.most = max(self.most, self.inputs.now())
        return self.inner(x)


@pytest.mark.parametrize(("schedule", "most"), [("zb-h1", 3), ("zb-h2", 5)])
def test_a_device_keeps_as_many_micro_batches_as_its_schedule_says(
    schedule: str, most: int
) -> None:
    layers = [Keeps() for _ in range(3)]
    with Pipe(nn.Sequential(*layers), [1] * 3, devices=["cpu"] * 3, chunks=9) as pipe:
        pipe.checkpoint = "never"
        x = torch.randn(9, 3, dtype=torch.float64)
        pipe.forward_backward(x, loss_fn=mean, schedule=schedule)
    assert layers[0].most == most
    assert all(layer.most <= most for layer in layers)


def test_nothing_is_kept_once_a_step_is_over_or_has_failed() -> None:
    layers = [Keeps() for _ in range(2)]
    x = torch.randn(6, 3, dtype=torch.float64)
    with Pipe(nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        pipe.checkpoint = "never"
        for fails in (False, True):
            with _failing() if fails else contextlib.nullcontext():
                pipe.forward_backward(x, loss_fn=mean, schedule="zb-h2")
            gc.collect()  # the error, whose traceback and frames are a cycle
            assert [layer.inputs.left() for layer in layers] == [0, 0]


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Lets the first gradient of a weight fail, by its place in the plan."""

    def fail(*_: Any) -> Tensor:
        raise ValueError("no memory")

    refused = pytest.raises(ValueError, match="no memory")
    with pytest.MonkeyPatch.context() as patch, refused as found:
        patch.setattr("pipert.autograd.weight_gradients._transposed_product", fail)
        yield
    assert any("weight gradient W[0," in note for note in found.value.__notes__)


def test_a_step_that_fails_in_w_changes_no_gradient() -> None:
    layers = nn.Sequential(linear(3, 3), linear(3, 3))
    x = torch.randn(6, 3, dtype=torch.float64)
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
        before = grads_of(layers)
        with _failing():
            pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
        same(grads_of(layers), before, rtol=0, atol=0)
        layers.zero_grad()
        pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
        same(grads_of(layers), before, rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v"])
def test_steps_on_gpus_are_those_of_the_plain_module(schedule: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[linear(3, 3) for _ in range(4)])
    x = torch.randn(8, 3, dtype=torch.float64)
    plain = copy.deepcopy(layers)
    torch.autograd.backward(mean(plain(x), None))
    devices = ["cuda:0", "cuda:1", "cuda:1", "cuda:0"]
    if schedule != "zb-v":
        devices = ["cuda:0", "cuda:1"] * 2
    with Pipe(layers, [1] * 4, devices=devices, chunks=4, checkpoint=checkpoint) as pipe:
        pipe.forward_backward(x, loss_fn=on_any_device, schedule=schedule)
    found = {name: None if g is None else g.cpu() for name, g in grads_of(layers).items()}
    same(found, grads_of(plain), rtol=1e-12, atol=1e-12)


def on_any_device(y: Tensor, target: Any) -> Any:
    columns = torch.arange(1, y[0].numel() + 1, dtype=y.dtype, device=y.device)
    return (y * columns).square().flatten(1).sum(1).mean()


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        y: Tensor = self.inner(h)
        h.add_(1)
        return y


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_input_that_was_changed_in_place_is_refused(checkpoint: str) -> None:
    layers = nn.Sequential(ChangesItsInput(), linear(3, 3))
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        with pytest.raises(RuntimeError, match="modified (by an|in place)"):
            x = torch.randn(6, 3, dtype=torch.float64)
            pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")


class ChangesItsInputLate(nn.Module):
    """Changes what its layer has saved when the gradient of that has been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        def change(grad: Tensor) -> None:
            with torch.no_grad():
                h.add_(1)

        before = x * 1
        before.register_hook(change)  # type: ignore[no-untyped-call]
        h = before * 1
        y: Tensor = self.inner(h)
        return y


def test_an_input_that_is_changed_before_w_is_refused() -> None:
    layers = nn.Sequential(ChangesItsInputLate(), linear(3, 3))
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="never") as pipe:
        with pytest.raises(RuntimeError, match="modified in place before that was computed"):
            x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
            pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")


class HooksItsHead(nn.Module):
    """Its own code doubles the gradients that the node of its head's output gets or returns."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.body, self.head, self.before = linear(3, 3), linear(3, 3), before

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.body(x).tanh())
        hook = y.grad_fn.register_prehook if self.before else y.grad_fn.register_hook
        hook(lambda dys, *_: tuple([None if dy is None else 2 * dy for dy in dys]))
        return y


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_of_the_node_of_a_layer_s_output_changes_the_gradients_of_all_its_weights(
    before: bool, checkpoint: str
) -> None:
    model, plain = HooksItsHead(before), HooksItsHead(before)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.autograd.backward(mean(plain(x), None))
    options: Any = {"devices": ["cpu"] * 2, "chunks": 3, "checkpoint": checkpoint}
    with pipert.pipeline(model, ["head"], **options) as pipe:
        pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
    same(grads_of(model), grads_of(plain))
