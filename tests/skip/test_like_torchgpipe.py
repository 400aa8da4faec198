"""A model written for torchgpipe 0.0.7, in each way that it documents, moves over by its import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Namespace, pop, skippable, stash, verify_skippables
from tests.helpers.skip_layers import Forward

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


@skippable(stash=["alice", "bob"], pop=["carol"])
class StashStashPop(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]))

    def forward(self, input: Tensor) -> Forward:
        yield stash("alice", input * self.factor)
        yield stash("bob", None)
        carol = yield pop("carol")
        return input + carol


@skippable(stash=("carol",))
class Stash(nn.Module):
    def forward(self, input: Tensor) -> Forward:
        yield stash("carol", input)
        return input * 2


class _Pop(nn.Module):
    def forward(self, input: Tensor) -> Forward:
        alice = yield pop("alice")
        bob = yield pop("bob")
        assert bob is None
        return input - alice


Pop = skippable(pop={"alice", "bob"})(_Pop)


@skippable()
class Nothing(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * 3


def unit(factor: float, ns: Namespace, others: Namespace) -> list[Any]:
    return [
        Stash().isolate(ns),  # type: ignore[operator]
        nn.Tanh(),
        StashStashPop(factor)  # type: ignore[operator]
        .isolate(ns, only=["carol"])
        .isolate(others, only=["alice", "bob"]),
        Nothing(),
    ]


def model() -> nn.Sequential:
    ns1, ns2, ns3 = Namespace(), Namespace(), Namespace()
    module = nn.Sequential(
        *unit(1.0, ns1, ns2),
        *unit(2.0, ns2, ns3),
        Pop().isolate(ns2),  # type: ignore[operator]
        Stash(),
        Pop().isolate(ns3),  # type: ignore[operator]
        PopCarol(),
    )
    verify_skippables(module)
    return module


@skippable(pop=["carol"])
class PopCarol(nn.Module):
    def forward(self, input: Tensor) -> Forward:
        return input + (yield pop("carol"))


def test_a_model_written_for_torchgpipe_runs_plain_and_in_a_pipe() -> None:
    module = model()
    x = torch.randn(6, 1)
    expected = module(x)
    with Pipe(module, [1, 4, 2, 5], devices=["cpu"] * 4, chunks=3) as pipe:
        output = pipe(x)
        same(output, expected)
        output.sum().backward()
    assert [p.grad is not None for p in module.parameters()] == [True, True]
