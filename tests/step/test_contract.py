"""What holds for ``forward`` and holds for a step: the caller's context, modes of checkpoint."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError, is_recomputing
from pipert.schedules.plan import NAMED
from tests.contract.ways import (
    SCHEDULES,
    Way,
    assert_equal,
    batch,
    grads_of,
    linear,
    mean,
    piped,
    same,
    ways,
)
from tests.layers import Apply

# The caller's context.


class _Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None]) -> Tensor:
        ctx.note = note
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note("B")
        return grad, None


def notes_of(way: Way, look: Callable[[], Any]) -> set[tuple[str, Any]]:
    """What ``look`` finds in F, R and B of each partition, and in the loss."""
    found: set[tuple[str, Any]] = set()

    def note(phase: str) -> None:
        found.add((phase, look()))

    def layer(x: Tensor) -> Tensor:
        note("R" if is_recomputing() else "F")
        y: Tensor = _Notes.apply(x, note)  # type: ignore[no-untyped-call]
        return y

    def loss(y: Tensor, target: Any) -> Tensor:
        note("loss")
        return y.square().mean()

    with torch.device("cpu"):  # for what the test itself makes
        module = nn.Sequential(linear(3, 3), Apply(layer), linear(3, 3), Apply(layer))
        x = batch(4)
    with piped(module, [2, 2], way, chunks=2) as pipe:
        pipe.forward_backward(x, loss_fn=loss, schedule=way.schedule)
    return found


def phases(way: Way) -> list[str]:
    return ["F", "B", "loss"] + ([] if way.checkpoint == "never" else ["R"])


@ways
def test_context_variables_are_the_callers(way: Way) -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    token = variable.set(5)
    try:
        assert notes_of(way, variable.get) == {(phase, 5) for phase in phases(way)}
    finally:
        variable.reset(token)


@ways
def test_the_default_device_is_the_callers(way: Way) -> None:
    """But for functions of a backward, which torch hides it from."""
    with torch.device("meta"):
        found = notes_of(way, lambda: torch.empty(1).device.type)
    assert found == {(phase, "cpu" if phase == "B" else "meta") for phase in phases(way)}


@ways
def test_the_number_of_intra_op_threads_is_shared_out(way: Way) -> None:
    torch.set_num_threads(2)
    try:
        found = notes_of(way, torch.get_num_threads)
    finally:
        torch.set_num_threads(1)
    assert {(phase, count) for phase, count in found if phase != "R"} == {
        (phase, 1) for phase in ("F", "B", "loss")
    }


@ways
def test_saved_tensor_hooks_of_the_caller_pack_and_unpack(way: Way) -> None:
    module, x = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 4), nn.Tanh()), batch(6)
    plain, calls = copy.deepcopy(module), {"pack": 0, "unpack": 0}

    def pack(tensor: Tensor) -> Tensor:
        calls["pack"] += 1
        return tensor * 2

    def unpack(tensor: Tensor) -> Tensor:
        calls["unpack"] += 1
        return tensor / 2

    with piped(module, [2, 2], way, chunks=3) as pipe:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            pipe.forward_backward(x, loss_fn=mean, schedule=way.schedule)
    mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))
    assert calls["pack"] >= calls["unpack"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_anomaly_mode_finds_nan_in_the_backward(schedule: str) -> None:
    module = nn.Sequential(linear(3, 3), Apply(lambda x: (x * 0).sqrt() * 0), linear(3, 3))
    with piped(module, [2, 1], Way(schedule, "never"), chunks=2) as pipe:
        with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="SqrtBackw"):
            with pytest.raises(RuntimeError, match="SqrtBackward0.*returned nan"):
                pipe.forward_backward(batch(4), loss_fn=mean, schedule=schedule)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_step_is_refused(off: Any) -> None:
    with piped(nn.Sequential(linear(3, 3), linear(3, 3)), [1, 1], Way("1f1b", "never")) as pipe:
        with off(), pytest.raises(RuntimeError, match="computes gradients, which are disabled"):
            pipe.forward_backward(batch(4), loss_fn=mean)


@ways
def test_in_eval_mode_a_step_is_the_plain_modules_in_eval_mode(way: Way) -> None:
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    norm(torch.randn(9, 4, dtype=torch.float64))
    module = nn.Sequential(linear(3, 4), norm, nn.Dropout(0.5), linear(4, 2)).eval()
    assert_equal(module, [2, 2], way, batch(7, requires_grad=True))


# Layers that differentiate.


class Force(nn.Module):
    """Minus the gradient of an energy by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.energy(own).sum(), own, create_graph=True)
        return x - grad


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_may_differentiate_in_its_forward(schedule: str) -> None:
    module = nn.Sequential(linear(3, 3), Force(), linear(3, 2))
    assert_equal(module, [1, 2], Way(schedule, "never"), batch(7))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_that_differentiates_cannot_be_recomputed(schedule: str) -> None:
    module = nn.Sequential(linear(3, 3), Force(), linear(3, 2))
    with piped(module, [1, 2], Way(schedule, "always"), chunks=2) as pipe:
        with pytest.raises(RecomputationError, match="checkpoint='never'"):
            pipe.forward_backward(batch(4), loss_fn=mean, schedule=schedule)


