"""Tests hooks of weights, layers and activations, and backwards of a user's own.

Hooks are called as in a plain backward, those of a parameter once with the whole gradient. A
gradient enters a backward as the plain module's does, for the rows of a micro-batch: multiplied by
the share in the mini-batch's loss and by ``loss_scale``, and divided by the denominator.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert import RecomputationError
from tests.helpers.ways import (
    CALL,
    SCHEDULES,
    Way,
    assert_equal,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    take_step,
)
from tests.layers import product


def model() -> Any:
    return nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 4), nn.ReLU(inplace=True), linear(4, 2))


def not_in_place() -> Any:
    """Makes layers on which full backward hooks can be registered."""
    return nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 4), nn.Tanh(), linear(4, 2))


def step(module: nn.Sequential, way: Way, x: Tensor, **options: Any) -> None:
    with piped(module, [2, len(module) - 2], way) as pipe:
        take_step(pipe, way, x, **options)


def plain_step(module: nn.Sequential, x: Tensor) -> None:
    mean(module(x), None).backward()


def both(way: Way, hook: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Takes a step with hooks; returns the pipe's module and the plain one."""
    module, x = model(), batch(7)
    plain = copy.deepcopy(module)
    hook(module)
    hook(plain)
    step(module, way, x)
    plain_step(plain, x)
    return module, plain


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_hook_of_a_parameter_is_called_once_and_finds_the_whole_gradient(
    accumulated: bool, way: Way
) -> None:
    seen: dict[int, list[Any]] = {}

    def hook(module: Any) -> None:
        for parameter in module.parameters():
            found = seen.setdefault(id(parameter), [])
            if accumulated:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, found=found: found.append(parameter.grad.clone())
                )
            else:
                parameter.register_hook(found.append)

    module, plain = both(way, hook)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert len(seen[id(one)]) == 1
        same(seen[id(one)], seen[id(other)])


@each_way
def test_a_hook_of_the_node_that_accumulates_is_called_once(way: Way) -> None:
    calls: list[int] = []
    nodes = []  # such a node lives as long as somebody has it

    def hook(module: Any) -> None:
        for parameter in module.parameters():
            grad_fn = parameter.expand_as(parameter).grad_fn
            assert grad_fn is not None
            node: Any = grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, of=id(parameter): calls.append(of))
            nodes.append(node)

    module, plain = both(way, hook)
    assert sorted(calls) == sorted(id(p) for m in (module, plain) for p in m.parameters())


@each_way
def test_hooks_are_called_on_the_thread_of_the_caller_after_all_layers(way: Way) -> None:
    where: list[str] = []
    module = model()
    module[4].weight.register_hook(lambda _: where.append(threading.current_thread().name))
    step(module, way, batch(7))
    assert where == [threading.current_thread().name]


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("in_turn", [False, True], ids=["neighbours", "first and last"])
def test_a_hook_of_a_parameter_that_partitions_share_gets_the_sum_once(
    in_turn: bool, way: Way
) -> None:
    def tied() -> Any:
        torch.manual_seed(4)
        layers = [linear(3, 3) for _ in range(4)]
        for k in (0, 3) if in_turn else (1, 2):
            layers[k].weight = layers[0 if in_turn else 1].weight
        return nn.Sequential(*layers)

    seen: list[Tensor] = []
    module, plain, x = tied(), tied(), batch(7)
    for one in (module, plain):
        one[0 if in_turn else 1].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    step(module, way, x)
    plain_step(plain, x)
    assert len(seen) == 2
    same(seen[0], seen[1])
    same(grads_of(module), grads_of(plain))


# Weights that no layer has as a parameter, or whose use no function mode sees.


class Custom(nn.Module):
    """A layer that calls a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return product(x, self.weight)


class Hands(Custom):
    """A layer that returns its parameter."""

    def forward(self, x: Tensor) -> Any:
        return x, self.weight


class Times(nn.Module):
    """A layer that multiplies by a parameter received as a value."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] * value[1]


