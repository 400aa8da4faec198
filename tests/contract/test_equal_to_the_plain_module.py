"""Tests rows 1, 2, 5 and 6 of docs/contract.md: calls and steps are those of the plain module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError
from tests.helpers.ways import (
    CALL,
    MODES,
    Way,
    assert_equal,
    batch,
    each_way,
    grads_of,
    linear,
    mean,
    piped,
    same,
    seven_layers,
    take_step,
    ways,
)
from tests.layers import Apply

# Each balance but the first starts a partition with the in-place layer.
BALANCES = [[7], [3, 4], [2, 1, 4], [1] * 7]
CHUNKS = [1, 3, 4]
ROWS = [7, 6, 2, 1]


class Case(NamedTuple):
    balance: list[int]
    chunks: int
    rows: int


CASES = [Case(b, c, r) for b in BALANCES for c in CHUNKS for r in ROWS]
cases = pytest.mark.parametrize(
    "case", CASES, ids=[f"n={len(c.balance)}-chunks={c.chunks}-{c.rows} rows" for c in CASES]
)


# Row 1: partitions x micro-batches x rows.


@pytest.mark.pairwise
@each_way
@cases
def test_loss_and_gradients_are_the_plain_modules(case: Case, way: Way) -> None:
    x = batch(case.rows, requires_grad=True)
    assert_equal(seven_layers(), case.balance, way, x, chunks=case.chunks)


@pytest.mark.pairwise
@each_way
@cases
def test_outputs_are_the_plain_modules(case: Case, way: Way) -> None:
    module, x = seven_layers(), batch(case.rows)
    plain = copy.deepcopy(module)
    with piped(module, case.balance, way, case.chunks) as pipe:
        _, outputs = take_step(pipe, way, x, return_outputs=True)
    same(outputs, plain(x).detach())


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradients_accumulate(way: Way, chunks: int) -> None:
    x = batch(7, requires_grad=True)
    assert_equal(seven_layers(), [2, 1, 4], way, x, chunks=chunks, steps=3)


@each_way
def test_steps_may_have_any_rows_one_after_the_other(way: Way) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    with piped(module, [3, 4], way) as pipe:
        for rows in (7, 1, 12, 2):
            x = batch(rows)
            take_step(pipe, way, x)
            mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


# Row 2: what is frozen.

FROZEN: dict[str, list[int]] = {
    "nothing": [],
    "first layer": [0],
    "middle layer": [2],
    "last layer": [6],
    "first partition": [0, 2],
    "last partition": [4, 5, 6],
    "all but the first layer": [2, 4, 5, 6],
    "all but the last layer": [0, 2, 4, 5],
}


@pytest.mark.pairwise
@each_way
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_frozen_parameters_have_no_grad_and_the_others_the_plain_modules(
    chunks: int, frozen: str, requires_grad: bool, way: Way
) -> None:
    module = seven_layers()
    for index in FROZEN[frozen]:
        module[index].requires_grad_(False)
    assert_equal(module, [3, 4], way, batch(7, requires_grad), chunks=chunks)


@pytest.mark.pairwise
@pytest.mark.parametrize("frozen", [*FROZEN.values(), [0, 2, 4, 5, 6]], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("checkpoint", MODES)
def test_the_output_of_a_call_requires_grad_when_the_plain_modules_does(
    checkpoint: str, chunks: int, requires_grad: bool, frozen: list[int]
) -> None:
    module, x = seven_layers(), batch(7, requires_grad)
    for index in frozen:
        module[index].requires_grad_(False)
    with piped(module, [3, 4], Way(CALL, checkpoint), chunks) as pipe:
        assert pipe(x).requires_grad == module(x).requires_grad


@each_way
def test_a_parameter_that_the_loss_does_not_depend_on_has_no_grad(way: Way) -> None:
    """Its partition runs backward, but its layer does not."""
    module: Any = nn.Sequential(
        linear(3, 3), Apply(lambda x: (x, x)), Both(linear(3, 2), linear(3, 4)), nn.Identity()
    )
    assert_equal(module, [2, 2], way, batch(7), loss_fn=lambda y, _: mean(y[0], None))
    assert module[2].second.weight.grad is None


class Both(nn.Module):
    """A module with one layer for each of two values."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.first(value[0]), self.second(value[1])


@each_way
def test_parameters_before_a_cut_in_the_graph_get_no_grad(way: Way) -> None:
    module = nn.Sequential(linear(3, 4), nn.Tanh(), Apply(torch.detach), linear(4, 2))
    assert_equal(module, [2, 2], way, batch(7, requires_grad=True))
    assert module[0].weight.grad is None


