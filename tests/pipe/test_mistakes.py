"""Tests what one gets who makes a mistake: what must hold, what was given, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, PipeClosedError, never_recompute, pipeline

CPUS = ["cpu", "cpu"]
X = torch.ones(8, 4)


def wrong(value: Any) -> Any:
    """Hides the type of ``value``, as from a caller without a type checker."""
    return value


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers() -> nn.Sequential:
    return nn.Sequential(*Chain().layers)


def closed() -> None:
    pipe = pipeline(Chain(), ["layers.2"], devices=CPUS)
    pipe.close()
    pipe(X)


def backward_again() -> None:
    with Pipe(layers(), [2, 2], devices=CPUS, chunks=2) as pipe:
        pipe.forward_backward(X, loss_fn=lambda y, _: y.sum()).backward()


def closed_by_another() -> None:
    model = Chain()
    first = pipeline(model, ["layers.2"], devices=CPUS)
    with pipeline(model, ["layers.1"], devices=CPUS):
        first(X)


def step(loss_fn: Any, **options: Any) -> None:
    with Pipe(layers(), [2, 2], devices=CPUS, chunks=2) as pipe:
        pipe.forward_backward(X, loss_fn=loss_fn, **options)


def call(*args: Any, **kwargs: Any) -> None:
    class Labelled(Chain):
        def forward(self, input_ids: Tensor, labels: Any = None) -> Tensor:
            return super().forward(input_ids)

    with pipeline(Labelled(), ["layers.2"], devices=CPUS, chunks=2) as pipe:
        pipe(*args, **kwargs)


def reported() -> None:
    with Pipe(layers(), [2, 2], devices=CPUS) as pipe, pipe.record() as timeline:
        pass
    timeline.report()


LIST = [[1.0] * 4] * 8


class Takes(Chain):
    """Takes any keyword, as models of transformers do."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(x)


def misspelt(how: str, **keywords: Any) -> None:
    with pipeline(Takes(), ["layers.2"], devices=CPUS, chunks=2) as pipe:
        if how == "call":
            pipe(X, **keywords)
        else:
            pipe.forward_backward(X, loss_fn=lambda y, _: y.mean(), **keywords)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a misspelt denominator": (
        lambda: misspelt("step", denominater=2), TypeError,
        r"^denominater=.* perhaps denominator=... is meant.* target, .*go to the model",
    ),
    "a setting in a step": (lambda: misspelt("step", chunks=4), TypeError, r"set pipe\.chunks"),
    "a number for cuts": (
        lambda: pipeline(Chain(), wrong(2)), TypeError,
        r"cuts must be a list of names.*got 2; .* write partitions=2 and example=batch",
    ),
    "a number of devices": (
        lambda: Pipe(layers(), [2, 2], devices=wrong(2)), TypeError,
        r"devices must be a sequence .* got 2; write devices=\['cpu', 'cpu'\], or range\(2\)",
    ),
    "a name for a layer": (
        lambda: never_recompute(wrong("layers.2")), TypeError,
        r"layer must be a module, such as model.get_submodule\(name\), got 'layers.2'",
    ),
    "a Pipe of any module": (
        lambda: Pipe(wrong(Chain())), TypeError,
        r"must be an nn.Sequential, got Chain; use pipert.pipeline\(model, example=batch\)",
    ),
    "a device of no kind": (
        lambda: Pipe(layers(), [2, 2], devices=["gpu0", "gpu1"]), ValueError,
        "devices are named 'cuda:0' or 'cpu', got 'gpu0'",
    ),
    "a text for a timeout": (
        lambda: Pipe(layers(), [2, 2], devices=CPUS, timeout=wrong("60")), TypeError,
        "timeout must be a positive number of seconds or None, got '60'",
    ),
    "a loss that is no tensor any more": (
        lambda: step(lambda y, _: y.sum().item()), TypeError,
        r"got float; return the tensor itself, as in y.sum\(\), without .item\(\)",
    ),
    "a list for the tokens": (
        lambda: call(input_ids=LIST), TypeError, "input_ids must be a tensor, got a list",
    ),
    "a list for the target": (
        lambda: step(nn.functional.mse_loss, target=LIST), TypeError,
        "target must be a tensor, got a list of numbers",
    ),
    "a recording without a call": (
        reported, ValueError, "no complete call in this timeline; call the pipe inside",
    ),
    "a pipe that another one of the model has closed": (
        closed_by_another, PipeClosedError,
        "the pipe was closed when another pipe of the model was made; make a new one",
    ),
    "a backward after a step": (
        backward_again, RuntimeError, "does not require grad and does not have a grad_fn",
    ),
    "a closed pipe": (
        closed, PipeClosedError, r"was closed; make a new one .* pipert.pipeline\(module, ...\)",
    ),
    "a compiled model": (
        lambda: pipeline(wrong(torch.compile(Chain())), devices=CPUS, example=X), ValueError,
        r"compiled or scripted as a whole.*; give the plain module, and compile its layers",
    ),
    "a model on meta": (
        lambda: pipeline(Chain().to("meta"), ["layers.2"], devices=CPUS), ValueError,
        r"'layers.0.weight' is on 'meta', .*to_empty\(device='cpu'\)",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of dynamo
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(mistake: str) -> None:
    make, kind, told = MISTAKES[mistake]
    with pytest.raises(kind, match=told):
        make()


def test_a_batch_whose_entries_are_arguments_is_explained() -> None:
    with pipeline(Chain(), ["layers.2"], devices=CPUS) as pipe:
        with pytest.raises(TypeError) as caught:
            pipe({"x": X})
        assert "to pass the entries: **batch" in "".join(caught.value.__notes__)
        with pytest.raises(TypeError) as caught:
            pipe({"y": X})
        assert "**batch" not in "".join(caught.value.__notes__)
