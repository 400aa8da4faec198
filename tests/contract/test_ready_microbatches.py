"""Tests steps of micro-batches that come ready: any arguments, of any shapes, nothing is split."""

from __future__ import annotations

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from tests.helpers.ways import MODES, grads_of, linear, mean
from tests.layers import Apply

SHAPES = [(3, 2), (1, 5), (4, 1), (2, 2), (0, 3)]  # rows and length of each micro-batch


class Entry(nn.Module):
    """A first layer with several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(3, 4)

    def forward(self, x: Tensor, scale: Any = 2.0, more: Any = None) -> Tensor:
        y: Tensor = self.inner(x) * scale
        return y if more is None else y + more["bias"].sum()


class Chain(nn.Sequential):
    """A model whose first layer gets all arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        y = first(*args, **kwargs)
        for layer in others:
            y = layer(y)
        return y


def a_model(middle: nn.Module | None = None) -> Chain:
    torch.manual_seed(1)
    return Chain(Entry(), middle or nn.Tanh(), linear(4, 4), nn.Sigmoid(), linear(4, 2))


def a_pipe(model: Chain, **options: Any) -> Pipe:
    return Pipe(nn.Sequential(*model), [1, 2, 2], devices=["cpu"] * 3, **options)


def rows(of: Sequence[tuple[int, int]] = SHAPES[:4], width: int = 3) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(*shape, width, dtype=torch.float64) for shape in of]


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def sums(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def plain_step(
    model: nn.Module, calls: Sequence[Callable[[Any], Any]], targets: Sequence[Tensor],
    loss_of: Any = loss_fn, divisor: float | None = None, scale: float = 1.0,
) -> Any:  # fmt: skip
    """Takes the plain loop's step on a copy of the model; returns the loss and the gradients."""
    own = copy.deepcopy(model)
    losses = [loss_of(call(own), t) for call, t in zip(calls, targets, strict=True)]
    total = torch.stack(losses).sum() / (divisor or len(losses))
    (total * scale).backward()  # type: ignore[no-untyped-call]
    return total.detach(), [*grads_of(own).values()]


def grads(model: nn.Module) -> Any:
    return [*grads_of(model).values()]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


SCALE = torch.tensor(0.7, dtype=torch.float64)
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[..., Any]]] = {
    "dict": (lambda x: {"scale": SCALE, "x": x}, lambda m, x: m(x, scale=SCALE)),
    "mapping": (lambda x: UserDict(x=x, scale=SCALE), lambda m, x: m(x, SCALE)),
    "tuple": (lambda x: (x, SCALE), lambda m, x: m(x, SCALE)),
    "single": (lambda x: x, lambda m, x: m(x)),
}

forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.pairwise
@forms
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_loss_and_gradients_are_those_of_the_plain_loop(
    form: str, schedule: str, checkpoint: str
) -> None:
    """The mean is over micro-batches, whatever their shapes, and chunks splits nothing."""
    model, xs, targets = a_model(), rows(), rows(width=2)
    make, call = FORMS[form]
    expected = plain_step(model, [functools.partial(call, x=x) for x in xs], targets)
    with a_pipe(model, chunks=2, checkpoint=checkpoint) as pipe:
        loss = pipe.forward_backward(
            microbatches=map(make, xs), target=targets, loss_fn=loss_fn, schedule=schedule
        )
    same((loss, grads(model)), expected)


@pytest.mark.parametrize(
    ("options", "divisor", "scale"),
    [
        ({"reduction": "sum"}, 1, 1.0),
        ({"denominator": 22}, 22, 1.0),
        ({"denominator": torch.tensor(7), "loss_scale": 8.0}, 7, 8.0),
        ({"reduction": "sum", "loss_scale": 3.0}, 1, 3.0),
    ],
)
def test_losses_are_added_divided_and_scaled_as_asked(
    options: dict[str, Any], divisor: int, scale: float
) -> None:
    model, xs, targets = a_model(), rows(), rows(width=2)
    calls = [lambda m, x=x: m(x) for x in xs]
    expected = plain_step(model, calls, targets, sums, divisor, scale)
    with a_pipe(model) as pipe:
        loss = pipe.forward_backward(microbatches=xs, target=targets, loss_fn=sums, **options)
    same((loss, grads(model)), expected)


