"""A model written for torchgpipe 0.0.7 moves over by its import; where that is there, compared."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from pipert import Pipe

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault

# Each way to write a skippable layer that torchgpipe documents.
SOURCE = """
import torch
from torch import nn
from {package}.skip import Namespace, pop, skippable, stash, verify_skippables

@skippable(stash=["alice", "bob"], pop=["carol"])
class StashStashPop(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]))

    def forward(self, input):
        yield stash("alice", input * self.factor)
        yield stash("bob", None)
        carol = yield pop("carol")
        return input + carol

@skippable(stash=("carol",))
class Stash(nn.Module):
    def forward(self, input):
        yield stash("carol", input)
        return input * 2

class _Pop(nn.Module):
    def forward(self, input):
        alice = yield pop("alice")
        bob = yield pop("bob")
        assert bob is None
        return input - alice

Pop = skippable(pop={{"alice", "bob"}})(_Pop)

@skippable()
class Nothing(nn.Module):
    def forward(self, input):
        return input * 3

def unit(factor, ns, others):
    return [
        Stash().isolate(ns),
        nn.Tanh(),
        StashStashPop(factor).isolate(ns, only=["carol"]).isolate(others, only=["alice", "bob"]),
        Nothing(),
    ]

def model():
    ns1, ns2, ns3 = Namespace(), Namespace(), Namespace()
    module = nn.Sequential(
        *unit(1.0, ns1, ns2),
        *unit(2.0, ns2, ns3),
        Pop().isolate(ns2),
        Stash(),
        Pop().isolate(ns3),
        PopCarol(),
    )
    verify_skippables(module)
    return module

@skippable(pop=["carol"])
class PopCarol(nn.Module):
    def forward(self, input):
        return input + (yield pop("carol"))
"""


def written_for(package: str) -> ModuleType:
    module = ModuleType(f"written_for_{package}")
    exec(SOURCE.format(package=package), module.__dict__)
    return module


@pytest.fixture(scope="module")
def ours() -> ModuleType:
    return written_for("pipert")


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    pytest.importorskip("torchgpipe", reason="is not installed")
    return written_for("torchgpipe")


def test_a_model_written_for_torchgpipe_runs_plain_and_in_a_pipe(ours: ModuleType) -> None:
    model = ours.model()
    x = torch.randn(6, 1)
    expected = model(x)
    with Pipe(model, [1, 4, 2, 5], devices=["cpu"] * 4, chunks=3) as pipe:
        output = pipe(x)
        same(output, expected)
        output.sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True, True]


def test_a_model_written_for_torchgpipe_computes_the_same(
    ours: ModuleType, theirs: ModuleType
) -> None:
    x = torch.randn(6, 1)
    same(ours.model()(x), theirs.model()(x))


def test_the_public_names_include_torchgpipes(theirs: ModuleType) -> None:
    names = set(importlib.import_module("torchgpipe.skip").__all__)
    assert names <= set(importlib.import_module("pipert.skip").__all__)
