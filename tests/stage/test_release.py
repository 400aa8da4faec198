"""Tests when B[i,j] of a step releases what its graph has saved.

Each partition has a tensor that its last operation saves. Its first operation has a hook, which B
calls after it has gone through the last one, and which tells whether that tensor is still there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd import order
from pipert.autograd.leaves import leaves_behind
from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME
from pipert.stage import release
from pipert.stage.release import Holders, are_from_torch, bytes_of_outputs
from tests.activations import Activations
from tests.layers import product

pytestmark = [
    pytest.mark.layered,
    pytest.mark.skipif(not ONE_THREAD_AT_A_TIME, reason="workers do not compete for a lock"),
]


@pytest.fixture(autouse=True)
def _no_graph_has_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_FEW", 0)


Between = Callable[[Tensor, Tensor], Tensor]


class Saving(nn.Module):
    """Squares its input times a weight, and notes in ``stays`` what a backward finds."""

    def __init__(self, between: Between = torch.mul) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.between = between
        self.stays: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        saved = Activations()
        first = self.between(x, self.weight)
        hook: Any = lambda _: self.stays.append(saved.now() == 1)  # noqa: E731
        first.register_hook(hook)  # type: ignore[no-untyped-call]
        to_square = first + 1
        saved.add(to_square)
        return to_square * to_square


def stays(
    layers: list[Saving], n: int = 2, m: int = 3, loss_fn: Any = None, checkpoint: str = "never"
) -> list[list[bool]]:
    """Returns what each layer has noted in two steps."""
    balance = [len(layers) // n] * n
    with Pipe(
        nn.Sequential(*layers), balance, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint
    ) as pipe:
        for _ in range(2):
            pipe.forward_backward(torch.ones(m, 2), loss_fn=loss_fn or summed, schedule="1f1b")
    return [layer.stays for layer in layers]


def summed(y: Tensor, target: Any = None) -> Tensor:
    return y.sum()


FIRST_NOT = [False, True, True, True, True, True]  # until the first graph was seen to end
NEVER = [False] * 6


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_saved_tensors_stay_until_the_backward_is_over(checkpoint: str) -> None:
    assert stays([Saving(), Saving()], checkpoint=checkpoint) == [FIRST_NOT, FIRST_NOT]


def test_they_go_one_by_one_where_there_is_one_worker() -> None:
    assert stays([Saving(), Saving()], n=1) == [NEVER, NEVER]


def test_they_go_one_by_one_where_there_is_one_micro_batch() -> None:
    assert stays([Saving(), Saving()], m=1) == [[False] * 2] * 2


@pytest.mark.parametrize("name, most", [("_MOST", 16), ("_MOST_EACH", 4)])
def test_they_go_one_by_one_if_they_may_be_many_bytes(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(release, name, most)
    assert stays([Saving(), Saving()]) == [NEVER, NEVER]


def test_they_go_one_by_one_if_there_are_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_FEW", 100)
    assert stays([Saving(), Saving()]) == [NEVER, NEVER]


def test_they_go_one_by_one_if_a_custom_function_is_in_the_graph_of_a_micro_batch() -> None:
    calls: list[int] = []

    def between(x: Tensor, weight: Tensor) -> Any:
        calls.append(len(calls))
        return product(x, weight) if calls[-1] == 4 else x * weight

    expected = [False, True, True, True, False, True]
    assert stays([Saving(between), Saving()]) == [expected, FIRST_NOT]


def test_they_go_one_by_one_while_a_layer_keeps_a_part_of_the_graph() -> None:
    kept: list[Tensor] = []

    def between(x: Tensor, weight: Tensor) -> Tensor:
        kept.append(y := x * weight)
        return y

    assert stays([Saving(between), Saving()]) == [NEVER, FIRST_NOT]


def test_they_go_one_by_one_while_losses_are_kept_with_their_graphs() -> None:
    losses: list[Tensor] = []

    def loss_fn(y: Tensor, target: Any = None) -> Tensor:
        losses.append(loss := y.sum())
        return loss

    assert stays([Saving(), Saving()], loss_fn=loss_fn) == [FIRST_NOT, NEVER]


def test_a_graph_that_is_dropped_later_is_held() -> None:
    holders, x = Holders(), torch.ones(2, requires_grad=True)
    y: Any = x * 2
    z = y.exp()
    holders.watch(y.grad_fn)
    del z
    holders.look()
    assert holders.are_there
    holders.watch(y.grad_fn)
    del y
    holders.look()
    assert not holders.are_there


def test_bytes_are_those_of_the_outputs_of_operations() -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    doubled = torch.ones(5, 4) @ weight * 2
    assert bytes_of_outputs(nodes_behind(doubled)) == 2 * 5 * 3 * 4
    assert bytes_of_outputs(nodes_behind(doubled.half())) == 2 * 5 * 3 * 4 + 5 * 3 * 2


def test_a_nested_tensor_may_have_any_number_of_bytes() -> None:
    parts = [torch.ones(2, 3, requires_grad=True), torch.ones(1, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged) * 2
    assert bytes_of_outputs(nodes_behind(nested)) == float("inf")


def test_nodes_are_torchs_but_for_those_of_custom_functions() -> None:
    (x,) = order.enter((torch.ones(1, 2),))
    assert are_from_torch(nodes_behind(x * 2))
    assert not are_from_torch(nodes_behind(product(x, torch.ones(2)) * 2))


def nodes_behind(y: Tensor) -> set[Any]:
    assert y.grad_fn is not None
    return {*leaves_behind([y.grad_fn]).nodes}
