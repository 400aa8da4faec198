"""Tests that steps are right, or refused by name, where a recording sees less than a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Replicate, distributed
from tests.distributed.launcher import run


class Experts(nn.Module):
    """Sends each row to one of two experts, in parts whose sizes are values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.each = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        chosen = (self.gate(flat) + self.bias).argmax(-1)
        order, counts = chosen.argsort(), torch.bincount(chosen, minlength=2).tolist()
        rows = torch.split(flat[order], counts)
        parts = [one(some) for one, some in zip(self.each, rows, strict=True)]
        y = torch.cat(parts)
        return torch.empty_like(y).index_copy(0, order, y).view_as(x)


class Dividing(nn.Linear):
    """Needs a value, and takes no zeros."""

    def forward(self, x: Tensor) -> Tensor:
        if not float(x.abs().sum()):
            raise ZeroDivisionError("nothing to divide by")
        return super().forward(x / x.abs().sum())


class Model(nn.Module):
    """Three layers, and own code before and after the cut at ``b`` that depends on ``way``."""

    def __init__(self, way: str, experts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.a, self.b, self.c = Experts() if experts else nn.Linear(8, 8), *linears(2)
        if way == "no zeros":
            self.b = Dividing(8, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.late = nn.Linear(8, 8)  # registered behind the cut, and called before it
        self.scale = nn.Parameter(torch.ones(8))
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, flag: bool = False, mask: Tensor | None = None) -> Tensor:
        h: Tensor = self.a(x)
        before = h
        if self.way == "float":
            h = h.float()
        elif self.way == "to":
            h = h.to(x.dtype)
        elif self.way == "type_as":
            h = h.type_as(x)
        elif self.way == "contiguous":
            h = self.rnn(h)[0].contiguous()
        elif self.way == "parameter":
            h = h * self.scale.to(h.dtype)
        elif self.way == "mixed":
            h = torch.cat([h.bfloat16() @ self.w, x], -1)[..., :8] @ self.w
        elif self.way == "in place":
            h = (h + 1).unsqueeze_(0)
            for _ in range(h.shape[0]):
                h = h * 1.5
            h = h[0]
        elif self.way == "late layer":
            h = self.late(h)
        elif self.way == "skipped layer" and x.mean() > 0:
            h = self.late(h)
        elif self.way == "value of an input" and x.mean() > 0:
            h = h * 2 + 1
        elif self.way in ("flag", "late value"):
            h = h.tanh()
        h = self.b(h)
        if (self.way == "flag" and flag) or (self.way == "late value" and x.mean() > 0):
            h = h + before
        if self.way == "skipped parameter" and x.mean() > 0:
            h = h * self.w[0]
        h = self.c(h)
        if self.way == "own parameter":
            h = h * self.scale
        if self.way == "value at the end" and h.mean() > -100:
            h = self.late(h) * self.scale + before
        return h if mask is None else h * mask


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(8, 8) for _ in range(count)]


def two_parts() -> Tensor:
    """Four rows: the mean of the first two, which are the example, is -1, of the others 1."""
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    return x - x.mean((1, 2), keepdim=True) + torch.tensor([-1.0, -1, 1, 1])[:, None, None]


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y.float(), target)


GIVEN: dict[str, dict[str, Any]] = {
    "flag": {"flag": True}, "replicated": {"mask": Replicate(torch.full((3, 8), 2.0))}
}  # fmt: skip


def step(rank: int, way: str, experts: bool, autocast: bool, ahead: bool) -> Any:
    """The gradients of this rank; ``ahead``: the pipe is made before autocast is on."""
    x, given = two_parts(), GIVEN.get(way, {})
    example = {"x": x[:2], **(given if way == "replicated" else {})}

    def casts(is_on: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=autocast and is_on)

    try:
        with casts(not ahead):
            pipe = distributed.pipeline(Model(way, experts), ["b"], example=example, chunks=2)
        with casts(True):
            pipe.forward_backward(x=x, **given, target=x, loss_fn=loss_fn)
            pipe.zero_grad()
            pipe.forward_backward(x=x, **given, target=x, loss_fn=loss_fn)
    except distributed.ReplayError as error:
        return str(error)
    except distributed.RankError as error:
        return str(error)
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def check(way: str, experts: bool, autocast: bool, ahead: bool = False) -> None:
    x, plain = two_parts(), Model(way, experts)
    given = {key: getattr(value, "value", value) for key, value in GIVEN.get(way, {}).items()}
    for part in torch.split(x, 2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_fn(plain(part, **given), part) / 2
        loss.backward()  # type: ignore[no-untyped-call]
    named, seen = dict(plain.named_parameters()), set()
    for grads in run(2, step, way, experts, autocast, ahead):
        assert isinstance(grads, dict), grads
        for name, grad in grads.items():
            expected = torch.zeros_like(grad) if named[name].grad is None else named[name].grad
            near = 0.1 if autocast else 1e-6
            torch.testing.assert_close(grad, expected, rtol=near, atol=near)
            seen.add(name)
    assert {name for name, p in named.items() if p.grad is not None} <= seen


CASTS = ["float", "to", "type_as", "contiguous", "parameter", "mixed", "in place"]


@pytest.mark.parametrize("way", CASTS)
@pytest.mark.parametrize("ahead", [False, True])
def test_own_code_under_autocast_may_return_its_argument_or_mix_dtypes(
    way: str, ahead: bool
) -> None:
    check(way, False, way != "contiguous", ahead)


@pytest.mark.parametrize("way", ["late layer", "own parameter", "float", "value of an input"])
@pytest.mark.parametrize("autocast", [False, True])
def test_behind_experts_all_is_found(way: str, autocast: bool) -> None:
    check(way, True, autocast)


@pytest.mark.parametrize(
    "way", ["value of an input", "flag", "value at the end", "replicated", "in place"]
)
def test_ways_that_the_example_may_not_take(way: str) -> None:
    check(way, False, False)


@pytest.mark.parametrize(
    "way, why",
    [
        ("skipped layer", "partition 0 calls the layer 'late', whose parameters are in partition"),
        ("skipped parameter", "partition 1 uses float32[8, 8] of another partition, 'w'"),
        ("late value", "partition 1 uses a result of 'a' of partition 0, which did not cross"),
    ],
)
def test_another_way_than_the_example_s_is_refused_by_name(way: str, why: str) -> None:
    for text in run(2, step, way, False, False, False):
        assert why in text and "Give an example that goes this way" in text, text


def test_a_layer_that_needs_values_and_takes_no_zeros_is_refused_by_name() -> None:
    for text in run(2, step, "no zeros", False, False, False):
        assert "the layer 'b' needs values to be recorded, and fails with zeros" in text, text