class Own(nn.Module):
    """A layer that trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaledLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y: Tensor, target: Any) -> Any:
        return mean(y * self.weight, None)


UNSEEN: dict[str, Callable[[], list[nn.Module]]] = {
    "custom function": lambda: [linear(3, 3), Custom(), nn.Tanh(), linear(3, 2)],
    "returned": lambda: [linear(3, 3), Hands(), Times(), linear(3, 2)],
    "no parameter": lambda: [linear(3, 3), Own(), nn.Tanh(), linear(3, 2)],
    "of the loss": lambda: [linear(3, 3), nn.Tanh(), nn.Tanh(), linear(3, 2)],
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after the first step"])
@pytest.mark.parametrize("kind", UNSEEN)
def test_a_hook_of_any_leaf_is_called_once(kind: str, is_late: bool, way: Way) -> None:
    module = nn.Sequential(*UNSEEN[kind]())
    loss: Any = ScaledLoss() if kind == "of the loss" else mean
    hooked: Any = loss if kind == "of the loss" else module[1]
    x, calls = batch(7), list[Tensor]()
    (expected,) = torch.autograd.grad(loss(module(x), None), hooked.weight)

    def double(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient * 2

    with piped(module, [2, 2], way) as pipe:
        if is_late:
            take_step(pipe, way, x, loss_fn=loss)
            hooked.weight.grad = None
        handle = hooked.weight.register_hook(double)
        take_step(pipe, way, x, loss_fn=loss)
        assert len(calls) == 1
        same(hooked.weight.grad, expected * 2)
        handle.remove()
        take_step(pipe, way, x, loss_fn=loss)
    assert len(calls) == 1
    same(hooked.weight.grad, expected * 3)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb-h1"])
def test_a_hook_that_a_forward_puts_on_a_weight_is_refused_in_a_step(schedule: str) -> None:
    class Registers(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            weight: Any = self.weight
            weight.register_hook(lambda gradient: gradient * 2)
            return super().forward(x)

    module = nn.Sequential(linear(3, 4), nn.Tanh(), Registers(4, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="registered in a forward.*before the step"):
        step(module, Way(schedule, "never"), batch(7))
    assert all(parameter.grad is None for parameter in module.parameters())


# Hooks of modules, which see micro-batches as in a call of the pipe.


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_full_backward_hooks_of_a_layer_see_the_gradients_of_each_micro_batch(
    layer: int, way: Way
) -> None:
    parts: list[tuple[Tensor, Tensor]] = []
    module, x = not_in_place(), batch(7, requires_grad=True)
    plain = copy.deepcopy(module)
    module[layer].register_full_backward_hook(lambda _, dx, dy: parts.append((*dx, *dy)))
    step(module, way, x)
    whole: list[tuple[Tensor, Tensor]] = []
    plain[layer].register_full_backward_hook(lambda _, dx, dy: whole.append((*dx, *dy)))
    plain_step(plain, x)
    if way.schedule in (CALL, "gpipe"):
        parts.reverse()  # they go back from the last micro-batch
    assert [len(dy) for _, dy in parts] == [3, 2, 2]
    same([torch.cat(part) for part in zip(*parts, strict=True)], list(whole[0]))


REGISTER: dict[str, Callable[[Any, Any], Any]] = {
    "full": lambda layer, hook: layer.register_full_backward_hook(hook),
    "before": lambda layer, hook: layer.register_full_backward_pre_hook(partial(hook, _=0)),
    "not full": lambda layer, hook: layer.register_backward_hook(hook),
    "forward": lambda layer, hook: layer.register_forward_hook(lambda _, x, y: y * 2),
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("is_added", [False, True], ids=["removed", "added"])
@pytest.mark.parametrize("hook", REGISTER)
def test_a_module_s_hook_of_the_forward_alone_or_of_its_recomputation_alone_is_refused(
    hook: str, is_added: bool
) -> None:
    def double(module: object, dxs: Any, _: object) -> tuple[Tensor | None, ...]:
        return tuple([None if dx is None else dx * 2 for dx in dxs])

    module, x = not_in_place(), batch(7, requires_grad=True)
    register = partial(REGISTER[hook], module[2], double)
    with piped(module, [2, 3], Way(CALL, "always")) as pipe:
        if not is_added:
            handle = register()
        loss = mean(pipe(x), None)
        if is_added:
            handle = register()
        else:
            handle.remove()
        try:
            with pytest.raises(RecomputationError, match="checkpoint='never'"):
                loss.backward()
        finally:
            handle.remove()
        module.zero_grad()
        mean(pipe(x), None).backward()
    plain = not_in_place()
    plain.load_state_dict(module.state_dict())
    mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


@pytest.mark.layered  # names both kinds of pipe
@pytest.mark.parametrize("schedule", [CALL, "1f1b"])
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_hooks_of_a_model_run_for_each_micro_batch_and_those_of_a_pipe_once(
    kind: str, schedule: str
) -> None:
    calls, chunks = Counter[str](), 4
    options: Any = {"devices": ["cpu"] * 2, "chunks": chunks, "checkpoint": "never"}
    if kind == "Pipe":
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipe: Any = pipert.Pipe(model, [1, 1], **options)
    else:
        model = Two()
        pipe = pipert.pipeline(model, ["b"], **options)
    model.register_forward_hook(lambda *_: calls.update(["model"]))
    model.register_full_backward_hook(lambda *_: calls.update(["model, backward"]))
    pipe.register_forward_hook(lambda *_: calls.update(["pipe"]))
    with pipe:
        x = torch.ones(8, 2, requires_grad=True)
        take_step(pipe, Way(schedule, "never"), x, loss_fn=lambda y, _: y.sum())
    once = {"pipe": 1} if schedule == CALL else {}
    of_model = chunks if kind == "pipeline" else len(once)
    assert +calls == +Counter({**once, "model": of_model, "model, backward": of_model})


# Backwards that are not linear in the gradient that they get --------------------------------------

ROWS = 7  # in micro-batches of 3, 2 and 2 rows


class Inject(torch.autograd.Function):
    """Returns ``x``, and adds the gradient of ``weight * balance`` to that of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, balance: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy, dy.new_tensor(ctx.weight), None


