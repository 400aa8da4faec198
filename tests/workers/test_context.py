"""W4: a task runs under its caller's context and leaves none of it behind.

``F`` runs on workers; ``R`` runs in a backward outside the block that puts something on. That each
task sees what is put on is in ``tests/contract/test_callers_context.py``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pipert import Pipe, TransformError, is_recomputing
from tests.helpers.caller_settings import ONE, ROWS, VARIABLE, Block, Hooks, NoNegation, Row
from tests.helpers.torchscript import uses_torchscript

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
rows_with_graph = pytest.mark.parametrize("row", ROWS[2:], ids=lambda row: row.name)
"""Inside the others there is no graph to run backward."""
rows_for_backward = pytest.mark.parametrize("row", ROWS[:-1], ids=lambda row: row.name)


def everything() -> list[object]:
    """Returns the values of all settings on the current thread."""
    return [row.see() for row in ROWS]


PLAIN = everything()


@pytest.fixture(scope="module", autouse=True)
def _warm_up() -> None:
    """Makes the process's first dispatch mode, which takes torch a second."""
    with NoNegation():  # type: ignore[no-untyped-call]
        torch.neg(ONE)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fails the test that leaves a setting changed, rather than later ones."""
    yield
    assert everything() == PLAIN


# What layers see


class Failed(Exception):
    pass


class Probe(nn.Module):
    """A layer that notes a setting in ``F`` and in ``R``; fails in the phase named ``failing``."""

    def __init__(self, see: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.see = see
        self.failing = ""
        self.seen: dict[str, list[object]] = {"F": [], "R": []}
        self.threads: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        phase = "R" if is_recomputing() else "F"
        self.seen[phase].append(self.see())
        if phase == "F":
            self.threads.add(threading.get_ident())
        if phase == self.failing:
            raise Failed
        return x * self.weight


class Observed:
    """A pipe of two probes on two workers, two micro-batches."""

    def __init__(self, see: Callable[[], object]) -> None:
        self.probes = [Probe(see), Probe(see)]
        layers = nn.Sequential(*self.probes)
        self.pipe = Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")

    def train(
        self, forward: Block = contextlib.nullcontext, backward: Block = contextlib.nullcontext
    ) -> None:
        """Runs forward and backward, each inside a block of its own."""
        x = torch.ones(2, 1)
        with forward():
            loss = self.pipe(x).sum()
        if loss.requires_grad:
            with backward():
                loss.backward()

    def take(self, phase: str) -> list[object]:
        """What was seen since, once for each of the four tasks; checks that workers saw it."""
        workers = {ident for probe in self.probes for ident in probe.threads}
        assert len(workers) == 2 and threading.get_ident() not in workers
        seen = [it for probe in self.probes for it in probe.seen[phase]]
        for probe in self.probes:
            probe.seen[phase] = []
        return seen

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.pipe.close()


@rows_for_backward
def test_R_does_not_see_the_context_of_the_backward(row: Row) -> None:
    plain = row.see()
    with Observed(row.see) as observed:
        observed.train(contextlib.nullcontext, row.block)
        assert observed.take("R") == [plain] * 4


# W4


@rows
@pytest.mark.parametrize("fails", [False, True])
def test_F_leaves_nothing_on_its_worker(row: Row, fails: bool) -> None:
    with Observed(everything) as observed:
        for probe in observed.probes:
            probe.failing = "F" if fails else ""
            with pytest.raises(Failed) if fails else contextlib.nullcontext():
                observed.train(row.block)
            probe.failing = ""
        for probe in observed.probes:
            probe.seen["F"] = []
        observed.train()
        assert observed.take("F") == [PLAIN] * 4


@rows_with_graph
@pytest.mark.parametrize("fails", [False, True])
def test_R_leaves_nothing_on_the_thread_of_the_backward(row: Row, fails: bool) -> None:
    with Observed(everything) as observed:
        observed.probes[0].failing = "R" if fails else ""
        with pytest.raises(Failed) if fails else contextlib.nullcontext():
            observed.train(row.block)
        assert everything() == PLAIN


@rows
def test_R_leaves_the_context_of_the_backward_active(row: Row) -> None:
    with Observed(row.see) as observed:
        loss = observed.pipe(torch.ones(2, 1)).sum()
        with row.block():
            loss.backward()
            after = row.see()
        assert after == row.inside


# Context variables


class Setting(nn.Module):
    """A layer that notes the variable, then sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(VARIABLE.get())
        VARIABLE.set("a task's")
        return x


def test_a_layers_change_of_a_variable_is_not_seen_by_other_tasks() -> None:
    layers = [Setting(), Setting()]
    with Pipe(nn.Sequential(*layers), [1, 1], devices=["cpu", "cpu"], chunks=3) as pipe:
        pipe(torch.ones(3, 1))
    assert [layer.seen for layer in layers] == [["nobody's"] * 3] * 2


def test_R_does_not_see_the_changes_that_F_made_to_a_variable() -> None:
    class Weighted(Setting):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight

    layer = Weighted()
    with Pipe(nn.Sequential(layer), [1], devices=["cpu"], checkpoint="always") as pipe:
        pipe(torch.ones(2, 1)).sum().backward()
    assert layer.seen == ["nobody's"] * 2


# Saved-tensor hooks


def whole_numbers() -> tuple[nn.Sequential, Tensor]:
    """A model whose sums are exact in any order, and whose activations bfloat16 cannot hold."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-9, 10, parameter.shape))
    return module.double(), torch.randint(-999, 1000, (6, 4)).double()


def test_R_saves_by_the_callers_hooks() -> None:
    module, x = whole_numbers()
    hooks = Hooks()
    with Pipe(module, [3, 2], devices=["cpu", "cpu"], chunks=3, checkpoint="always") as pipe:
        with hooks():
            loss = pipe(x).sum()
        hooks.packed = 0
        loss.backward()
    assert hooks.packed > 0


def test_tensors_not_saved_by_a_checkpointed_forward_do_not_reach_the_callers_hooks() -> None:
    module, x = whole_numbers()
    hooks = Hooks()
    with Pipe(module, [3, 2], devices=["cpu", "cpu"], chunks=3, checkpoint="always") as pipe:
        with hooks():
            pipe(x)
    assert hooks.packed == 0


# Streams


# What cannot be taken over ------------------------------------------------------------------------


def in_transform(call: Callable[[Tensor], Tensor], how: str) -> None:
    x = torch.ones(4, 2)
    if how == "grad":
        torch.func.grad(lambda x: call(x).sum())(x)
    elif how == "jvp":
        torch.func.jvp(call, (x,), (x,))
    elif how == "vmap":
        torch.func.vmap(call)(torch.ones(3, 4, 2))
    else:
        with forward_ad.dual_level():
            call(forward_ad.make_dual(x, x))  # type: ignore[no-untyped-call]


@uses_torchscript
@pytest.mark.parametrize("how", ["grad", "jvp", "vmap", "dual"])
def test_a_transform_of_the_caller_is_refused_by_name(how: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(TransformError, match="torch.func transform|forward-mode"):
            in_transform(pipe, how)
        assert pipe(torch.ones(4, 2)).shape == (4, 2)
