"""Tests that the backward of a task on a GPU goes through nodes of one device alone (V3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

import pipert
from pipert import Pipe, _torch
from pipert.autograd import engine
from tests.helpers.ways import CALL, MODES

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

DEVICES = ["cuda:0", "cuda:1", "cuda:1", "cuda:0"]


class Slices(nn.Module):
    """Assigns to a slice, whose node changes the engine's table of this backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), *[nn.Tanh() for _ in range(40)])

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.inner(x), torch.zeros_like(x)
        z[:, :3] += y[:, 3:]
        result: Tensor = z + y
        return result


def squares(y: Tensor, _: object) -> Tensor:
    return y.square().mean()


def executed(ys: Sequence[Any], wanted: Sequence[Any]) -> set[torch.device]:
    """Returns the devices of all nodes that a backward goes through, both ends included."""
    edges = [y if isinstance(y, GradientEdge) else get_gradient_edge(y) for y in (*ys, *wanted)]
    nodes = list(dict.fromkeys([edge.node for edge in edges[: len(ys)]]))
    used_by = defaultdict[Any, list[Any]](list)
    for node in nodes:  # which grows
        for child, _ in node.next_functions:
            if child is not None and child not in used_by:
                nodes.append(child)
            used_by[child].append(node)
    seen = list(dict.fromkeys([edge.node for edge in edges[len(ys) :]]))
    for node in seen:  # backwards, from what is wanted
        seen += [each for each in used_by.get(node, ()) if each not in seen]
    return {_device(node) for node in seen if node in nodes}


def _device(node: Any) -> torch.device:
    """Returns the device whose thread executes a node, as torch's engine chooses it."""
    found = [each.device for each in node._input_metadata if each.device.type != "cpu"]
    return found[0] if found else torch.device("cpu")


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [CALL, "gpipe", "1f1b", "zb", "zb-h1", "zb-v"])
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_each_backward_of_a_task_goes_through_nodes_of_one_device(
    kind: str, schedule: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, real = list[set[torch.device]](), _torch.run_backward

    def run(ys: Any, *rest: Any, **more: Any) -> Any:
        found.append(executed(ys, rest[3]))
        return real(ys, *rest, **more)

    monkeypatch.setattr(engine, "run_backward", run)
    model: Any = nn.Sequential(*[Slices() for _ in range(4)])
    model[1].inner[0].weight = model[0].inner[0].weight  # whose copy is on another device
    x = torch.randn(6, 6, requires_grad=True)
    options: dict[str, Any] = {"devices": DEVICES, "chunks": 3, "checkpoint": checkpoint}
    with (
        Pipe(model, [1] * 4, **options)
        if kind == "Pipe"
        else pipert.pipeline(model, ["1", "2", "3"], **options)
    ) as pipe:
        if schedule == CALL:
            torch.autograd.backward(squares(pipe(x), None))
        else:
            pipe.forward_backward(x, loss_fn=squares, schedule=schedule)
    assert all(len(devices) == 1 and "cpu" not in str(devices) for devices in found), found
    assert found or schedule == CALL
