"""Tests Checkpoint and Recompute rule by rule, alone and inside a pipe."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipert import Pipe, is_recomputing
from pipert.autograd.streams import CopyStreams
from pipert.layers.place import Place
from pipert.recompute.effects import Effects
from pipert.recompute.nodes import recompute_before
from pipert.recompute.segment import Segments
from tests.helpers.pipes import pipe_of_layers

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault

Compute = Callable[[Any], Any]
Way = Callable[[Compute], Compute]


def replay(compute: Callable[[], None], on_worker: bool) -> None:
    with torch.enable_grad():
        compute()


def recorded(
    compute: Compute, value: Any, again: Compute | None = None
) -> tuple[Tensor, weakref.ref[Segments]]:
    place = Place(0, 1, 1, torch.device("cpu"))
    compare = partial(Effects(at_end=False, streams=CopyStreams()).compare, place, 0)
    segments = Segments(replay, compare)
    y = segments.call("", compute, again or compute, None, value, copies=True)
    (y,) = recompute_before((y,), segments)
    return y, weakref.ref(segments)


def checkpointed(compute: Compute, value: Any, again: Compute | None = None) -> Tensor:
    """Computes ``compute(value)``, one tensor, as a checkpointed partition does."""
    return recorded(compute, value, again)[0]


def watched_storage(tensor: Tensor) -> Callable[[], bool]:
    """Returns a function that tells whether the memory of ``tensor`` is gone, whoever held it."""
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    expired: Callable[[], bool] = storage.expired
    return expired


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 4, requires_grad=True)


def several_operations(x: Tensor) -> Tensor:
    return x.sin() * x.exp() + (x * 3).sigmoid()


def custom(compute: Compute) -> Compute:
    """Computes the same behind a custom function."""
    return lambda x: compute(on_backward(x, lambda: None))


def as_it_is(compute: Compute) -> Compute:
    return compute


ways = pytest.mark.parametrize("way", [as_it_is, custom])


def gradient(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(y.sum(), x, **options)[0]


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Watched(nn.Module):
    """A layer that saves a tensor for the backward, and can tell whether it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[Callable[[], bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        activation = x.detach() * 2
        self.gone.append(watched_storage(activation))
        return x * activation

    def alive(self) -> int:
        return sum(not gone() for gone in self.gone)


class _OnBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


def on_backward(x: Tensor, function: Callable[[], None]) -> Tensor:
    result: Tensor = _OnBackward.apply(x, function)  # type: ignore[no-untyped-call]
    return result


def node_of(y: Tensor) -> str:
    """Returns the name of the node before which the recomputation runs."""
    assert y.grad_fn is not None
    node = y.grad_fn.next_functions[0][0]
    assert node is not None
    return node.name()


# Rules 1 and 2: one node of the graph, or the graph without its data.


@ways
def test_gradient_is_that_of_the_computation(way: Way) -> None:
    x = leaf()
    expected = gradient(several_operations(x), x)
    same(gradient(checkpointed(way(several_operations), x), x), expected)


@ways
def test_graph_of_the_forward_holds_no_activation(way: Way) -> None:
    layer = Watched()
    with no_collector():
        y = checkpointed(way(layer), leaf())
        assert y.requires_grad and layer.alive() == 0


def test_a_function_of_its_graphs_leaves_is_one_node() -> None:
    weight = leaf()
    assert node_of(checkpointed(lambda x: x.sin() * weight, leaf())) == "_CheckpointBackward"


def test_a_hook_on_a_weight_sees_its_gradient_once() -> None:
    weight, seen = leaf(), list[Tensor]()
    weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    y = checkpointed(lambda x: (x.sin() * weight).exp(), leaf())
    assert node_of(y) == "_CheckpointBackward"
    torch.autograd.backward(y.sum())
    assert len(seen) == 1


def test_a_hook_on_a_weight_sees_what_a_custom_function_adds_in_its_backward() -> None:
    weight, seen = leaf(), list[Tensor]()
    weight.register_hook(seen.append)  # type: ignore[no-untyped-call]

    @torch.enable_grad()
    def go_back() -> None:
        torch.autograd.backward((weight * 3).sum())

    def compute(x: Tensor) -> Tensor:
        return on_backward(x, go_back) * weight

    torch.autograd.backward(checkpointed(compute, leaf()).sum())
    found, seen[:] = sorted(seen, key=str), []
    torch.autograd.backward(compute(leaf()).sum())
    assert len(found) == 2 and all(map(torch.equal, found, sorted(seen, key=str)))


def test_a_hook_of_a_weight_that_comes_after_the_forward_sees_its_gradient_once() -> None:
    weight, seen = leaf(), list[Tensor]()

    def double(grad: Tensor) -> Tensor:
        seen.append(grad)
        return 2 * grad

    ys = [checkpointed(lambda x: x.sin() * weight, leaf()) for _ in range(2)]
    handle = weight.register_hook(double)  # type: ignore[no-untyped-call]
    torch.autograd.backward(ys[0].sum() + ys[1].sum())
    same(seen, [2 * leaf().sin()])
    same(weight.grad, 4 * leaf().sin())
    handle.remove()
    y = checkpointed(lambda x: x.sin() * weight, leaf())
    torch.autograd.backward(y.sum())
    assert len(seen) == 1


def test_a_tensor_of_a_graph_before_keeps_the_graph_and_has_its_gradient() -> None:
    made = leaf()
    scale = made.exp()
    ys = [checkpointed(lambda x: x * scale, leaf() * k) for k in (1, 2)]
    assert [node_of(y) for y in ys] == ["MulBackward0"] * 2
    same(gradient(ys[0] + ys[1], made), 3 * leaf() * leaf().exp())


@pytest.mark.parametrize("way_back", ["grad", "inputs"])
def test_backward_of_a_checkpoint_computes_only_requested_gradients(way_back: str) -> None:
    weight, x, calls = leaf(), leaf(), list[str]()

    def compute(x: Tensor) -> Tensor:
        used = weight.exp()
        used.register_hook(lambda _: calls.append("weight"))  # type: ignore[no-untyped-call]
        return x.sin() * used

    y = checkpointed(compute, x).sum()
    assert node_of(checkpointed(compute, x)) == "_CheckpointBackward"
    if way_back == "grad":
        (found,) = torch.autograd.grad(y, x)
    else:
        torch.autograd.backward(y, inputs=[x])
        assert x.grad is not None
        found = x.grad
    same(found, leaf().cos() * leaf().exp())
    assert not calls


# One node recomputes, before anything of B[i,j] runs.


def test_a_tensor_of_a_layer_that_a_loss_uses_gets_its_gradient_beside_the_output() -> None:
    """Rule 5: from the graph that only the checkpoint holds."""
    x, middles = leaf(), list[Tensor]()

    def compute(x: Tensor) -> Tensor:
        middles.append(x.sin())
        return middles[-1].exp()

    y = checkpointed(compute, x, lambda x: x.sin().exp())
    same(gradient(y + middles[0], x), x.cos() * (x.sin().exp() + 1))


def test_recomputation_comes_before_the_whole_backward() -> None:
    log: list[str] = []
    x = leaf()

    def compute(x: Tensor) -> Tensor:
        return on_backward(x.sin(), lambda: log.append("B"))

    def again(x: Tensor) -> Tensor:
        log.append("R")
        return compute(x)

    gradient(checkpointed(compute, x, again), x)
    assert log == ["R", "B"]


# What is read is let go.


@ways
def test_activation_lives_until_its_operation_has_run(way: Way) -> None:
    layers, alive = [Watched(), Watched(), Watched()], list[int]()

    def count() -> None:
        alive.append(sum(layer.alive() for layer in layers))

    def compute(x: Tensor) -> Tensor:
        for layer in layers:
            x = on_backward(layer(x), count)
        return x

    x = leaf()
    with no_collector():
        gradient(checkpointed(way(compute), x), x)
    assert alive == [3, 2, 1]


# The graph owns what is needed to recompute.


def test_checkpoint_goes_with_the_backward() -> None:
    with no_collector():
        y, reference = recorded(torch.sin, leaf())
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert reference() is None


def test_saved_input_goes_with_the_backward() -> None:
    x = leaf()
    with no_collector():
        value = x * 1
        gone = watched_storage(value)
        y = checkpointed(torch.sin, value)
        del value
        gradient(y, x)
        assert gone()


# Rule 4: inputs are saved as they were.


def test_modified_input_is_refused() -> None:
    x = leaf()
    value = x * 1
    y = checkpointed(torch.sin, value)
    with torch.no_grad():
        value.add_(1)
    with pytest.raises(RuntimeError, match=r"was modified in place.*: float32\[4\]"):
        gradient(y, x)


def test_input_from_inference_mode_is_recomputed() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
    weight = torch.full((4,), 2.0, requires_grad=True)
    y = checkpointed(lambda x: x * weight, x)
    same(gradient(y, weight), torch.ones(4))


# Inside a pipe.


class Counter(nn.Module):
    """A layer with a parameter that counts its recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.recomputations = 0

    def forward(self, x: Tensor) -> Tensor:
        self.recomputations += is_recomputing()
        return x * self.weight


pipe_of = partial(pipe_of_layers, chunks=2, checkpoint="always")


def rows() -> Tensor:
    return torch.ones(6, 2)


def test_a_backward_has_the_mode_of_its_forward() -> None:
    layer = Counter()
    with pipe_of(layer, checkpoint="always") as pipe:
        loss = pipe(rows()).sum()
        pipe.checkpoint = "never"
        loss.backward()
    assert layer.recomputations == 2


# What changes between F and R, or is asked for too early.


class Scaled(nn.Module):
    """A layer that changes in place a tensor saved by the previous operation."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid().mul_(3)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_activation_changed_by_a_later_operation_is_refused(checkpoint: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), Scaled())
    with Pipe(module, [2], devices=["cpu"], chunks=2, checkpoint=checkpoint) as pipe:
        with pytest.raises(RuntimeError, match="modified .*in ?place"):
            pipe(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("layer", [0, 1])
def test_parameters_changed_before_a_recomputation_are_refused(layer: int) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with Pipe(module, [2], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        loss = pipe(torch.randn(4, 3)).sum()
        with torch.no_grad():
            module[layer].weight.mul_(10)  # type: ignore[operator]
        with pytest.raises(RuntimeError, match="call the optimizer after the backward"):
            loss.backward()


def test_parameters_replaced_before_the_recomputation_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    with Pipe(module, [1], devices=["cpu"], chunks=2, checkpoint="always") as pipe:
        others = {n: p.detach().clone().requires_grad_() for n, p in pipe.named_parameters()}
        loss = torch.func.functional_call(pipe, others, torch.randn(4, 3)).sum()
        with pytest.raises(RuntimeError, match="was modified"):
            loss.backward()


def test_a_graph_does_not_keep_the_runtime_of_its_pipe() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=["cpu"], checkpoint="always")
    loss = pipe(torch.randn(4, 3)).sum()
    runtime = weakref.ref(pipe._runtime.pool)
    pipe.close()
    del pipe
    assert runtime() is None
    loss.backward()


def test_a_leaf_that_is_frozen_after_the_forward_gets_no_gradient() -> None:
    x, bias = leaf(), leaf()
    y = checkpointed(lambda x: (x + bias).sin(), x)
    bias.requires_grad_(False)
    torch.autograd.backward(y.sum())
    assert bias.grad is None and x.grad is not None