def test_outputs_are_a_list_with_one_for_each() -> None:
    model, xs, targets = a_model(), rows(SHAPES), rows(SHAPES, 2)
    expected = [model(x).detach() for x in xs]
    with a_pipe(model) as pipe:
        _, outputs = pipe.forward_backward(
            microbatches=xs, target=iter(targets), loss_fn=sums, reduction="sum",
            return_outputs=True,
        )
    assert type(outputs) is list and not any(y.requires_grad for y in outputs)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


class Taking(Entry):
    """Takes entries out of the containers that it gets, and adds some."""

    def forward(self, x: Any, scale: Any = 2.0, more: Any = None) -> Tensor:
        y: Tensor = self.inner(x.pop()) + more.pop("bias").sum()
        more["seen"] = y
        return y


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_caller_s_containers_are_not_changed(checkpoint: str) -> None:
    model, xs, ones = a_model(), rows(), torch.ones(1, dtype=torch.float64)
    model[0] = Taking()
    batch: list[Any] = [{"x": [x], "more": {"bias": ones}} for x in xs]
    targets = [[t] for t in rows(width=2)]
    with a_pipe(model, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            pipe.forward_backward(
                microbatches=batch, target=targets, loss_fn=lambda y, t: sums(y, t.pop())
            )
    assert [[*each] for each in batch] == [["x", "more"]] * 4
    assert all(each["x"][0] is x for each, x in zip(batch, xs, strict=True))
    assert all([*each["more"]] == ["bias"] for each in batch) and list(map(len, targets)) == [1] * 4


def test_inputs_get_their_gradients_through_the_caller_s_graph() -> None:
    model, weight = a_model(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    xs, targets = rows(), rows(width=2)
    xs[1].requires_grad_()
    own = [x.detach().requires_grad_(x.requires_grad) for x in xs]
    plain, other = copy.deepcopy(model), weight.detach().requires_grad_()
    losses = [
        loss_fn(plain(x * other, other), t) for x, t in zip(own, targets, strict=True)
    ]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    with a_pipe(model) as pipe:
        batch = [{"x": x * weight, "scale": weight} for x in xs]
        pipe.forward_backward(microbatches=batch, target=targets, loss_fn=loss_fn)
    same([x.grad for x in (weight, *xs)], [x.grad for x in (other, *own)])
    assert xs[0].grad is None and xs[1].grad is not None


# What is refused, and what is left behind ---------------------------------------------------------


class Failing:
    def __iter__(self) -> Iterator[Tensor]:
        yield from rows()[:2]
        raise OSError("no more data")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"microbatches": torch.ones(2, 3)}, TypeError, "microbatches must be .* got Tensor"),
        ({"microbatches": []}, ValueError, "at least one entry, got none"),
        ({"microbatches": Failing()}, OSError, "no more data"),
        ({"target": rows()[:3]}, ValueError, "each of the 4 microbatches, has 3"),
        ({"target": [*rows(), 1]}, ValueError, "each of the 4 microbatches, has 5"),
        ({"x": rows()[0]}, TypeError, "arguments, which are split, or microbatches"),
    ],
)
def test_what_is_no_list_of_micro_batches_is_refused_and_leaves_nothing_behind(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = a_model()
    options: dict[str, Any] = {"microbatches": rows(), "target": rows(width=2), "loss_fn": loss_fn}
    with a_pipe(model) as pipe:
        pipe.forward_backward(**options)
        before = grads(model)
        with pytest.raises(error, match=message):
            pipe.forward_backward(**{**options, **given})
        assert all(map(torch.equal, grads(model), before)) and pipe.statistics().in_flight == 0
        pipe.forward_backward(**options)
    same(grads(model), [2 * grad for grad in before])


def test_a_micro_batch_that_fails_is_named_and_no_gradient_is_added() -> None:
    def fail(y: Tensor) -> Tensor:
        if y.shape[1] == 1:
            raise ValueError("too short")
        return y

    model = a_model(Apply(fail))
    with a_pipe(model) as pipe, pytest.raises(ValueError, match="too short") as caught:
        pipe.forward_backward(microbatches=rows(), loss_fn=lambda y, _: mean(y, None))
    assert any("micro-batch 2 of 4" in note for note in caught.value.__notes__)
    assert grads(model) == [None] * len(grads(model))
