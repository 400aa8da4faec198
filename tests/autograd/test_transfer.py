"""Tests Copy and Wait in the graph, without streams, and that a CPU pipe has neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd import streams as stream
from pipert.autograd import transfer
from tests.stage.graphs import all_nodes

CPU = torch.device("cpu")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    log: list[tuple[Any, Any]] = []
    monkeypatch.setattr(stream, "wait", lambda waiter, awaited: log.append((waiter, awaited)))
    return log


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Collects the devices, sources and targets of the requested copies."""
    log: list[tuple[Any, ...]] = []

    def copy(
        tensors: tuple[Tensor, ...],
        device: torch.device,
        source: Any,
        target: Any,
        reader: Any = None,
    ) -> tuple[Tensor, ...]:
        log.append((len(tensors), str(device), source, target))
        return tuple(tensor.clone() for tensor in tensors)

    monkeypatch.setattr(stream, "copy", copy)
    return log


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_graph_of_a_cpu_pipe_has_no_copies_and_no_waits(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.ones(4, 3, requires_grad=True)
    with Pipe(
        model, balance=[2, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint
    ) as pipe:
        names = all_nodes(pipe(x))
    assert "_Fork" in names and "_Scatter" in names  # the walk gets all the way down
    assert names & {"_Copy", "_Wait"} == set()


def test_a_wait_leaves_values_as_they_are() -> None:
    x = leaf(1, 2)
    (y,) = transfer.wait((x,), None, None)
    assert torch.equal(y, x) and y.data_ptr() == x.data_ptr()


def test_a_wait_leaves_gradients_as_they_are() -> None:
    x = leaf(1, 2)
    (y,) = transfer.wait((x,), None, None)
    torch.autograd.backward((y * y).sum())
    assert x.grad is not None and x.grad.tolist() == [2, 4]


def test_a_wait_waits_in_the_forward(waits: list[tuple[Any, Any]]) -> None:
    transfer.wait((leaf(1),), "compute", "copy")  # type: ignore[arg-type]
    assert waits == [("compute", "copy")]


def test_a_wait_waits_the_other_way_round_in_the_backward(waits: list[tuple[Any, Any]]) -> None:
    (y,) = transfer.wait((leaf(1),), "compute", "copy")  # type: ignore[arg-type]
    waits.clear()
    torch.autograd.backward(y.sum())
    assert waits == [("copy", "compute")]


def test_a_wait_for_several_tensors_waits_once_in_the_backward(
    waits: list[tuple[Any, Any]],
) -> None:
    x, y = transfer.wait((leaf(1), leaf(2)), "compute", "copy")  # type: ignore[arg-type]
    waits.clear()
    torch.autograd.backward((x + y).sum())
    assert waits == [("copy", "compute")]


def test_a_tensor_may_be_changed_in_place_after_the_wait() -> None:
    (y,) = transfer.wait((leaf(1, 2),), None, None)
    torch.autograd.backward(y.mul_(3).sum())
    assert y.tolist() == [3, 6]


def test_a_copy_of_a_tensor_that_is_not_used_gets_no_gradient() -> None:
    a, b = leaf(1), leaf(2)
    copy_of_a, _ = transfer.copy((a, b), CPU, None, None)
    torch.autograd.backward(copy_of_a.sum())
    assert (a.grad is not None, b.grad is not None) == (True, False)


def test_a_wait_for_a_tensor_that_is_not_used_gives_it_no_gradient() -> None:
    a, b = leaf(1), leaf(2)
    waited, _ = transfer.wait((a, b), None, None)
    torch.autograd.backward(waited.sum())
    assert (a.grad is not None, b.grad is not None) == (True, False)


def test_a_copy_has_its_values() -> None:
    (y,) = transfer.copy((leaf(1, 2),), CPU, None, None)
    assert y.tolist() == [1, 2]


def test_a_copy_goes_from_the_source_s_stream_to_the_target_s(
    copies: list[tuple[Any, ...]],
) -> None:
    transfer.copy((leaf(1),), torch.device("meta"), "source", "target")  # type: ignore[arg-type]
    assert copies == [(1, "meta", "source", "target")]


def test_a_gradient_is_copied_back_over_the_same_streams(copies: list[tuple[Any, ...]]) -> None:
    (y,) = transfer.copy((leaf(1),), CPU, "source", "target")  # type: ignore[arg-type]
    copies.clear()
    torch.autograd.backward(y.sum())
    assert copies == [(1, "cpu", "target", "source")]


def test_gradients_are_copied_back_at_once_without_those_that_are_not_there(
    copies: list[tuple[Any, ...]],
) -> None:
    xs = leaf(1), leaf(2), leaf(3)
    a, _, c = transfer.copy(xs, CPU, "source", "target")  # type: ignore[arg-type]
    copies.clear()
    torch.autograd.backward((a * 5 + c * 7).sum())
    assert copies == [(2, "cpu", "target", "source")]
    assert [x.grad if x.grad is None else x.grad.item() for x in xs] == [5, None, 7]


def test_a_copy_between_devices_brings_the_gradient_back_to_the_device_it_came_from() -> None:
    x = torch.ones(2, device="meta", requires_grad=True)
    (y,) = transfer.copy((x,), torch.device("meta"), None, None)
    torch.autograd.backward(y.sum())
    assert x.grad is not None and x.grad.device == x.device
