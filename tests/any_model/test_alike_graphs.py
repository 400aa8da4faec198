"""Tests steps whose graphs are alike in the first micro-batches, and are not walked again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import pipeline
from pipert.autograd.leaves import find_leaves
from tests.helpers.ways import grads_of, linear

M = 5
LATE = torch.tensor([0, 0, 0, 1, 1])
"""Whether a micro-batch does something else than those before it, with as many nodes."""


class Scale(torch.autograd.Function):
    """Calls the engine in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight.detach().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (x * ctx.weight.sum()).backward(dy)
        return x.grad, None


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = linear(4, 4), kind
        self.other = linear(4, 4) if kind == "weight" else None
        self.own = (torch.ones(4, dtype=torch.float64, requires_grad=True),)  # not registered
        self.kept = [torch.zeros(1, 4, dtype=torch.float64)]
        self.scale: list[Tensor] = []  # computed by the caller

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        y: Tensor = self.inner(x) if self.other is None or not late else self.other(x)
        if self.kind == "function":
            y = Scale.apply(y, self.inner.weight)  # type: ignore[no-untyped-call]
        if self.kind == "node" and late:
            y = y * self.own[0]
        for scale in self.scale:
            y = y * scale
        if self.kind == "kept":
            self.kept[0] = y = y + self.kept[0]
        return y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.layer, self.spare = linear(4, 4), Layer(kind), Layer("same")
        self.is_routed = kind == "layer"
        scales = [torch.ones(4, dtype=torch.float64) for _ in range(2)]
        self.scales = nn.ParameterList(scales if kind == "scale" else [])

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        y = self.layer(self.first(x), late)
        if len(self.scales):
            y = y * self.scales[int(late.max())]
        last: Tensor = (self.spare if late and self.is_routed else self.layer)(y, late)
        return last


def a_step(model: nn.Module, schedule: str = "1f1b", checkpoint: str = "never") -> None:
    options: Any = {"devices": ["cpu"] * 2, "chunks": M, "checkpoint": checkpoint}
    with pipeline(model, ["layer"], **options) as pipe:
        if schedule == "call":
            pipe(an_input(), LATE).square().mean().backward()
            return
        pipe.forward_backward(
            an_input(), LATE, loss_fn=lambda y, _: y.square().mean(), schedule=schedule
        )


def an_input() -> Tensor:
    return torch.arange(4.0 * M, dtype=torch.float64).view(M, 4) / 20


def a_model(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(kind)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "call"])
@pytest.mark.parametrize("kind", ["same", "weight", "node", "function", "layer", "scale", "caller"])
def test_each_weight_gets_the_gradients_of_all_micro_batches(
    kind: str, schedule: str, checkpoint: str
) -> None:
    model, seen = a_model(kind), list[Tensor]()
    plain = copy.deepcopy(model)
    if kind == "caller":
        for each in (model, plain):
            each.layer.scale.append(each.layer.own[0].exp())
    rows = zip(an_input().chunk(M), LATE.chunk(M), strict=True)
    sum(plain(row, late).square().mean() / M for row, late in rows).backward()
    model.layer.inner.weight.register_hook(seen.append)
    a_step(model, schedule, checkpoint)
    if (kind, schedule) != ("function", "call"):  # which adds to .grad itself, as without a pipe
        torch.testing.assert_close(seen, [plain.layer.inner.weight.grad])
    torch.testing.assert_close(grads_of(model), grads_of(plain))
    torch.testing.assert_close(model.layer.own[0].grad, plain.layer.own[0].grad)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_graph_kept_from_the_first_micro_batch_is_refused(is_frozen: bool) -> None:
    model = a_model("kept")
    model.layer.requires_grad_(not is_frozen)
    with pytest.raises(RuntimeError, match="kept from another call or micro-batch"):
        a_step(model)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 2), ("zb-h1", M)])
def test_how_many_graphs_of_a_partition_are_walked(
    schedule: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = []

    def find(*args: Any) -> Any:
        walks.append(args)
        return find_leaves(*args)

    monkeypatch.setattr("pipert.any_model.microbatch_graph.find_leaves", find)
    a_step(a_model("same"), schedule)
    assert len(walks) == 2 * count
