"""Tests a model in a pipe as part of other things: modules around it, other pipes, GPUs, memory."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, ReentrantCallError, pipeline
from tests.any_model.in_place import Model, a_model, a_pipe, rows, runs
from tests.helpers.collection import settle
from tests.helpers.ways import grads_of, linear


class Wrapper(nn.Module):
    """An adapter: holds the model, and calls its ``forward`` in the way given."""

    def __init__(self, model: nn.Module, directly: bool) -> None:
        super().__init__()
        self.model, self.directly = model, directly
        self.before = linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        return self.model.forward(x) if self.directly else self.model(x)


each_wrapper = pytest.mark.parametrize("directly", [True, False])


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)


@each_wrapper
def test_a_module_around_the_model_uses_its_pipe(directly: bool) -> None:
    whole, x = Wrapper(a_model(), directly), rows()
    plain = copy.deepcopy(whole)
    plain(x).square().mean().backward()
    with a_pipe(whole.model) as pipe:
        whole(x).square().mean().backward()
        assert runs(pipe) == 1
    same(grads_of(whole), grads_of(plain))


@each_wrapper
@pytest.mark.parametrize("schedule", ["", "1f1b"])
def test_a_pipe_of_a_module_around_the_model_gets_its_calls_alone(
    directly: bool, schedule: str
) -> None:
    """As peft's models do, which call their base model's ``forward``."""
    whole, x = Wrapper(a_model(), directly), rows()
    plain = copy.deepcopy(whole)
    plain(x).square().mean().backward()
    expected = plain.model(x)
    with a_pipe(whole, "model.", checkpoint="always") as pipe:
        if schedule:
            pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean(), schedule=schedule)
        else:
            whole(x).square().mean().backward()
        assert runs(pipe) == 1
        for call in (whole.model, whole.model.forward):
            same(call(x), expected)
            assert runs(pipe) == 0
    same(grads_of(whole), grads_of(plain))


@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
@pytest.mark.parametrize("schedule", ["", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_as_a_layer_of_another_pipe_it_uses_its_own(
    kind: str, schedule: str, checkpoint: str
) -> None:
    model, x = a_model(), rows()
    layers = nn.Sequential(linear(4, 4), model, linear(2, 2))
    plain = copy.deepcopy(layers)
    plain(x).square().mean().backward()
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "chunks": 3, "checkpoint": checkpoint}
    with a_pipe(model) as inner:
        outer: Any = pipeline(layers, ["1", "2"], **options) if kind == "pipeline" else Pipe(
            layers, [1, 1, 1], **options
        )
        with outer:
            if schedule:
                outer.forward_backward(x, loss_fn=lambda y, _: y.square().mean())
            else:
                outer(x).square().mean().backward()
            assert runs(outer) == 1
            assert runs(inner) in ((3, 6) if checkpoint == "always" else (3,))
            tasks = [worker.tasks for worker in outer.statistics().workers]
            assert len(set(tasks)) == 1  # a partition begins with it, and one after it
    same(grads_of(layers), grads_of(plain))


def test_a_layer_that_calls_the_pipe_of_its_model_is_refused() -> None:
    class Again(Model):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = pipe(x)
            return found

    pipe: Any = a_pipe(Again())
    with pipe, pytest.raises(ReentrantCallError):
        pipe.module(rows())


def test_a_recursive_model_calls_itself_plainly_inside_of_its_pipe() -> None:
    class Twice(Model):
        def forward(self, x: Tensor, scale: float = 1.0, *, as_number: bool = False) -> Tensor:
            if scale == 1.0:
                more: Tensor = self(x, 2.0)
                return super().forward(x) + more
            return super().forward(x, scale)

    torch.manual_seed(1)
    model, x = Twice(), rows()
    expected = copy.deepcopy(model)(x)
    with a_pipe(model) as pipe:
        same(model(x), expected)
        assert runs(pipe) == 1


def test_a_number_of_several_micro_batches_is_refused_with_a_remedy() -> None:
    model, x = a_model(), rows()
    expected = copy.deepcopy(model)(x, as_number=True)
    with a_pipe(model) as pipe:
        for call in (model, pipe):
            with pytest.raises(ValueError, match=r"use chunks=1, .* pipe.forward_backward"):
                call(x, as_number=True)
        same(model(x[:1], as_number=True), copy.deepcopy(model)(x[:1], as_number=True))
        pipe.chunks = 1
        same(model(x, as_number=True), expected)


# How long a model and its pipe live ---------------------------------------------------------------


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("pipert-")}


def test_a_model_keeps_its_pipe() -> None:
    model, x = a_model(), rows()
    expected = copy.deepcopy(model)(x)
    seen = weakref.ref(a_pipe(model))
    gc.collect()
    pipe = seen()
    assert pipe is not None
    same(model(x), expected)
    assert runs(pipe) == 1
    pipe.close()


@pytest.mark.parametrize("called", [True, False])
def test_a_model_and_its_pipe_are_collected_together(called: bool) -> None:
    before = threads()
    model = a_model()
    pipe = a_pipe(model)
    seen = [weakref.ref(model), weakref.ref(pipe)]
    if called:
        model(rows()).sum().backward()
        pipe.forward_backward(rows(), loss_fn=lambda y, _: y.sum())
    del model, pipe
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    for thread in threads() - before:
        thread.join(5.0)
    assert threads() <= before


def test_a_closed_pipe_is_not_kept_by_its_model() -> None:
    model = a_model()
    pipe = a_pipe(model)
    model(rows())
    pipe.close()
    seen = weakref.ref(pipe)
    del pipe
    settle()
    gc.collect()
    assert seen() is None


# On GPUs ------------------------------------------------------------------------------------------

GPUS = ["cuda:0", "cuda:1", "cuda:1"]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
def test_outputs_are_on_the_device_of_the_inputs(there: str) -> None:
    model, x = a_model(), rows()
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    with a_pipe(model, devices=GPUS) as pipe:
        y = model(x.to(there))
        assert y.device == torch.device(there) and pipe(x).device == torch.device("cuda:1")
        same(y.cpu(), plain(x))
        y.square().mean().backward()
        torch.testing.assert_close(
            grads_of(model), grads_of(plain), rtol=1e-12, atol=1e-16, check_device=False
        )


@pytest.mark.multi_gpu
@pytest.mark.parametrize("call", ["model", "pipe", "step"])
def test_layers_that_were_moved_are_refused_until_they_are_back(call: str) -> None:
    model, x = a_model(), rows()
    expected = copy.deepcopy(model)(x)
    with a_pipe(model, devices=GPUS) as pipe:
        calls: dict[str, Any] = {
            "model": lambda: model(x),
            "pipe": lambda: pipe(x),
            "step": lambda: pipe.forward_backward(x, loss_fn=lambda y, _: y.sum()),
        }
        model.to("cuda:0")
        with pytest.raises(RuntimeError, match="has been moved from cuda:1 to cuda:0"):
            calls[call]()
        assert all(p.grad is None for p in model.parameters())
        model.encoder.blocks[1].to("cuda:1")
        model.head.to("cuda:1")
        same(model(x).cpu(), expected)
