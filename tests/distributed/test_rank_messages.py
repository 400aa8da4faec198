"""Tests what is sent from rank to rank: whatever a layer returns, as it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import distributed
from pipert.distributed.rank_messages import Arrived, Parcel, pack
from pipert.distributed.rank_stage import RankStage
from tests.distributed.launcher import run

CPU = torch.device("cpu")
MAKES: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.randn(6, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6).t(),
    "complex": lambda: torch.randn(3, 6, 2, dtype=torch.complex64).permute(1, 2, 0),
    "conjugate": lambda: torch.randn(3, 6, dtype=torch.complex64).t().conj(),
    "a part of a tensor": lambda: torch.randn(6, 8)[:, 2:6].t()[1:],
    "booleans": lambda: torch.rand(6, 2) < 0.5,
    "a number": lambda: torch.tensor(2.0),
    "nothing": lambda: torch.ones(0, 4),
}


def sent(parcel: Parcel) -> Arrived:
    """Returns what arrives of a parcel: memory is allocated, and its bytes are copied there."""
    arrived = Arrived(parcel.header, CPU)
    for to, tensor in zip(arrived.tensors, parcel.tensors, strict=True):
        memory = (tensor.numel(),), (1,)
        to.as_strided(*memory).view(torch.uint8).copy_(tensor.as_strided(*memory).view(torch.uint8))
    return arrived


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_a_tensor_arrives_as_it_left(make: Callable[[], Tensor]) -> None:
    tensor = make()
    arrived = sent(pack({"x": [tensor, tensor], "n": 1}))
    value: Any = arrived.rebuild(arrived.leaves())
    assert value["x"][0] is value["x"][1] and value["n"] == 1
    found: Tensor = value["x"][0]
    torch.testing.assert_close(found, tensor.resolve_conj(), rtol=0, atol=0)
    assert found.stride() == torch.empty_like(tensor).stride()


def test_a_dense_tensor_is_sent_without_a_copy() -> None:
    tensor = MAKES["channels last"]().requires_grad_()
    assert pack((tensor,)).tensors[0].data_ptr() == tensor.data_ptr()


def test_gradients_return_in_the_format_of_the_tensor() -> None:
    tensors = torch.randn(4, 6).t().requires_grad_(), torch.ones(2), torch.ones(2).requires_grad_()
    arrived = sent(pack(tensors))
    assert [leaf.requires_grad for leaf in arrived.leaves()] == [True, False, True]
    dx, zero = arrived.gradients([torch.ones(6, 4), None])
    assert dx.stride() == tensors[0].stride() and torch.equal(zero, torch.zeros(2))


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.p)


def test_no_gradient_returns_for_what_came_without_grad_and_was_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), AddsInPlace())
    arrived = sent(pack(model[0](torch.ones(4, 4))))
    (x,) = arrived.leaves()
    assert model[1](x).requires_grad and arrived.gradients([]) == []


class Differs(nn.Module):
    """Returns another structure, other dtypes and shapes for each micro-batch."""

    def forward(self, x: Tensor) -> Any:
        number = len(x)
        return [(x, 1.0), {"x": x.double(), "times": 2.0}, [x[:, :2], x[:, 2:], 3.0]][number % 3]


class Gathers(nn.Module):
    def forward(self, value: Any) -> Any:
        if isinstance(value, dict):
            return (value["x"] * value["times"]).float()
        *parts, times = value
        return torch.cat(parts, 1) * times


def differs(rank: int) -> list[Any]:
    found = []
    for rows in (7, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Differs(), Gathers(), nn.Linear(4, 4))
        pipe = distributed.Pipe(model, [2, 2], chunks=2)
        x = torch.ones(rows, 4)
        loss = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        found.append((loss, pipe(x)))
    return found


def test_micro_batches_may_differ_in_all_that_crosses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Differs(), Gathers(), nn.Linear(4, 4))
    for rows, (loss, outputs) in zip((7, 3), run(2, differs)[1], strict=True):
        parts = [model(part).detach() for part in torch.ones(rows, 4).tensor_split(2)]
        expected = torch.cat(parts)
        torch.testing.assert_close(outputs, expected)
        torch.testing.assert_close(loss, F.mse_loss(expected, torch.ones(rows, 4)))


def keeps(rank: int, schedule: str, balance: list[int]) -> list[int]:
    """Returns how many boundary tensors are alive at the end, after a step and an evaluation."""
    alive: list[int] = []
    end = RankStage.end

    def counting(stage: RankStage) -> None:
        for kept in stage._kept.values():
            alive.append(sum(map(len, (kept.xs, kept.ys, kept.dys, kept.dxs, kept.tensors))))
            alive.append(kept.arrived is not None)
        end(stage)

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipe = distributed.Pipe(model, balance, chunks=4, schedule=schedule)
    x = torch.ones(8, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankStage, "end", counting)
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        pipe(x)
    return alive


@pytest.mark.parametrize(
    ("schedule", "balance"),
    [("1f1b", [2, 2]), ("interleaved", [1] * 4)],
)
def test_no_boundary_tensor_is_kept_after_its_use(schedule: str, balance: list[int]) -> None:
    for alive in run(2, keeps, schedule, balance):
        assert len(alive) >= 10 and not any(alive)
