"""What tasks see of generators that are not torch's, of shared states, and of the caller's thread.

``docs/contract.md`` has the table.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, RecomputationError, pipeline
from tests.helpers.ways import CALL, Way, piped, take_step
from tests.layers import Apply

Draw = Callable[[], float]


def python() -> Draw:
    random.seed(0)
    return random.random


def numpy() -> Draw:
    found = pytest.importorskip("numpy").random
    found.seed(0)
    return found.rand  # type: ignore[no-any-return]


def one_generator() -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda: float(torch.rand((), generator=generator))


DRAWS = {"random": python, "numpy.random": numpy, "torch.Generator": one_generator}
of_draws = pytest.mark.parametrize("made", DRAWS.values(), ids=DRAWS)


def sum_of(y: Tensor, _: Any) -> Tensor:
    return y.sum()


@of_draws
@pytest.mark.parametrize("schedule", [CALL, "1f1b"])
def test_a_recomputation_that_reads_a_state_further_on_is_refused(
    schedule: str, made: Callable[[], Draw]
) -> None:
    draw, way = made(), Way(schedule, "always")
    with piped(nn.Sequential(Apply(lambda x: x * draw())), [1], way, chunks=2) as pipe:
        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(RecomputationError, match="returned other values"):
            take_step(pipe, way, x, loss_fn=sum_of)


class Seeing(nn.Module):
    """A model that notes what its layers and its own code see of the caller."""

    def __init__(self, see: Callable[[], object]) -> None:
        super().__init__()
        self.a, self.b, self.see = nn.Linear(2, 2), nn.Linear(2, 2), see

    def forward(self, x: Tensor) -> Tensor:
        self.see()
        y: Tensor = self.b(self.a(x))
        return y


@pytest.mark.parametrize("schedule", [CALL, "1f1b"])
def test_tasks_see_context_variables_of_the_caller_and_no_thread_locals(schedule: str) -> None:
    local, variable, seen = threading.local(), ContextVar[str]("variable", default=""), set[Any]()
    caller = threading.current_thread()

    def see(*_: Any) -> None:
        if threading.current_thread() is not caller:  # on which a call's recomputation runs
            seen.add((getattr(local, "value", None), variable.get()))

    local.value, token = "mine", variable.set("mine")
    way, layers = Way(schedule, "always"), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in layers:
        layer.register_forward_pre_hook(see)
    with piped(layers, [1, 1], way, chunks=2) as pipe:
        take_step(pipe, way, torch.ones(4, 2), loss_fn=sum_of)
    variable.reset(token)
    assert seen == {(None, "mine")}


@pytest.mark.layered  # names both kinds of pipe
@pytest.mark.parametrize("schedule", [CALL, "1f1b"])
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_hooks_of_a_model_run_for_each_micro_batch_and_those_of_a_pipe_once(
    kind: str, schedule: str
) -> None:
    calls, chunks = Counter[str](), 4
    options: Any = {"devices": ["cpu"] * 2, "chunks": chunks, "checkpoint": "never"}
    if kind == "Pipe":
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipe: Any = Pipe(model, [1, 1], **options)
    else:
        model = Seeing(lambda: None)
        pipe = pipeline(model, ["b"], **options)
    model.register_forward_hook(lambda *_: calls.update(["model"]))
    model.register_full_backward_hook(lambda *_: calls.update(["model, backward"]))
    pipe.register_forward_hook(lambda *_: calls.update(["pipe"]))
    with pipe:
        x = torch.ones(8, 2, requires_grad=True)
        take_step(pipe, Way(schedule, "never"), x, loss_fn=sum_of)
    once = {"pipe": 1} if schedule == CALL else {}
    of_model = chunks if kind == "pipeline" else len(once)
    assert +calls == +Counter({**once, "model": of_model, "model, backward": of_model})