# Which micro-batches are recomputed.


def recomputed(pipe: Pipe, **options: Any) -> int:
    """How many of four micro-batches."""
    calls.clear()
    pipe.forward_backward(batch(4), loss_fn=mean, **options)
    return len(calls)


calls: list[bool] = []


class Counts(nn.Module):
    """Counts its recomputations; can be pickled."""

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            calls.append(True)
        return x


def counting(**options: Any) -> Pipe:
    module = nn.Sequential(linear(3, 3), Counts(), linear(3, 3))
    return Pipe(module, [2, 1], devices=["cpu"] * 2, chunks=4, **options)


CHOICES = [
    (None, "1f1b", 0), (None, "eager-1f1b", 0), (None, "interleaved", 0), (None, "gpipe", 3),
    ("never", "1f1b", 0), ("never", "gpipe", 0),
    ("except_last", "1f1b", 3), ("except_last", "gpipe", 3),
    ("always", "1f1b", 4), ("always", "gpipe", 4),
]  # fmt: skip


@pytest.mark.parametrize(("chosen", "schedule", "expected"), CHOICES)
def test_the_mode_that_was_chosen_says_what_is_recomputed(
    chosen: str | None, schedule: str, expected: int
) -> None:
    with counting(checkpoint=chosen) as pipe:
        for way in (schedule, schedule.upper(), NAMED[schedule]):
            assert recomputed(pipe, schedule=way) == expected


@pytest.mark.parametrize(("chosen", "schedule", "expected"), CHOICES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_the_mode_of_its_original(
    how: str, chosen: str | None, schedule: str, expected: int
) -> None:
    with counting(checkpoint=chosen) as pipe:
        with copy.deepcopy(pipe) if how == "deepcopy" else pickle.loads(pickle.dumps(pipe)) as own:
            assert recomputed(own, schedule=schedule) == expected


def test_a_mode_may_be_chosen_later() -> None:
    with counting() as pipe:
        assert recomputed(pipe) == 0
        pipe.checkpoint = "always"
        assert recomputed(pipe) == 4


def test_choosing_the_default_is_choosing() -> None:
    with counting() as pipe:
        assert pipe.checkpoint == "except_last"
        pipe.checkpoint = pipe.checkpoint
        assert recomputed(pipe) == 3


def test_a_call_after_a_step_recomputes_as_ever() -> None:
    with counting() as pipe:
        recomputed(pipe)
        calls.clear()
        mean(pipe(batch(4)), None).backward()
        assert len(calls) == 3
