"""Tests that mismatched stashes and pops are refused before anything runs."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from tests.helpers.skip_layers import declaring

Forward = Generator[Any, Any, Any]


class Both(Skippable):
    """A layer that stashes and pops whatever it declares."""

    def forward(self, x: Tensor) -> Forward:
        for name in sorted(self.skip_pops):
            x = x + (yield pop(name))
        for name in sorted(self.skip_stashes):
            yield stash(name, x)
        return x


def layer(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Both:
    return declaring(Both, stash=stash, pop=pop)()


def s(*names: str) -> Both:
    """Stashes."""
    return layer(stash=names)


def p(*names: str) -> Both:
    """Pops."""
    return layer(pop=names)


class Together(nn.Module):
    """A module that runs its layers in an order of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.layers:
            x = inner(x)
        return x


class Reversed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for inner in reversed(list(self)):
            input = inner(input)
        return input


def problems(model: nn.Sequential) -> list[str]:
    with pytest.raises(TypeError) as caught:
        verify_skippables(model)
    first, *lines = str(caught.value).split("\n* ")
    assert first == "the stashes and pops of the layers do not match:\n"
    return lines


# What matches -------------------------------------------------------------------------------------

A, B = Namespace(), Namespace()

GOOD: dict[str, list[nn.Module]] = {
    "nothing": [],
    "no skips": [nn.Linear(1, 1), nn.Tanh()],
    "a pair": [s("a"), nn.Tanh(), p("a")],
    "two in each other": [s("a"), s("b"), p("b"), p("a")],
    "two that cross": [s("a"), s("b"), p("a"), p("b")],
    "several in one": [s("a", "b"), layer(["c"], ["a"]), p("b", "c")],
    "one name in two namespaces": [
        s("a").isolate(A), s("a"), p("a"), p("a").isolate(A),
    ],
    "a chain through namespaces": [
        s("a").isolate(A), layer(["b"], ["a"]).isolate(A), p("b").isolate(A),
    ],
    "nested": [nn.Sequential(s("a"), nn.Tanh()), nn.Sequential(nn.Sequential(p("a")))],
    "inside another module": [Together(s("a"), nn.Tanh()), Together(p("a"))],
    "in one other module, in any order": [Together(p("a"), s("a"))],
    "a missing layer": [nn.Sequential(s("a"), p("a"))],
}  # fmt: skip
GOOD["a missing layer"][0].register_module("2", None)


@pytest.mark.parametrize("layers", GOOD.values(), ids=GOOD)
def test_a_model_with_matching_skips_is_accepted(layers: list[nn.Module]) -> None:
    verify_skippables(nn.Sequential(*layers))


def test_a_declared_class_that_is_not_derived_from_skippable_is_found() -> None:
    class Plain(nn.Module):
        pass

    assert problems(nn.Sequential(skippable(stash=["a"])(Plain)()))


# What does not ------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[nn.Module], list[str]]] = {
    "never popped": ([s("a"), nn.Tanh()], ["layer '0' stashes 'a', which no layer pops"]),
    "never stashed": ([nn.Tanh(), p("a")], ["layer '1' pops 'a', which no layer before it stash"]),
    "out of order": ([p("a"), s("a")], ["layer '0' pops 'a', which no layer before it stashes"]),
    "popped twice": (
        [s("a"), p("a"), p("a")],
        ["layer '2' pops 'a', as layer '1' does; isolate each pair of layers"],
    ),
    "stashed twice": (
        [s("a"), s("a"), p("a")],
        ["layer '1' stashes 'a', as layer '0' does; isolate each pair of layers"],
    ),
    "stashed again after it was popped": (
        [s("a"), p("a"), s("a"), p("a")],
        ["layer '2' stashes 'a', as layer '0' does", "layer '3' pops 'a', as layer '1' does"],
    ),
    "both in one layer": ([layer(["a"], ["a"])], ["layer '0' both stashes and pops 'a'"]),
    "two namespaces": (
        [s("a").isolate(A), p("a").isolate(B)],
        [f"layer '1' pops 'a' in {B}, which no", f"layer '0' stashes 'a' in {A}, which no"],
    ),
    "one isolated, the other not": (
        [s("a"), p("a").isolate(A)],
        [f"layer '1' pops 'a' in {A}, which no layer", "layer '0' stashes 'a', which no layer"],
    ),
    "nested": (
        [nn.Sequential(nn.Sequential(s("a")), p("b")), Together(nn.Sequential(p("c")))],
        [
            "layer '0.1' pops 'b', which no layer before it stashes",
            "layer '1.layers.0.0' pops 'c', which no layer before it stashes",
            "layer '0.0.0' stashes 'a', which no layer pops",
        ],
    ),
    "nested out of order": (
        [nn.Sequential(p("a"), s("a"))],
        ["layer '0.0' pops 'a', which no layer before it stashes"],
    ),
    "a layer that is in a Sequential twice": (
        [*2 * [s("a")], *2 * [p("a")]],
        ["layer '1' stashes 'a', as layer '0' does", "layer '3' pops 'a', as layer '2' does"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "expected"), BAD.values(), ids=BAD)
def test_a_model_with_mismatched_skips_is_refused(
    layers: list[nn.Module], expected: list[str]
) -> None:
    found = problems(nn.Sequential(*layers))
    starts = [re.escape(start) for start in expected]
    assert len(found) >= len(expected)
    assert [line for line in found if any(re.match(start, line) for start in starts)] == found
    assert all(any(re.match(start, line) for line in found) for start in starts)


def test_all_mismatches_are_in_one_message() -> None:
    model = nn.Sequential(s("a"), p("b"), s("c", "d"), p("c"), p("c"), s("d"), layer(["e"], ["e"]))
    text = "\n".join(problems(model))
    for part in ["'0' stashes 'a'", "'1' pops 'b'", "'4' pops 'c', as", "'5' stashes 'd', as"]:
        assert part in text
    assert "'6' both stashes and pops 'e'" in text


def test_a_sequential_with_a_forward_of_its_own_is_not_taken_to_run_in_order() -> None:
    verify_skippables(nn.Sequential(Reversed(p("a"), s("a"))))
    verify_skippables(Reversed(p("a"), s("a")))


# In Pipe ------------------------------------------------------------------------------------------


def test_pipe_verifies() -> None:
    with pytest.raises(TypeError, match="layer '0' stashes 'a', which no layer pops"):
        Pipe(nn.Sequential(s("a")), [1], devices=["cpu"])


def test_a_pipe_in_a_layer_has_skips_of_its_own() -> None:
    with Pipe(nn.Sequential(s("a"), p("a")), [1, 1], devices=["cpu"] * 2) as inner:
        verify_skippables(nn.Sequential(s("a"), Together(inner), inner, p("a")))


def test_a_layer_that_is_isolated_in_a_pipe_is_told_that_it_is_too_late() -> None:
    model, namespace = nn.Sequential(s("a"), p("a")), Namespace()
    with Pipe(model, [1, 1], devices=["cpu"] * 2) as pipe:
        for inner in model:
            assert isinstance(inner, Skippable)
            inner.isolate(namespace)
        with pytest.raises(RuntimeError, match="namespace after the Pipe was made"):
            pipe(torch.ones(1))
