"""A model with skips computes in a Pipe what it computes as a plain Sequential."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash
from tests.pipes import pipe_of
from tests.skips import Forward, Pop, Stash, popping, stashing

MODES = ["always", "except_last", "never"]
modes = pytest.mark.parametrize("checkpoint", MODES)

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


class Times(nn.Module):
    """Multiplies a skip with its input, and adds what its layer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = linear()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        y: Tensor = x * skip + self.aside(skip)
        return y


@skippable(stash=["c"], pop=["a"])
class PopAndStash(Skippable):
    """Pops ``a``, stashes ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = linear()

    def forward(self, x: Tensor) -> Forward:
        skip = yield pop("a")
        yield stash("c", skip * x)
        return x + self.aside(skip)


class Residual(nn.Module):
    """A custom module around layers, with the identity beside them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y


def s(*names: str, count: int = 1) -> Stash:
    aside = nn.Sequential(linear(), nn.Tanh())
    return stashing(*names, make=aside, after=linear(), count=count)


def p(*names: str) -> Pop:
    return popping(*names, take=Times())


def unet() -> list[nn.Module]:
    return [s("a"), nn.Tanh(), s("b"), linear(), p("b"), nn.Tanh(), p("a")]


def crossing() -> list[nn.Module]:
    return [s("a"), s("b"), nn.Tanh(), p("a"), linear(), p("b"), nn.Tanh()]


def for_three() -> list[nn.Module]:
    return [s("a", count=4), p("a"), linear(), p("a"), p("a"), nn.Tanh(), p("a")]


def several_in_one() -> list[nn.Module]:
    return [
        linear(),
        s("a", "b"),
        nn.Tanh(),
        PopAndStash(),
        linear(),
        p("b", "c"),
        nn.Tanh(),
    ]


def namespaces() -> list[nn.Module]:
    first, second = Namespace(), Namespace()
    return [
        s("a").isolate(first),
        s("a"),
        s("a").isolate(second),
        nn.Tanh(),
        p("a").isolate(first),
        p("a").isolate(second),
        p("a"),
    ]


def nested() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Sequential(s("a"), nn.Tanh()), s("b")),
        Residual(s("c"), linear()),
        nn.Tanh(),
        nn.Sequential(p("b"), s("d"), linear(), p("d")),
        Residual(nn.Tanh(), Residual(p("c"))),
        linear(),
        Residual(p("a"), s("e"), p("e")),
    ]


MODELS: list[Callable[[], list[nn.Module]]] = [
    unet, crossing, for_three, several_in_one, namespaces, nested,
]  # fmt: skip
BALANCES = [[7], [1] * 7, [3, 4], [1, 5, 1], [2, 2, 2, 1]]
models = pytest.mark.parametrize("make", MODELS, ids=[make.__name__ for make in MODELS])
balances = pytest.mark.parametrize("balance", BALANCES, ids=str)


class Outcome(NamedTuple):
    """What a training step leaves behind."""

    output: Tensor
    loss: Tensor
    grads: dict[str, Tensor | None]
    input_grad: Tensor | None


def step(module: nn.Module, x: Tensor) -> Outcome:
    own = x.clone().requires_grad_()
    output = module(own)
    loss = output.square().sum()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return Outcome(output, loss, grads, own.grad)


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


# Training -----------------------------------------------------------------------------------------


@pytest.mark.pairwise
@models
@balances
@modes
def test_a_step_is_that_of_the_plain_model(
    make: Callable[[], list[nn.Module]], balance: list[int], checkpoint: str
) -> None:
    model, x = nn.Sequential(*make()), batch(5)
    plain = step(copy.deepcopy(model), x)
    with pipe_of(model, balance, chunks=2, checkpoint=checkpoint) as pipe:
        same(step(pipe, x), plain)


@modes
@pytest.mark.parametrize(
    ("rows", "chunks"), [(7, 3), (6, 3), (2, 3), (1, 3), (7, 1), (0, 3), (5, 5)]
)
def test_a_step_is_that_of_the_plain_model_however_it_is_split(
    rows: int, chunks: int, checkpoint: str
) -> None:
    model, x = nn.Sequential(*crossing()), batch(rows)
    plain = step(copy.deepcopy(model), x)
    with pipe_of(model, [1, 2, 1, 3], chunks=chunks, checkpoint=checkpoint) as pipe:
        same(step(pipe, x), plain)


@modes
def test_steps_of_different_sizes_and_modes_follow_each_other(checkpoint: str) -> None:
    model = nn.Sequential(*unet())
    plain = copy.deepcopy(model)
    with pipe_of(model, [2, 2, 3], chunks=3, checkpoint=checkpoint) as pipe:
        for rows in (4, 1, 9):
            x = batch(rows)
            with torch.no_grad():
                same(pipe(x), plain(x))
            same(step(pipe, x), step(plain, x))  # gradients add up in both


@models
@modes
def test_a_loss_of_the_skip_alone_has_the_gradients_of_the_plain_model(
    make: Callable[[], list[nn.Module]], checkpoint: str
) -> None:
    """What goes through the layers in between is multiplied away, and has gradients of zero."""
    model, x = nn.Sequential(*make(), Zero(), s("z"), nn.Tanh(), p("z")), batch(4)
    plain = step(copy.deepcopy(model), x)
    with pipe_of(model, [3, 3, 4, 1], chunks=2, checkpoint=checkpoint) as pipe:
        same(step(pipe, x), plain)


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


