"""Tests what code of the model may do around gradients of weights that are put off."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert import Pipe
from pipert._torch import node_count
from pipert.autograd import weight_gradients, weight_uses
from pipert.autograd.leaves import leaves_behind
from pipert.autograd.weight_gradients import Deferral
from pipert.autograd.weight_uses import find_uses
from pipert.stage import actions
from tests.activations import Activations
from tests.contract.ways import MODES, grads_of, linear, mean, same


def piped(kind: str, layers: nn.Sequential, **options: Any) -> Any:
    every: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 3, "checkpoint": "never"}
    if kind == "Pipe":
        return Pipe(layers, [len(layers) - 1, 1], **every | options)
    return pipert.pipeline(layers, [str(len(layers) - 1)], **every | options)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_every_use_is_put_off_in_every_mode(
    kind: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, real = list[int](), weight_gradients.compute_deferred

    def count(later: list[Any]) -> Any:
        counts.append(len(later))
        return real(later)

    monkeypatch.setattr(actions, "compute_deferred", count)
    layers = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3), linear(3, 3))
    with piped(kind, layers, checkpoint=checkpoint) as pipe:
        x = torch.randn(6, 3, dtype=torch.float64)
        pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
    assert sorted(counts) == [1, 1, 1, 2, 2, 2]


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        y: Tensor = self.inner(h)
        h.add_(1)
        return y


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_an_input_that_was_changed_in_place_is_refused(kind: str, checkpoint: str) -> None:
    with piped(kind, nn.Sequential(ChangesItsInput(), linear(3, 3)), checkpoint=checkpoint) as pipe:
        with pytest.raises(RuntimeError, match="modified (by an|in place)"):
            x = torch.randn(6, 3, dtype=torch.float64)
            pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")


class ChangesItsInputLate(nn.Module):
    """Changes what its layer has saved when the gradient of that has been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        def change(grad: Tensor) -> None:
            with torch.no_grad():
                h.add_(1)

        before = x * 1
        before.register_hook(change)  # type: ignore[no-untyped-call]
        h = before * 1
        y: Tensor = self.inner(h)
        return y


def test_an_input_that_is_changed_before_w_is_refused() -> None:
    layers = nn.Sequential(ChangesItsInputLate(), linear(3, 3))
    with piped("Pipe", layers) as pipe:
        with pytest.raises(RuntimeError, match="modified in place before that was computed"):
            x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
            pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")


class HooksItsHead(nn.Module):
    """Its own code doubles the gradients that the node of its head's output gets or returns."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.body, self.head, self.before = linear(3, 3), linear(3, 3), before

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.body(x).tanh())
        hook = y.grad_fn.register_prehook if self.before else y.grad_fn.register_hook
        hook(lambda dys, *_: tuple([None if dy is None else 2 * dy for dy in dys]))
        return y


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_of_the_node_of_a_layer_s_output_changes_the_gradients_of_all_its_weights(
    before: bool, checkpoint: str
) -> None:
    model, plain = HooksItsHead(before), HooksItsHead(before)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.autograd.backward(mean(plain(x), None))
    options: Any = {"devices": ["cpu"] * 2, "chunks": 3, "checkpoint": checkpoint}
    with pipert.pipeline(model, ["head"], **options) as pipe:
        pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
    same(grads_of(model), grads_of(plain))


def test_uses_in_a_graph_of_the_caller_s_are_not_put_off() -> None:
    """Several tasks may go through it at once."""
    callers, own = linear(3, 3), linear(3, 3)
    from_caller = callers(torch.randn(2, 3, dtype=torch.float64))
    begin = node_count()
    y = own(from_caller)
    ends: Any = [y.grad_fn]
    behind = leaves_behind(ends, (), range(begin, node_count()))
    (use,) = find_uses(behind, ends)
    assert use.weight.leaf is own.weight
    assert any(leaf is callers.weight for leaf in Deferral(behind, ends).leaves)


class Counts(nn.Module):
    def __init__(self, inputs: Activations) -> None:
        super().__init__()
        self.inner, self.inputs = linear(3, 3), inputs

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inputs.add(x * 2))


def test_memory_is_freed_weight_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, alive = Activations(), list[int]()
    real = weight_uses._transposed_product

    def product(x: Tensor, dy: Tensor, has_bias: bool) -> Any:
        gc.collect()
        alive.append(inputs.now())
        return real(x, dy, has_bias)

    monkeypatch.setattr(weight_uses, "_transposed_product", product)
    layers = nn.Sequential(*[Counts(inputs) for _ in range(5)], nn.Identity())
    with piped("Pipe", layers, chunks=1) as pipe:
        pipe.forward_backward(
            torch.randn(6, 3, dtype=torch.float64), loss_fn=mean, schedule="zb-h1"
        )
    assert alive == [5, 4, 3, 2, 1]