modes = pytest.mark.parametrize("checkpoint", MODES)
every_chunks = pytest.mark.parametrize("chunks", [1, 3])


class DoubleInTraining(nn.Module):
    """A layer that differs between train and eval like dropout, but is deterministic."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


# Rows 1 and 2, of a call alone.


@modes
def test_loss_over_two_calls_is_differentiated_once(checkpoint: str) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    xs = [batch(5, True), batch(5, True)]
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        (pipe(xs[0]) * pipe(xs[1])).sum().backward()
    (plain(xs[0]) * plain(xs[1])).sum().backward()
    same(grads_of(pipe), grads_of(plain))


@modes
@every_chunks
def test_double_backward_is_the_plain_modules_or_refused(checkpoint: str, chunks: int) -> None:
    def penalty(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
        module.zero_grad()
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        grad.square().sum().backward()  # type: ignore[no-untyped-call]
        return grads_of(module)

    module, x = seven_layers(), batch(7, True)
    expected = penalty(copy.deepcopy(module), x)
    is_recomputed = checkpoint == "always" or checkpoint == "except_last" and chunks > 1
    with Pipe(module, [2, 1, 4], chunks=chunks, checkpoint=checkpoint, devices=["cpu"] * 3) as pipe:
        if is_recomputed:
            with pytest.raises(RecomputationError, match="checkpoint='never'"):
                penalty(pipe, x)
        else:
            same(penalty(pipe, x), expected)


# Row 5.


@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_pitfall_22_parameters_and_buffers_keep_name_and_identity(balance: list[int]) -> None:
    module = nn.Sequential(*list(seven_layers())[:6], nn.BatchNorm1d(4))
    named = [(name, id(t)) for name, t in module.state_dict(keep_vars=True).items()]
    with Pipe(
        module, balance, devices=["cpu"] * len(balance), deferred_batch_norm=False
    ) as pipe:
        assert [(n, id(t)) for n, t in pipe.state_dict(keep_vars=True).items()] == named
        assert [*pipe.named_parameters()] == [*module.named_parameters()]
        assert [*pipe.named_buffers()] == [*module.named_buffers()]


# Row 6.


@modes
def test_any_call_may_have_another_shape(checkpoint: str) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        for shape in ((4, 3), (4, 5, 3), (2, 1, 6, 3), (4, 3)):
            x = torch.randn(*shape, dtype=torch.float64)
            for model in (pipe, plain):
                model(x).square().sum().backward()
            same(grads_of(pipe), grads_of(plain))


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@modes
def test_any_call_may_have_another_mode(checkpoint: str) -> None:
    module = nn.Sequential(linear(3, 4), DoubleInTraining(), linear(4, 4), DoubleInTraining())
    x = batch(5, True)
    with Pipe(module, [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        for training, context in [
            (True, "grad"), (False, "inference_mode"), (True, "no_grad"), (False, "grad"),
            (True, "inference_mode"), (True, "grad"), (False, "no_grad"),
        ]:  # fmt: skip
            pipe.train(training)
            with CONTEXTS[context]():
                same(pipe(x), module(x))


class EnablesGrad(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@modes
@every_chunks
def test_output_requires_grad_where_the_last_layer_enables_it(chunks: int, checkpoint: str) -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), EnablesGrad(3, 3)).double(), batch(5, True)
    plain = copy.deepcopy(module)
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint) as pipe:
        for model in (pipe, plain):
            with torch.no_grad():
                y = model(x)
            y.square().sum().backward()
    assert module[0].weight.grad is plain[0].weight.grad is None
    same(module[1].weight.grad, plain[1].weight.grad)


# Pitfall 19: a second backward, and layers that work in place.


@modes
@every_chunks
def test_pitfall_19_second_backward_with_retain_graph(checkpoint: str, chunks: int) -> None:
    module, x = seven_layers(), batch(7, True)
    plain = copy.deepcopy(module)
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint) as pipe:
        losses = [pipe(x).square().sum(), plain(x).square().sum()]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
    same(grads_of(module), grads_of(plain))


@modes
def test_pitfall_19_second_backward_without_retain_graph_is_autograds_error(
    checkpoint: str,
) -> None:
    module = seven_layers()
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        loss = pipe(batch(7, True)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@ways
def test_grad_is_added_to_in_place(way: Way) -> None:
    module = seven_layers()
    with piped(module, [3, 4], way) as pipe:
        take_step(pipe, way, batch(7))
        before = [p.grad for p in module.parameters()]
        take_step(pipe, way, batch(7))
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))
