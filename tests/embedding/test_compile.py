"""torch.compile: each layer is compiled, then wrapped. A pipe as a whole is not.

The backends ``eager`` and ``aot_eager`` do all that a pipe could get wrong, without a C++ compiler.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import pipert
from pipert import Pipe, TransformError
from tests.helpers import scripts
from tests.helpers.ways import Way, each_way, grads_of, mean, same, take_step

pytestmark = [
    pytest.mark.slow,  # the first compilation imports for seconds
    pytest.mark.usefixtures("forget_compiled"),
    # Of dynamo: about itself, and of NumPy, which need not be there.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

WAIT = 30.0  # s; what should happen at once is given up after it
NEVER = 0.2  # s; how long to wait for what must not happen


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


@pytest.mark.pairwise
@each_way
@recipes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_of_compiled_layers_is_that_of_the_plain_module(
    backend: str, recipe: str, way: Way
) -> None:
    plain = blocks(2)
    module = RECIPES[recipe](copy.deepcopy(plain), backend=backend)
    with pipe_of(module, checkpoint=way.checkpoint) as pipe:
        for rows in (6, 7):  # another size compiles again, in the workers and in the backward
            x = batch(rows)
            take_step(pipe, way, x, loss_fn=squares)
            squares(plain(x), None).backward()
    same([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


def squares(y: Tensor, _: Any) -> Any:
    return y.square().mean()


def test_the_loss_may_be_compiled_too(devices: list[str]) -> None:
    plain, x = blocks(), batch(7)
    module = compiled_in_place(copy.deepcopy(plain), backend="aot_eager")
    with pipe_of(module, devices) as pipe:
        pipe.forward_backward(x, loss_fn=torch.compile(squares, backend="aot_eager"))
    squares(plain(x), None).backward()
    found = {name: None if dw is None else dw.cpu() for name, dw in grads_of(module).items()}
    same(found, grads_of(plain))


@recipes
def test_layers_are_really_compiled(recipe: str) -> None:
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(threading.get_ident())
        return graph.forward

    with pipe_of(RECIPES[recipe](blocks(2), backend=backend), checkpoint="never") as pipe:
        pipe(batch(6))
    assert graphs and threading.get_ident() not in graphs


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


def test_a_step_under_compiled_autograd_is_refused() -> None:
    x = batch(4)
    with pipe_of(blocks(2), checkpoint="never") as pipe:
        with compiled_autograd._enable(lambda graph: graph):
            with pytest.raises(TransformError, match="compiled autograd.*loss.backward()"):
                pipe.forward_backward(x, loss_fn=mean)


def around_both(pipe: Any, x: Any) -> None:
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        mean(pipe(x), None).backward()


def around_the_backward(pipe: Any, x: Any) -> None:
    loss = mean(pipe(x), None)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        loss.backward()


def in_compiled_code(pipe: Any, x: Any) -> None:
    of_torch: Any = torch
    call = of_torch.compiler.disable(pipe)
    with of_torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: mean(call(x), None).backward(), backend="eager")()


@pytest.mark.parametrize("kind", [Pipe, pipert.pipeline])
@pytest.mark.parametrize("go_back", [around_both, around_the_backward, in_compiled_code])
def test_a_recomputation_under_compiled_autograd_is_refused(kind: Any, go_back: Any) -> None:
    module, x = blocks(2), batch(4)
    plain = copy.deepcopy(module)
    mean(plain(x), None).backward()
    cuts = [1, 1] if kind is Pipe else ["1"]
    with kind(module, cuts, devices=["cpu"] * 2, chunks=2, checkpoint="always") as pipe:
        with pytest.raises(TransformError, match="compiled autograd.*checkpoint='never'"):
            go_back(pipe, x)
        assert all(parameter.grad is None for parameter in module.parameters())
        pipe.checkpoint = "never"
        go_back(pipe, x)
    same(grads_of(module), grads_of(plain))


# What is compiled at once -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_threads_that_compile_at_once_get_the_plain_models_results(backend: str) -> None:
    """Forward, backward and recompilation in four threads that a barrier keeps together."""
    plain = blocks(4)
    compiled = compiled_children(copy.deepcopy(plain), backend=backend)
    together = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for rows in (3, 4, 1):
                x = batch(rows + k)
                together.wait(WAIT)
                same(step(compiled[k], x), step(plain[k], x))
        except BaseException as error:  # noqa: B036  raised below
            together.abort()
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors


def test_compiled_code_runs_while_another_worker_compiles() -> None:
    """F[1,0] is compiled, for a micro-batch of one row, until F[0,1] has run what it has got."""
    ran, compiling = threading.Event(), threading.Event()
    waited: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        if order:
            compiling.set()
            waited.append(ran.wait(WAIT))
        return graph.forward

    class Wait(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not order or compiling.wait(WAIT)
            return x

    class Ran(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.set()
            return x

    order = False
    first: Any = torch.compile(nn.Linear(8, 8).double(), backend=backend, dynamic=False)
    last: Any = torch.compile(nn.Linear(8, 8).double(), backend="eager", dynamic=False)
    module = nn.Sequential(first, Wait(), last, Ran())
    with Pipe(module, [1, 3], devices=["cpu"] * 2, chunks=2) as pipe, torch.no_grad():
        pipe(batch(4))  # two rows each
        ran.clear()
        order = True
        pipe(batch(3))
    assert waited == [True]


# Random numbers -----------------------------------------------------------------------------------


def drawn_after(race: bool) -> Tensor:
    """What the caller draws after a run in which F[1,0] compiles while F[0,1] draws."""
    torch._dynamo.reset()
    compiling, drawn = threading.Event(), threading.Event()
    compilations: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(1)
        if len(compilations) == 2:  # for a micro-batch of one row
            compiling.set()
            drawn.wait(NEVER if race else 0)
        return graph.forward

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if race:
                assert compiling.wait(WAIT)
            y = x + torch.rand_like(x)
            drawn.set()
            return y

    first: Any = torch.compile(nn.Linear(8, 8).double(), backend=backend, dynamic=False)
    module = nn.Sequential(first, Noise())
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never") as pipe:
        torch.manual_seed(1)
        with torch.no_grad():
            pipe(batch(3))
    assert len(compilations) == 2
    return torch.rand(3)


def test_a_compilation_does_not_undo_another_workers_draws() -> None:
    assert torch.equal(drawn_after(race=True), drawn_after(race=False))
