"""Tests what ``Pipe(module)`` promises for a call alone, by docs/contract.md: rows 1, 4, 5 and 6.

``test_call_and_step.py`` has rows 1 and 2 of a call and of a step. Row 3 is about random numbers
and row 7 about refusals; those are tested beside what draws and what refuses.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError
from tests.contract.ways import MODES
from tests.contract.ways import batch as rows
from tests.contract.ways import grads_of, linear, same, seven_layers

BALANCES = [[7], [3, 4], [2, 1, 4], [1] * 7]

modes = pytest.mark.parametrize("checkpoint", MODES)
every_chunks = pytest.mark.parametrize("chunks", [1, 3])


def batch(size: int, requires_grad: bool = True) -> Any:
    return rows(size, requires_grad)


class DoubleInTraining(nn.Module):
    """A layer that differs between train and eval like dropout, but is deterministic."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


# Row 1.


@modes
def test_loss_over_two_calls_is_differentiated_once(checkpoint: str) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    xs = [batch(5), batch(5)]
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

    module, x = seven_layers(), batch(7)
    expected = penalty(copy.deepcopy(module), x)
    is_recomputed = checkpoint == "always" or checkpoint == "except_last" and chunks > 1
    with Pipe(module, [2, 1, 4], chunks=chunks, checkpoint=checkpoint, devices=["cpu"] * 3) as pipe:
        if is_recomputed:
            with pytest.raises(RecomputationError, match="checkpoint='never'"):
                penalty(pipe, x)
        else:
            same(penalty(pipe, x), expected)


# Row 4.


def wrapped(module: nn.Sequential, checkpoint: str) -> Pipe:
    where = ["cpu", "cpu"]
    return Pipe(
        module, [1, 2], devices=where, chunks=3, checkpoint=checkpoint, deferred_batch_norm=False
    )


class InstanceNorm(nn.InstanceNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return torch.instance_norm(input, None, None, mean, var, True, 0.1, 1e-5, False)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, InstanceNorm])
@pytest.mark.filterwarnings("ignore::pipert.WholeBatchWarning")
def test_recomputation_updates_no_statistics_of_instances(kind: type[nn.InstanceNorm1d]) -> None:
    module = nn.Sequential(linear(4, 4), kind(3, track_running_stats=True).double(), nn.Tanh())
    with wrapped(module, "always") as pipe:
        loss = pipe(torch.randn(8, 3, 4, dtype=torch.float64)).sum()
        before = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
        loss.backward()
        same(dict(pipe.named_buffers()), before)


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
    x = batch(5)
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
    module, x = nn.Sequential(nn.Linear(3, 3), EnablesGrad(3, 3)).double(), batch(5)
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
    module, x = seven_layers(), batch(7)
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
        loss = pipe(batch(7)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
