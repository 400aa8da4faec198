"""Tests what a layer can ask about its task, and what an error's note says about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert import Pipe, RecomputationError, is_checkpointing, is_recomputing
from tests.helpers.torchscript import uses_torchscript
from tests.layers import Apply


class Ask(nn.Module):
    """A layer that notes both answers in each phase: ``(checkpointing, recomputing)``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.answers: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.answers.append((is_checkpointing(), is_recomputing()))
        return (x * self.weight).tanh()


FORWARD, CHECKPOINTED, RECOMPUTED = (False, False), (True, False), (False, True)


def answers(checkpoint: str, rows: int = 3) -> tuple[list[tuple[bool, bool]], ...]:
    """Returns a layer's answers in the forward and in the backward of 3 micro-batches."""
    ask = Ask()
    with Pipe(
        nn.Sequential(nn.Identity(), ask),
        balance=[1, 1],
        devices=["cpu"] * 2,
        chunks=3,
        checkpoint=checkpoint,
    ) as pipe:
        loss = pipe(torch.ones(rows, 1)).sum()
        forward = list(ask.answers)
        loss.backward()
    return forward, ask.answers[len(forward) :]


@pytest.mark.parametrize(("checkpoint", "count"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_a_layer_knows_whether_it_will_be_and_is_being_recomputed(
    checkpoint: str, count: int
) -> None:
    forward, backward = answers(checkpoint)
    assert forward == count * [CHECKPOINTED] + (3 - count) * [FORWARD]
    assert backward == count * [RECOMPUTED]


def test_no_layer_is_checkpointed_without_grad() -> None:
    ask = Ask()
    with Pipe(nn.Sequential(ask), balance=[1], devices=["cpu"], checkpoint="always") as pipe:
        with torch.no_grad():
            pipe(torch.ones(2, 1))
    assert ask.answers == [FORWARD]


def test_the_backward_of_a_layer_is_no_recomputation() -> None:
    heard = []

    class Listen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            heard.append(is_recomputing())
            return grads[0]

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Listen.apply(x.tanh())  # type: ignore[no-untyped-call]
            return y

    model = nn.Sequential(nn.Linear(1, 1), Layer())
    with Pipe(model, balance=[2], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        pipe(torch.ones(2, 1)).sum().backward()
    assert heard == [False, False]


def test_an_inner_pipe_knows_whether_the_outer_one_checkpoints_and_recomputes() -> None:
    ask = Ask()
    inner = Pipe(nn.Sequential(ask), balance=[1], devices=["cpu"], checkpoint="never")
    model = nn.Sequential(nn.Linear(1, 1), inner)  # the first layer needs the recomputation
    outer = Pipe(model, balance=[2], devices=["cpu"], checkpoint="always")
    with inner, outer:
        outer(torch.ones(2, 1)).sum().backward()
    assert ask.answers == [CHECKPOINTED, RECOMPUTED]


# Notes --------------------------------------------------------------------------------------------


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("no")


def note_of(model: nn.Sequential, *args: Any, **kwargs: Any) -> str:
    """Returns the only note of the error that the last of two partitions raises."""
    balance = [len(model) - 1, 1] if len(model) > 1 else [1]
    with Pipe(model, balance=balance, devices=["cpu"] * len(balance), chunks=2) as pipe:
        with pytest.raises(ValueError) as info:
            pipe(*args, **kwargs)
    (note,) = info.value.__notes__
    return note


def test_a_note_says_phase_place_layer_micro_batch_and_input() -> None:
    model = nn.Sequential(nn.Identity(), Apply(fail))
    assert note_of(model, torch.ones(4, 3)) == (
        "in forward F[0,1]: partition 1 on cpu, layer '1' (Apply), micro-batch 0 of 2, "
        "input float32[2, 3]"
    )


def test_a_note_shows_several_arguments() -> None:
    model = nn.Sequential(Apply(fail))
    note = note_of(model, torch.ones(4, 3), torch.ones(4, dtype=torch.bool), scale=2)
    assert "float32[2, 3]" in note and "bool[2]" in note and "'scale': int" in note


def test_a_note_of_the_loss_says_that_the_last_layer_returned_none() -> None:
    with Pipe(nn.Sequential(Apply(lambda x: None)), [1], devices=["cpu"]) as pipe:
        with pytest.raises(ValueError) as info:
            pipe.forward_backward(torch.ones(4, 3), loss_fn=fail)
    assert any("the last layer returned None" in note for note in info.value.__notes__)


def test_an_error_that_is_raised_again_later_has_the_note_of_each_time() -> None:
    error = ValueError()

    def fail_with_it(x: Tensor) -> Tensor:
        raise error

    with Pipe(nn.Sequential(Apply(fail_with_it)), balance=[1], devices=["cpu"]) as pipe:
        for _ in range(2):
            with pytest.raises(ValueError):
                pipe(torch.ones(2, 1))
    assert len(error.__notes__) == 2


def test_an_error_outside_of_the_layers_has_no_note() -> None:
    with Pipe(nn.Sequential(nn.Identity()), balance=[1], devices=["cpu"], chunks=2) as pipe:
        with pytest.raises(ValueError) as info:
            pipe(torch.ones(4), torch.ones(3))
    assert not hasattr(info.value, "__notes__")


# Layers whose parameters are not like others ------------------------------------------------------


@uses_torchscript
def test_a_scripted_layer_is_recomputed() -> None:
    plain = nn.Linear(2, 2)
    scripted: Any = torch.jit.script(plain)
    x = torch.ones(4, 2)
    with Pipe(nn.Sequential(scripted), [1], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        pipe(x).sum().backward()
    found = scripted.weight.grad.clone()
    (expected,) = torch.autograd.grad(plain(x).sum(), plain.weight)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [Pipe, pipert.pipeline])
def test_a_lazy_layer_is_refused_until_it_was_called(make: Any) -> None:
    module: Any = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d().eval())
    cuts = [1, 1] if make is Pipe else ["1"]
    with pytest.raises(ValueError, match="'0.weight' is not initialised; call the model once"):
        make(module, cuts, devices=["cpu"] * 2)
    module(torch.ones(4, 3))
    with make(module, cuts, devices=["cpu"] * 2, chunks=2, checkpoint="always") as pipe:
        pipe(torch.ones(4, 3)).sum().backward()
    assert module[0].weight.grad is not None


@pytest.mark.parametrize("mode", [True, False])
def test_a_layer_whose_mode_changes_before_its_recomputation_is_refused(mode: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False)).train(mode)
    with Pipe(model, [2], devices=["cpu"], checkpoint="always", deferred_batch_norm=True) as pipe:
        y = pipe(torch.randn(4, 3))
        pipe.train(not mode)
        with pytest.raises(RecomputationError, match="or mode that has changed"):
            y.sum().backward()
        pipe(torch.randn(4, 3)).sum().backward()


def test_an_evaluation_between_a_forward_and_its_recomputation_is_fine() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.Dropout())
    with Pipe(model, [2], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        y = pipe(torch.randn(4, 3))
        with torch.no_grad():
            pipe.eval()(torch.randn(4, 3))
        pipe.train()
        y.sum().backward()
    assert linear.bias.grad is not None
    assert linear.bias.grad.tolist() == (2 * (y != 0).sum(0)).tolist()


def test_a_layer_may_set_the_mode_of_a_part_in_its_forward() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Any:
            return self.norm.eval()(x)

    frozen = Frozen()
    model = nn.Sequential(nn.Linear(3, 3), frozen)
    with Pipe(model, [2], devices=["cpu"], checkpoint="always", deferred_batch_norm=True) as pipe:
        pipe(torch.randn(4, 3)).sum().backward()
    assert frozen.norm.num_batches_tracked == 0
