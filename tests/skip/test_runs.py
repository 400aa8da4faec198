"""Tests runs of a Pipe with skips: transfers, recomputation, errors, callers, other pipes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError, is_recomputing
from pipert.skip import Namespace, Skippable, pop, skippable, stash
from tests.helpers.pipes import pipe_of_layers as pipe_of
from tests.layers import Apply

Forward = Generator[Any, Any, Any]

MODES = ["always", "except_last", "never"]
modes = pytest.mark.parametrize("checkpoint", MODES)

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


def nothing(_: Any) -> None:
    pass


@skippable(stash=["a"])
class Stash(Skippable):
    """Stashes its input times a parameter, and notes what ``note`` says before and after."""

    def __init__(self, note: Callable[[Tensor], Any] = nothing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.note = note

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x * self.weight)
        self.note(x)
        return x * 2


@skippable(pop=["a"])
class PopAdd(Skippable):
    def __init__(self, note: Callable[[Tensor], Any] = nothing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.note = note

    def forward(self, x: Tensor) -> Forward:
        a = yield pop("a")
        self.note(a)
        return (x + a) * self.weight


def rows(count: int) -> Tensor:
    """A column of 1, 2, 3, ..."""
    return torch.arange(1.0, count + 1)[:, None]


# What crosses -------------------------------------------------------------------------------------


@modes
def test_partitions_in_between_never_see_the_skip(checkpoint: str) -> None:
    """The skip alone has three columns."""
    @skippable(stash=["a"])
    class StashWide(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x.expand(-1, 3) * 1)
            return x

    seen: list[int] = []
    between = Apply(lambda x: seen.append(x.shape[1]) or x)
    with pipe_of(StashWide(), between, between, PopAdd(), chunks=2, checkpoint=checkpoint) as pipe:
        assert pipe(rows(4)).shape == (4, 3)
    assert seen == 4 * [1]


@pytest.mark.parametrize("balance", [[3], [1, 1, 1], [2, 1]], ids=str)
def test_the_stashed_tensor_itself_is_popped_if_no_copy_is_needed(balance: list[int]) -> None:
    stashed, popped = [], []

    @skippable(stash=["a"])
    class StashItself(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            stashed.append(x.data_ptr())
            yield stash("a", x)
            return x

    last = PopAdd(lambda a: popped.append(a.data_ptr()))
    with torch.no_grad():
        with pipe_of(StashItself(), Apply(torch.exp), last, balance=balance, chunks=2) as pipe:
            pipe(rows(4))
    assert popped == stashed


# Recomputation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "count"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_a_recomputation_pops_the_same_value_as_its_forward(checkpoint: str, count: int) -> None:
    popped: dict[bool, list[float]] = {False: [], True: []}
    last = PopAdd(lambda a: popped[is_recomputing()].append(a.item()))
    with pipe_of(Stash(), Apply(torch.exp), last, chunks=3, checkpoint=checkpoint) as pipe:
        pipe(rows(3)).sum().backward()
    assert popped[False] == [1, 2, 3]
    assert popped[True] == [3, 2, 1][3 - count :]


@pytest.mark.parametrize("balance", [[1, 1], [2]], ids=str)
def test_a_recomputation_of_the_stash_does_not_reach_another_layer(balance: list[int]) -> None:
    """It stashes other values than its forward, which is refused where it has an effect."""
    popped: list[tuple[bool, float]] = []

    @skippable(stash=["a"])
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x * self.weight * (100 if is_recomputing() else 1))
            return x * self.weight

    last = PopAdd(lambda a: popped.append((is_recomputing(), a.item())))
    with pipe_of(Moody(), last, balance=balance, checkpoint="always") as pipe:
        with pytest.raises(RecomputationError, match=r"R\[0,0\]"):
            pipe(rows(1)).sum().backward()
    again = 1 if balance == [1, 1] else 100  # of one partition, both layers run again
    assert popped == [(False, 1), (True, again)]


# Errors -------------------------------------------------------------------------------------------


def test_a_layer_that_does_not_run_leaves_nothing_to_pop() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Stash()

        def forward(self, x: Tensor) -> Any:
            return x if 2 in x else self.layer(x)

    with pipe_of(Sometimes(), PopAdd(), chunks=3) as pipe:
        with pytest.raises(RuntimeError, match="there is no skip 'a' to pop") as caught:
            pipe(rows(3))
        assert "F[1,1]" in caught.value.__notes__[0]


# Several pipes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def nested_pipes(namespace: Namespace | None) -> Iterator[tuple[Pipe, nn.Sequential]]:
    """A pipe with a skip in a layer of a pipe with a skip of the same name; and the plain model."""
    plain = nn.Sequential(
        Stash().isolate(namespace),
        nn.Sequential(Stash(), Apply(torch.sin), PopAdd()),
        Apply(torch.cos),
        PopAdd().isolate(namespace),
    )
    inside: Any = copy.deepcopy(plain[1])
    with Pipe(inside, [1, 1, 1], devices=["cpu"] * 3, chunks=2) as inner:
        layers = copy.deepcopy([plain[0], plain[2], plain[3]])
        with pipe_of(layers[0], inner, layers[1], layers[2], balance=[1, 2, 1], chunks=2) as outer:
            yield outer, plain


@pytest.mark.parametrize("namespace", [None, Namespace()], ids=["same names", "other names"])
def test_a_pipe_in_a_layer_has_skips_of_its_own(namespace: Namespace | None) -> None:
    with nested_pipes(namespace or Namespace()) as (_, plain):
        expected = plain(rows(4))
    with nested_pipes(namespace) as (outer, _):
        output = outer(rows(4))
        same(output, expected)
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in outer.parameters())


def test_a_call_of_a_pipe_leaves_the_plain_skips_of_the_caller_alone() -> None:
    with pipe_of(Stash(), PopAdd(), chunks=2) as pipe:
        same(nn.Sequential(Stash(), Apply(lambda x: pipe(x)), PopAdd())(rows(2)), rows(2) * 7)