class Experts(nn.Module):
    """Two experts, with a balance loss that is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = linear(3, 2), linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        shares = self.router(x).softmax(-1)
        x = Inject.apply(x, shares.square().sum(), 0.01)  # type: ignore[no-untyped-call]
        return self.expert(x) * shares.amax(-1, keepdim=True)


class Hooked(nn.Module):
    """Changes the gradient of its output by a hook, row by row."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.hook = linear(3, 3), hook

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return y


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "injected": Experts,
    "clamped": lambda: Hooked(lambda dy: dy.clamp(-0.01, 0.01)),
    "signs": lambda: Hooked(lambda dy: dy.sign()),
    "rows of length one": lambda: Hooked(lambda dy: nn.functional.normalize(dy, dim=1)),
}
layers = pytest.mark.parametrize("layer", LAYERS)


def of_layers(layer: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(linear(3, 3), LAYERS[layer](), linear(3, 3), LAYERS[layer]())


@pytest.mark.pairwise
@layers
@each_way
def test_gradients_are_the_plain_module_s(way: Way, layer: str) -> None:
    assert_equal(of_layers(layer), [2, 2], way, batch(ROWS, True))


@layers
def test_a_denominator_and_a_scale_have_been_applied(layer: str) -> None:
    module, x = of_layers(layer), batch(ROWS)
    plain = copy.deepcopy(module)
    torch.autograd.backward(plain(x).square().sum() / 5 * 64)
    with piped(module, [2, 2], Way("1f1b", "never")) as pipe:
        pipe.forward_backward(
            x, loss_fn=lambda y, _: y.square().sum(), denominator=5, loss_scale=64.0
        )
    same(grads_of(module), grads_of(plain))


# Attributes of weights that a function has saved --------------------------------------------------

Attributed = Any  # a parameter with an attribute


class AddsToAttribute(torch.autograd.Function):
    """A linear layer that adds its weight's gradient to an attribute of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Attributed) -> Tensor:
        ctx.save_for_backward(x, weight)
        y: Tensor = x @ weight.t()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad += dy.t() @ x
        return dy @ weight, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight: Attributed = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        weight.main_grad = torch.zeros(3, 3, dtype=torch.float64)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = AddsToAttribute.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


def attributed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), nn.Tanh(), Layer())


@each_way
def test_a_saved_weight_has_its_attributes(way: Way) -> None:
    module, plain, x = attributed(), attributed(), torch.ones(4, 3, dtype=torch.float64)
    plain(x).mean().backward()
    with piped(module, [2, 1], way, chunks=2) as pipe:
        take_step(pipe, way, x, loss_fn=lambda y, _: y.mean())
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        attributes: list[Attributed] = [found, expected]
        torch.testing.assert_close(*[each.main_grad for each in attributes])
