"""The equivalence contract of docs/contract.md: ``Pipe(module)`` against ``module``.

Rows 1, 4, 5 and 6 of a call, and the pitfalls about gradients. ``tests/contract`` has rows 1 and 2
of a call and of a step, and pitfalls 6 (gradients somewhere else than the plain module's), 18 and
20. Row 3 is about random numbers and row 7 about refusals; those are tested beside what draws and
what refuses. Recomputation under the conditions of the forward (pitfall 7) is that of
``tests/workers/test_context.py``, ``tests/autograd/test_random.py`` and ``tests/contract``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from tests.contract.ways import grads_of, seven_layers
from tests.layers import Apply

MODES = ["always", "except_last", "never"]
BALANCES = [[7], [3, 4], [2, 1, 4], [1] * 7]

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


@pytest.fixture(scope="module", autouse=True)
def _one_intra_op_thread() -> Iterator[None]:
    """On a busy machine two OpenMP threads that wait for each other take four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class DoubleInTraining(nn.Module):
    """A layer that differs between train and eval like dropout, but is deterministic."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Outcome(NamedTuple):
    """The results of a training step."""

    output: Tensor
    loss: Tensor
    grads: dict[str, Tensor | None]
    input_grad: Tensor | None


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def batch(rows: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, requires_grad=requires_grad)


def step(module: nn.Module, x: Tensor) -> Outcome:
    """One training step from no gradients; the loss ends at what is frozen."""
    module.zero_grad()
    own = x.detach().clone().requires_grad_(x.requires_grad)
    output = module(own)
    loss = output.square().sum()
    if loss.requires_grad:
        loss.backward()
    # Not own.requires_grad: a first layer that works in place puts own into the graph.
    return Outcome(output, loss, grads_of(module), own.grad if x.requires_grad else None)


# Row 1.


@pytest.mark.parametrize("checkpoint", MODES)
def test_loss_over_two_calls_is_differentiated_once(checkpoint: str) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    xs = [batch(5), batch(5)]
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        (pipe(xs[0]) * pipe(xs[1])).sum().backward()
    (plain(xs[0]) * plain(xs[1])).sum().backward()
    same(grads_of(pipe), grads_of(plain))


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_double_backward_is_the_plain_modules(checkpoint: str, chunks: int) -> None:
    def penalty(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
        module.zero_grad()
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        grad.square().sum().backward()  # type: ignore[no-untyped-call]
        return grads_of(module)

    module, x = seven_layers(), batch(7)
    expected = penalty(copy.deepcopy(module), x)
    with Pipe(module, [2, 1, 4], chunks=chunks, checkpoint=checkpoint, devices=["cpu"] * 3) as pipe:
        same(penalty(pipe, x), expected)


# Row 4.


def normalised() -> nn.Sequential:
    return nn.Sequential(linear(3, 4), nn.BatchNorm1d(4, dtype=torch.float64), linear(4, 2))


def wrapped(module: nn.Sequential, checkpoint: str) -> Pipe:
    where = ["cpu", "cpu"]
    return Pipe(
        module, [1, 2], devices=where, chunks=3, checkpoint=checkpoint, deferred_batch_norm=False
    )


@pytest.mark.parametrize("checkpoint", MODES)
def test_batchnorm_statistics_of_the_forward_are_those_of_the_micro_batches(
    checkpoint: str,
) -> None:
    module, x = normalised(), batch(8)
    plain = copy.deepcopy(module)
    for part in x.tensor_split(3):
        plain(part)
    with wrapped(module, checkpoint) as pipe:
        pipe(x)
    same(dict(pipe.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("checkpoint", MODES)
def test_pitfall_5_recomputation_updates_no_batchnorm_statistics(checkpoint: str) -> None:
    module = normalised()
    with wrapped(module, checkpoint) as pipe:
        loss = pipe(batch(8)).sum()
        before = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
        loss.backward()
        same(dict(pipe.named_buffers()), before)


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
def test_pitfall_22_parameters_keep_name_and_identity(balance: list[int]) -> None:
    module = seven_layers()
    named = [(name, id(parameter)) for name, parameter in module.named_parameters()]
    with Pipe(module, balance, devices=["cpu"] * len(balance)) as pipe:
        assert [(name, id(parameter)) for name, parameter in pipe.named_parameters()] == named


def test_pitfall_22_buffers_keep_name_and_identity() -> None:
    module = normalised()
    named = [(name, id(buffer)) for name, buffer in module.named_buffers()]
    with wrapped(module, "never") as pipe:
        assert [(name, id(buffer)) for name, buffer in pipe.named_buffers()] == named


@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_pitfall_22_checkpoint_of_one_balance_loads_under_another(balance: list[int]) -> None:
    saved, x = seven_layers(), batch(5)
    with Pipe(saved, [3, 4], devices=["cpu"] * 2) as pipe:
        state = pipe.state_dict()
    with Pipe(seven_layers(), balance, devices=["cpu"] * len(balance)) as pipe:
        pipe.load_state_dict(state)
        same(pipe(x), saved(x))


# Row 6.


@pytest.mark.parametrize("checkpoint", MODES)
def test_any_call_may_have_another_batch_size(checkpoint: str) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint) as pipe:
        for rows in (8, 1, 5, 0, 16, 3):
            x = batch(rows)
            assert_same_steps(pipe, plain, x)


@pytest.mark.parametrize("checkpoint", MODES)
def test_any_call_may_have_another_shape(checkpoint: str) -> None:
    module = seven_layers()
    plain = copy.deepcopy(module)
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        for shape in ((4, 3), (4, 5, 3), (2, 1, 6, 3), (4, 3)):
            assert_same_steps(pipe, plain, torch.randn(*shape, dtype=torch.float64))


def assert_same_steps(pipe: Pipe, plain: nn.Module, x: Tensor) -> None:
    piped, expected = step(pipe, x), step(plain, x)
    same((piped.output, piped.grads), (expected.output, expected.grads))


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("checkpoint", MODES)
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


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 3])
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


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_pitfall_19_second_backward_with_retain_graph(checkpoint: str, chunks: int) -> None:
    module, x = seven_layers(), batch(7)
    plain = copy.deepcopy(module)
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint) as pipe:
        losses = [pipe(x).square().sum(), plain(x).square().sum()]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
    same(grads_of(module), grads_of(plain))


@pytest.mark.parametrize("checkpoint", MODES)
def test_pitfall_19_second_backward_without_retain_graph_is_autograds_error(
    checkpoint: str,
) -> None:
    module = seven_layers()
    with Pipe(module, [3, 4], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        loss = pipe(batch(7)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_pitfall_19_in_place_layer_on_a_saved_input_is_refused_or_harmless(
    checkpoint: str, chunks: int
) -> None:
    module = nn.Sequential(Apply(lambda x: x.mul_(2)), linear(3, 4))
    x = batch(7)
    (expected,) = torch.autograd.grad(module(x.tanh().clone()).sum(), x)
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint) as pipe:
        output = pipe(x.tanh())  # tanh has saved its result, which the first layer doubles
        with contextlib.suppress(RuntimeError):
            same(torch.autograd.grad(output.sum(), x)[0], expected)
