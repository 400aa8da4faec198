"""Tests nested pipes, pipes that share layers, and calls from hooks and asyncio, while some fail.

``tests/contract/test_several_callers.py`` has what holds for calls and steps. Every wait has a
limit, and a call that hangs fails its test by name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from tests.activations import Activations
from tests.faults.injector import Failure

WAIT = 20.0  # s; what takes longer is taken for a hang
MODES = ("always", "except_last", "never")

modes = pytest.mark.parametrize("checkpoint", MODES)


@pytest.fixture(scope="module", autouse=True)
def _imported(no_gc_in_module: None) -> None:
    """Makes the first calls, whose imports no test should pay for."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))


class Scale(nn.Module):
    """A layer that fails on request; the first column of the rows holds the number of their caller.

    Args:
        j: its partition.
        fails: from the caller and ``'forward'`` or ``'recomputation'``, what to raise.
    """

    def __init__(
        self, j: int, fails: Callable[[int, str], BaseException | None] = lambda caller, phase: None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.6 + 0.2 * j, -1.1]))
        self.fails = fails
        self.seen = Activations()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.seen.add(x[:, 1:] * self.weight)
        error = self.fails(
            int(x.detach()[0, 0].item()), "recomputation" if is_recomputing() else "forward"
        )
        if error is not None:
            raise error
        return self.seen.add(torch.cat([x[:, :1], kept.tanh()], 1))


def batch(caller: int, rows: int = 4) -> Tensor:
    return torch.cat([torch.full((rows, 1), float(caller)), torch.rand(rows, 2)], 1)


def step(model: nn.Module, x: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the output, and gradients computed without touching ``.grad``."""
    y = model(x)
    return y, *torch.autograd.grad(y[:, 1:].square().sum(), parameters)


def at_once(functions: list[Callable[[], Any]]) -> list[Any]:
    """Calls each function on a thread of its own; returns their results or errors."""
    start = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)

    def run(k: int) -> None:
        start.wait(WAIT)
        try:
            results[k] = functions[k]()
        except BaseException as error:  # noqa: B036  looked at by the test
            results[k] = error.with_traceback(None)

    threads = [
        threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results


def wrong(found: Any, expected: tuple[Tensor, ...]) -> bool:
    return not isinstance(found, tuple) or not all(
        torch.allclose(mine, right, atol=1e-6) for mine, right in zip(found, expected, strict=True)
    )


# Pipes in pipes -----------------------------------------------------------------------------------


def nested(
    inner_layers: list[Scale], of_inner: str, of_outer: str
) -> tuple[Pipe, Pipe, nn.Sequential]:
    """Makes an inner pipe, an outer one with a layer before and after it, and the plain model."""
    before, behind = Scale(3), Scale(4)
    inner = Pipe(
        nn.Sequential(*inner_layers),
        [1] * len(inner_layers),
        devices=["cpu"] * len(inner_layers),
        chunks=2,
        checkpoint=of_inner,
    )
    layers = nn.Sequential(before, inner, behind)
    outer = Pipe(layers, [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint=of_outer)
    return inner, outer, nn.Sequential(before, *inner_layers, behind)


@pytest.mark.layered  # in any model a pipe that is a layer keeps its graph, and is not recomputed
@pytest.mark.parametrize("of_inner", MODES)
@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, SystemExit])
def test_both_pipes_are_right_after_an_inner_failure_in_a_recomputation_of_the_outer(
    kind: type[BaseException], of_inner: str
) -> None:
    errors: list[BaseException] = [kind("inside")]
    layers = [
        Scale(0),
        Scale(
            1, lambda caller, phase: errors[0] if errors and phase == "recomputation" else None
        ),
    ]
    inner, outer, plain = nested(layers, of_inner, "always")
    parameters, x = list(plain.parameters()), batch(0)
    with inner, outer:
        raised = None
        try:
            step(outer, x, parameters)
        except BaseException as error:  # noqa: B036  looked at below
            raised, notes = error.with_traceback(None), error.__notes__
        assert raised is errors.pop()
        assert notes[-1].startswith("in recomputation R[1,1]: partition 1 on cpu, layer '1'")
        del raised
        # What was about to run stays in the engine's queue for this thread until its next backward.
        torch.autograd.backward(torch.ones((), requires_grad=True))
        assert [layer.seen.left() for layer in plain if isinstance(layer, Scale)] == [0] * 4
        assert not wrong(step(outer, x, parameters), step(plain, x, parameters))


# Two pipes on the same devices --------------------------------------------------------------------


@contextlib.contextmanager
def sharing(checkpoint: str) -> Iterator[tuple[Pipe, Pipe, nn.Sequential]]:
    """Makes two pipes of the same layers, split differently."""
    model = nn.Sequential(Scale(0), Scale(1), Scale(2))
    first = Pipe(model, [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    second = Pipe(model, [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    with first, second:
        yield first, second, model


@modes
def test_two_pipes_that_share_parameters_are_right_at_once(checkpoint: str) -> None:
    with sharing(checkpoint) as (first, second, model):
        parameters = list(model.parameters())
        inputs = [batch(k) for k in range(4)]
        pipes = [first, second, first, second]
        for _ in range(3):
            found = at_once(
                [partial(step, p, x, parameters) for p, x in zip(pipes, inputs, strict=True)]
            )
            for x, mine in zip(inputs, found, strict=True):
                assert not wrong(mine, step(model, x, parameters))


# asyncio ------------------------------------------------------------------------------------------
