"""torch.compile: each layer is compiled, then wrapped. A pipe as a whole is not.

The backends ``eager`` and ``aot_eager`` do all that a pipe could get wrong, without a C++ compiler.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, TransformError
from tests import scripts

pytestmark = [
    pytest.mark.slow,  # the first compilation imports for seconds
    pytest.mark.usefixtures("forget_compiled"),
    # Of dynamo: about itself, and of NumPy, which need not be there.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

same = torch.testing.assert_close
MODES = ["always", "except_last", "never"]


class Block(nn.Module):
    """A layer that users would compile."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def blocks(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(count)]).double()


def compiled_children(module: nn.Sequential, **how: Any) -> nn.Sequential:
    children: list[Any] = [torch.compile(layer, **how) for layer in module]
    return nn.Sequential(*children)


def compiled_in_place(module: nn.Sequential, **how: Any) -> nn.Sequential:
    for layer in module:
        layer.compile(**how)
    return module


RECIPES: dict[str, Callable[..., nn.Sequential]] = {
    "torch.compile(layer)": compiled_children,
    "layer.compile()": compiled_in_place,
}

recipes = pytest.mark.parametrize("recipe", RECIPES)


def pipe_of(module: nn.Sequential, devices: list[str] | None = None, **options: Any) -> Pipe:
    """One partition for each layer on CPU, or two on the ``devices``."""
    n = len(module) if devices is None else 2
    balance = [len(module) // n] * n
    return Pipe(module, balance, devices=devices or ["cpu"] * n, chunks=3, **options)


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Returns the output, and the gradient of each parameter."""
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [y.detach().cpu(), *[None if grad is None else grad.cpu() for grad in grads]]


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.double)


# The recipe ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "checkpoint"),
    [*[("torch.compile(layer)", mode) for mode in MODES], ("layer.compile()", "except_last")],
)
def test_a_model_of_compiled_layers_trains_as_the_plain_model(
    devices: list[str], recipe: str, checkpoint: str
) -> None:
    plain = blocks(2)
    module = RECIPES[recipe](copy.deepcopy(plain), backend="aot_eager")
    with pipe_of(module, devices, checkpoint=checkpoint) as pipe:
        for rows in (6, 7):  # another size compiles again, in the workers and in the backward
            x = batch(rows)
            same(step(pipe, x), step(plain, x))


@recipes
def test_layers_are_really_compiled(recipe: str) -> None:
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(threading.get_ident())
        return graph.forward

    with pipe_of(RECIPES[recipe](blocks(2), backend=backend), checkpoint="never") as pipe:
        pipe(batch(6))
    assert graphs and threading.get_ident() not in graphs


def test_a_second_call_and_its_recomputations_compile_nothing() -> None:
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(threading.get_ident())
        return graph.forward

    module = compiled_children(blocks(2), backend=backend, dynamic=False)
    with pipe_of(module, checkpoint="always") as pipe:
        pipe(batch(6))
        before = len(graphs)
        step(pipe, batch(6))
    assert len(graphs) == before


def test_workers_compile_under_the_callers_settings_of_dynamo() -> None:
    limits: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        limits.append(torch._dynamo.config.recompile_limit)
        return graph.forward

    with pipe_of(compiled_children(blocks(2), backend=backend)) as pipe:
        with torch._dynamo.config.patch(recompile_limit=77):
            pipe(batch(6))
    assert set(limits) == {77}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_compiled_norms_have_their_statistics_deferred(checkpoint: str) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    module = copy.deepcopy(plain)
    pipe = pipe_of(
        compiled_children(module, backend="eager"), checkpoint=checkpoint,
        deferred_batch_norm=True,
    )  # fmt: skip
    with pipe:
        for _ in range(2):
            x = batch(6)
            plain(x)
            pipe(x).sum().backward()
    same(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_compiled_layers_that_draw_do_so_again_with_the_same_seed() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(3)]
    module = nn.Sequential(*layers).double()
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = compiled_children(copy.deepcopy(module), backend="aot_eager")
        with pipe_of(compiled, checkpoint="always") as pipe:
            torch.manual_seed(3)
            runs.append([step(pipe, torch.ones(rows, 8).double()) for rows in (6, 7)])
    same(runs[0], runs[1], rtol=0.0, atol=0.0)


# What is not there --------------------------------------------------------------------------------


def test_importing_and_running_pipert_does_not_import_dynamo() -> None:
    script = """
import sys
import torch
from torch import nn
from pipert import Pipe

model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
with Pipe(model, [1, 2], devices=["cpu", "cpu"], chunks=2) as pipe:
    pipe(torch.ones(4, 8)).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    assert scripts.run(script).stdout == "False\n"


WHOLE: dict[str, Callable[[Pipe], Callable[[Tensor], Tensor]]] = {
    "torch.compile(pipe)": lambda pipe: torch.compile(pipe, backend="eager"),
    "pipe.compile()": lambda pipe: pipe.compile(backend="eager") or pipe,
    "in a function": lambda pipe: torch.compile(lambda x: pipe(x * 2) * 2, backend="eager"),
}


@pytest.mark.parametrize("how", WHOLE)
def test_a_pipe_that_is_compiled_is_refused_with_the_recipe(how: str) -> None:
    with pipe_of(blocks(2)) as pipe:
        with pytest.raises(TransformError, match="Compile each layer, then wrap"):
            WHOLE[how](pipe)(batch(6))


def test_a_compiled_function_may_call_a_pipe_that_is_left_out_of_it() -> None:
    plain = blocks(2)
    with pipe_of(copy.deepcopy(plain), checkpoint="always") as pipe:
        compiler: Any = torch.compiler
        left_out = compiler.disable(pipe)

        def loss_of(model: nn.Module, x: Tensor) -> Any:
            return model(x * 2).square().sum()

        compiled = torch.compile(loss_of, backend="aot_eager")
        for rows in (6, 7):
            x = batch(rows)
            losses = [compiled(left_out, x), loss_of(plain, x)]
            for loss in losses:
                loss.backward()
            same(*losses)
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)