# Other ways to ask for gradients ------------------------------------------------------------------


@modes
def test_autograd_grad_gives_the_same_and_touches_no_grad(checkpoint: str) -> None:
    model, x = nn.Sequential(*crossing()), batch(5)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint=checkpoint) as pipe:
        same(torch.autograd.grad(pipe(x).sum(), list(pipe.parameters())), expected)
        assert all(parameter.grad is None for parameter in pipe.parameters())


@modes
def test_the_gradient_of_the_stashing_layer_alone_is_the_same(checkpoint: str) -> None:
    model, x = nn.Sequential(*unet()), batch(5)
    wanted = list(model[0].parameters())
    expected = torch.autograd.grad(model(x).sum(), wanted)
    with pipe_of(model, [1, 3, 3], chunks=2, checkpoint=checkpoint) as pipe:
        same(torch.autograd.grad(pipe(x).sum(), wanted), expected)


@modes
def test_a_second_backward_adds_the_same_gradients(checkpoint: str) -> None:
    model, x = nn.Sequential(*crossing()), batch(5)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint=checkpoint) as pipe:
        loss = pipe(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        same([parameter.grad for parameter in pipe.parameters()], [2 * grad for grad in expected])


def test_a_gradient_of_the_gradient_is_the_same_without_checkpointing() -> None:
    model, x = nn.Sequential(*crossing()), batch(4)
    expected = second_order(model, x)
    with pipe_of(model, [1, 2, 1, 3], chunks=2, checkpoint="never") as pipe:
        same(second_order(pipe, x), expected)


def second_order(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    own = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(own).sum(), own, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), list(module.parameters()), allow_unused=True)


@modes
@pytest.mark.parametrize("frozen", ["0", "2", "4", "6"])
def test_with_a_frozen_layer_the_others_have_the_same_gradients(
    frozen: str, checkpoint: str
) -> None:
    model, x = nn.Sequential(*unet()), batch(5)
    model.get_submodule(frozen).requires_grad_(False)
    plain = step(copy.deepcopy(model), x)
    with pipe_of(model, [2, 1, 2, 2], chunks=2, checkpoint=checkpoint) as pipe:
        same(step(pipe, x), plain)
        assert all(p.grad is None for p in pipe.get_submodule(frozen).parameters())


# Without gradients --------------------------------------------------------------------------------


@models
@balances
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_output_without_grad_is_that_of_the_plain_model(
    make: Callable[[], list[nn.Module]], balance: list[int], mode: Callable[[], Any]
) -> None:
    model, x = nn.Sequential(*make()), batch(5)
    with mode(), pipe_of(model, balance, chunks=2) as pipe:
        output = pipe(x)
        same(output, model(x))
        assert not output.requires_grad


@modes
def test_in_eval_mode_a_step_is_that_of_the_plain_model(checkpoint: str) -> None:
    model, x = nn.Sequential(*unet()[:5], nn.Dropout(), *unet()[6:]).eval(), batch(5)
    plain = step(copy.deepcopy(model), x)
    with pipe_of(model, [2, 3, 2], chunks=2, checkpoint=checkpoint) as pipe:
        same(step(pipe, x), plain)


def test_a_model_may_be_frozen_as_a_whole() -> None:
    model, x = nn.Sequential(*unet()).requires_grad_(False), batch(5)
    with pipe_of(model, [2, 3, 2], chunks=2) as pipe:
        output = pipe(x)
    assert not output.requires_grad
    same(output, model(x))


# With what else a Pipe does -----------------------------------------------------------------------


@modes
def test_the_first_layer_may_stash_one_of_several_arguments(checkpoint: str) -> None:
    @skippable(stash=["a"])
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, *, y: Tensor) -> Forward:
            yield stash("a", y)
            return self.layer(x)

    model = nn.Sequential(First(), nn.Tanh(), p("a"))
    x, y = batch(5).requires_grad_(), batch(5).requires_grad_()
    first: Any = model[0]
    expected = torch.autograd.grad(model[1:](first(x, y=y)).sum(), [x, y])
    with pipe_of(model, [1, 1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        same(torch.autograd.grad(pipe(x, y=y).sum(), [x, y]), expected)


@modes
def test_running_statistics_are_deferred_beside_a_skip(checkpoint: str) -> None:
    model, x = nn.Sequential(s("a"), nn.BatchNorm1d(3, dtype=torch.float64), p("a")), batch(6)
    plain = copy.deepcopy(model)
    plain(x)
    with pipe_of(
        model, [2, 1], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True
    ) as pipe:
        pipe(x).sum().backward()
    same(dict(model[1].named_buffers()), dict(plain[1].named_buffers()))


def test_a_parametrized_skippable_layer_trains_as_the_plain_model() -> None:
    model, x = nn.Sequential(*unet()), batch(4)
    for layer in (model[0], model[6]):
        layer.register_parameter("gain", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        # Gives the layer a class of its own, derived from its class.
        nn.utils.parametrize.register_parametrization(layer, "gain", nn.Tanh())
        layer.register_forward_hook(lambda module, args, output: output * module.gain)
    plain = step(copy.deepcopy(model), x)
    with pipe_of(model, [2, 3, 2], chunks=2) as pipe:
        same(step(pipe, x), plain)
