"""Tests ends in the graph: the autograd nodes that F[i,j] leaves behind on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.layers import Apply
from tests.stages import Driven


def chain(y: Tensor) -> list[str]:
    """Names the nodes from ``y`` down to the first that is not pipert's, along the first edges."""
    names: list[str] = []
    node = y.grad_fn
    while node is not None:
        names.append(node.name().replace("Backward", ""))
        if not names[-1].startswith("_"):
            break
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return names


def all_nodes(y: Tensor) -> set[str]:
    """Returns the names of all nodes in the graph of ``y``."""
    seen, names = set(), set()
    nodes = [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().replace("Backward", ""))
            nodes += [child for child, _ in node.next_functions]
    return names


def scale() -> nn.Module:
    """Makes a layer that multiplies by a parameter; its node is ``Mul``."""
    layer = Apply(lambda x: x * layer.get_parameter("weight"))
    layer.register_parameter("weight", nn.Parameter(torch.ones(2)))
    return layer


def inputs_of(m: int) -> list[Any]:
    """Makes non-leaf inputs that require grad, as all partitions but the first receive."""
    return [torch.ones(2, requires_grad=True).exp() for _ in range(m)]


def test_a_single_micro_batch_waits_for_its_turn_and_has_the_plain_graph_behind() -> None:
    (y,) = Driven([[scale()]], inputs_of(1)).go()
    assert chain(y) == ["_Fork", "Mul0"] and "_Join" not in all_nodes(y)


def test_the_first_of_several_micro_batches_has_a_fork() -> None:
    y, _, _ = Driven([[scale()]], inputs_of(3)).go()
    assert chain(y) == ["_Fork", "Mul0"] and all_nodes(y) & {"_Join", "_Recompute"} == set()


def test_a_micro_batch_in_the_middle_has_a_fork_and_a_join() -> None:
    _, y, _ = Driven([[scale()]], inputs_of(3)).go()
    assert chain(y) == ["_Fork", "Mul0"] and "_Join" in all_nodes(y)


def test_the_last_micro_batch_has_a_join_and_behind_the_last_partition_its_turn() -> None:
    _, _, y = Driven([[scale()]], inputs_of(3)).go()
    assert chain(y) == ["_Fork", "Mul0"] and "_Join" in all_nodes(y)


def test_turns_are_the_numbers_of_the_micro_batches() -> None:
    outputs = Driven([[scale()]], inputs_of(3)).go()
    assert [y.grad_fn._sequence_nr() for y in outputs] == [0, 1, 2]


def test_without_a_differentiable_input_the_token_goes_from_fork_to_fork() -> None:
    _, _, y = Driven([[scale()]], [torch.ones(2) for _ in range(3)]).go()
    assert chain(y)[:1] == ["_Fork"] and "_Join" not in all_nodes(y)


def test_a_recomputation_comes_before_the_backward_and_after_the_fork() -> None:
    y, _ = Driven([[scale()]], inputs_of(2), recomputed=2).go()
    assert chain(y)[:3] == ["_Fork", "_Recompute", "_Checkpoint"]


def test_as_many_micro_batches_as_asked_for_are_checkpointed() -> None:
    outputs = Driven([[scale()]], inputs_of(4), recomputed=3).go()
    # The graph of each holds those of the micro-batches before it, by the tokens.
    assert ["_Recompute" in chain(y) for y in outputs] == [True, True, True, False]


def test_there_are_no_copies_and_no_waits_between_cpu_partitions() -> None:
    (y,) = Driven([[scale()], [scale()]], inputs_of(1), recomputed=1).go()
    assert all_nodes(y) & {"_Copy", "_Wait"} == set()


def test_without_grad_there_is_no_graph() -> None:
    with torch.no_grad():
        outputs = Driven([[scale()]], [torch.ones(2), torch.ones(2)], recomputed=2).go()
    assert [y.requires_grad for y in outputs] == [False, False]


def test_outputs_that_are_not_differentiable_have_no_node() -> None:
    outputs = Driven([[Apply(torch.argmax)]], inputs_of(2), recomputed=2).go()
    assert [y.grad_fn for y in outputs] == [None, None]


def test_outputs_may_be_changed_in_place_by_the_next_partition() -> None:
    y, _ = Driven([[scale()]], inputs_of(2), recomputed=2).go()
    y.mul_(3).sum().backward()
    assert torch.equal(y, torch.ones(2).exp() * 3)


def test_only_differentiable_outputs_pass_through_the_nodes() -> None:
    def split(x: Tensor) -> dict[str, Any]:
        return {"float": x * 2, "int": torch.ones(1, dtype=torch.long), "none": None}

    y, _ = Driven([[Apply(split)]], inputs_of(2)).go()
    assert chain(y["float"])[0] == "_Fork"
    assert (y["int"].grad_fn, y["none"]) == (None, None)
