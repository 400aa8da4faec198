"""Tests that calls of a model go through its pipe, whoever makes them, until it is closed."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import PipeClosedError
from pipert.any_model.routed import pipe_of
from tests.any_model.in_place import Model, a_model, a_pipe, rows, runs
from tests.helpers.activations import until
from tests.helpers.collection import settle
from tests.helpers.ways import grads_of


@pytest.mark.parametrize("grad", [True, False])
def test_calls_of_the_model_go_through_the_pipe(grad: bool) -> None:
    model, x = a_model(), rows()
    with torch.set_grad_enabled(grad):
        expected = copy.deepcopy(model)(x, 2.0)
        with a_pipe(model) as pipe:
            calls: list[Callable[[], Tensor]] = [
                lambda: model(x, 2.0), lambda: model(x=x, scale=2.0), lambda: model(x, scale=2.0)
            ]  # fmt: skip
            for call in calls:
                y = call()
                torch.testing.assert_close(y, expected, rtol=1e-12, atol=0)
                assert y.requires_grad == grad and runs(pipe) == 1


class Answers(Model):
    """A model that returns a dictionary, which it keeps."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.answer = {"y": super().forward(*args, **kwargs)}
        return self.answer


def test_one_micro_batch_returns_what_the_model_returns() -> None:
    model = Answers()
    with a_pipe(model, chunks=1), torch.no_grad():
        assert model(rows()) is model.answer


def test_threads_may_call_it_at_once() -> None:
    model, xs = a_model(), [rows(k + 1) for k in range(8)]
    expected = [copy.deepcopy(model)(x) for x in xs]
    found: dict[int, Tensor] = {}

    def call(k: int) -> None:
        for _ in range(5):
            found[k] = model(xs[k])

    with a_pipe(model) as pipe:
        threads = [threading.Thread(target=call, args=(k,)) for k in range(len(xs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert runs(pipe) == 5 * len(xs)
    for k, y in enumerate(expected):
        torch.testing.assert_close(found[k], y, rtol=1e-12, atol=0)


def test_forward_called_directly_goes_through_the_pipe() -> None:
    model, x = a_model(), rows()
    expected = copy.deepcopy(model)(x, 3.0)
    with a_pipe(model) as pipe:
        torch.testing.assert_close(model.forward(x, 3.0), expected, rtol=1e-12, atol=0)
        assert runs(pipe) == 1


def test_parts_that_are_called_by_themselves_run_plainly() -> None:
    model, x = a_model(), rows()
    plain = copy.deepcopy(model)
    with a_pipe(model) as pipe:
        for call in (model.encoder, model.encoder.forward):
            assert torch.equal(call(x), plain.encoder(x))
        assert torch.equal(model.head(x), plain.head(x)) and runs(pipe) == 0


def test_the_same_arguments_are_found_by_inspection() -> None:
    model = a_model()
    expected = inspect.signature(model.forward)
    with a_pipe(model):
        assert inspect.signature(model.forward) == expected


@pytest.mark.usefixtures("forget_compiled")
def test_a_compiled_model_goes_through_the_pipe() -> None:
    model, x = a_model(), rows()
    expected = copy.deepcopy(model)(x)
    with a_pipe(model) as pipe:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-12, atol=0)
            assert runs(pipe) == 1


class Residual(Model):
    """Adds a tensor of the first partition in the last, in its own code."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before: Tensor = self.encoder.blocks[0](x)
        return before.sum(1, True) + super().forward(x)


WAYS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "call": lambda model, _, x: model(x),
    "pipe": lambda _, pipe, x: pipe(x),
    "step": lambda _, pipe, x: pipe.forward_backward(
        x, loss_fn=lambda y, _: y.square().sum(), reduction="sum"
    ),
    "step that calls it": lambda model, pipe, x: pipe.forward_backward(
        microbatches=x.chunk(2), step=lambda x: model(x).square().sum(), reduction="sum"
    ),
}


@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_is_compiled_later_gives_the_plain_gradients(way: str, in_place: bool) -> None:
    torch.manual_seed(1)
    model, x = Residual(), rows()
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    with a_pipe(model) as pipe:
        called: Any = model if in_place else torch.compile(model, backend="eager")
        if in_place:
            model.compile(backend="eager")
        y = WAYS[way](called, pipe, x)
        if y.requires_grad:
            y.square().sum().backward()  # type: ignore[no-untyped-call]
        assert runs(pipe) == 1 and pipe_of(model) is pipe
    torch.testing.assert_close(grads_of(model), grads_of(plain), rtol=1e-12, atol=0)
    left = [value for module in model.modules() for value in vars(module).values()]
    assert not [value for value in left if type(value).__module__.startswith("pipert.")]


def test_a_module_around_a_cut_that_is_compiled_later_is_refused() -> None:
    model = a_model()
    with a_pipe(model) as pipe:
        model.encoder.compile(backend="eager")
        with pytest.raises(RuntimeError, match=r"\['Encoder'\] were replaced or compiled after"):
            pipe(rows())


def test_hooks_of_the_model_are_called_for_each_micro_batch() -> None:
    model, x, seen = a_model(), rows(), list[int]()
    model.register_forward_hook(lambda _, args, y: seen.append(len(args[0])) or y + 1)
    expected = model(x)
    seen.clear()
    with a_pipe(model, chunks=3):
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
    assert seen == [2, 2, 2]


def test_a_forward_replaced_later_still_goes_through_the_pipe() -> None:
    """Libraries wrap the model's ``forward``, some to be undone and some for good."""
    model, x = a_model(), rows()
    expected = copy.deepcopy(model)(x) * 2
    with a_pipe(model) as pipe:
        inner = model.forward
        model.forward = lambda *args: inner(*args) * 2  # type: ignore[method-assign]
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
        assert runs(pipe) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
    assert runs(pipe) == 0


@pytest.mark.parametrize("how", ["class", "another class", "class, wrapped by accelerate"])
@pytest.mark.parametrize("schedule", ["", "1f1b"])
def test_a_forward_that_the_class_gets_later_is_what_the_pipe_runs(
    how: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Liger and unsloth do, to the class of a model that exists."""

    class Doubled(Model):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            y: Tensor = plain(self, x, *args, **kwargs) * 2
            return y

    plain, x = Model.forward, rows()
    model: Any = a_model()
    expected = copy.deepcopy(model)(x) * 2
    with a_pipe(model) as pipe:
        if how.endswith("accelerate"):  # which binds the function of what it finds
            model.forward = types.MethodType(model.forward.__func__, model)
        if how == "another class":
            model.__class__ = Doubled
        else:
            monkeypatch.setattr(Model, "forward", Doubled.forward)
        if schedule:
            loss = pipe.forward_backward(x, loss_fn=lambda y, _: y.mean(), schedule=schedule)
            torch.testing.assert_close(loss, expected.mean())
        else:
            for call in (model, model.forward, pipe):
                torch.testing.assert_close(call(x), expected, rtol=1e-12, atol=0)
            assert runs(pipe) == 3
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)


def test_a_copy_of_a_model_whose_forward_is_wrapped_and_bound_computes_by_itself() -> None:
    """As accelerate wraps it: its function, which is then bound to the model."""
    x = rows()
    model: Any = a_model()
    with a_pipe(model) as pipe:
        inner = model.forward.__func__
        model.forward = types.MethodType(lambda self, *args: inner(self, *args) * 2, model)
        copied, expected = copy.deepcopy(model), model(x)
        assert runs(pipe) == 1
        torch.testing.assert_close(copied(x), expected, rtol=1e-12, atol=0)
        with torch.no_grad():
            for weight in copied.parameters():
                weight.zero_()
        assert not copied(x).any() and runs(pipe) == 0
        model.forward = types.MethodType(inner, model)
        loaded = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(loaded(x) * 2, expected, rtol=1e-12, atol=0)
        assert runs(pipe) == 0


def test_a_forward_of_the_model_s_own_before_is_there_again_after() -> None:
    x = rows()
    model: Any = a_model()
    plain = model.forward
    own = model.forward = lambda x: plain(x) * 3
    expected = model(x)
    with a_pipe(model) as pipe:
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
        assert runs(pipe) == 1
        assert torch.equal(copy.copy(model)(x), expected)
    assert model.forward is own


def test_closing_restores_everything() -> None:
    model, x = a_model(), rows()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    expected = model(x)
    pipe = a_pipe(model)
    model(x)
    runs(pipe)
    pipe.close()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(x), expected) and runs(pipe) == 0
    with pytest.raises(PipeClosedError):
        pipe(x)


@pytest.mark.parametrize("first_closed", [0, 1])
def test_of_the_pipes_of_a_model_and_one_around_it_each_gets_its_calls(first_closed: int) -> None:
    model, x = a_model(), rows()
    whole = nn.Sequential(model)
    expected = copy.deepcopy(model)(x)
    pipes = [a_pipe(model), a_pipe(whole, "0.")]
    for pipe in pipes:
        torch.testing.assert_close(pipe(x), expected, rtol=1e-12, atol=0)
    assert list(map(runs, pipes)) == [1, 1]
    assert [pipe_of(model), pipe_of(whole)] == pipes
    for pipe in (pipes[first_closed], pipes[1 - first_closed]):
        for call in (model, whole):
            torch.testing.assert_close(call(x), expected, rtol=1e-12, atol=0)
        pipe.close()
    assert pipe_of(whole) is None and "forward" not in vars(model)


def threads_of_pipes() -> int:
    return sum(thread.name.startswith("pipert") for thread in threading.enumerate())


def test_a_new_pipe_of_a_model_closes_the_old_one() -> None:
    """As when a cell of a notebook is run again."""
    model, x = a_model(), rows()
    expected, before = copy.deepcopy(model)(x), threads_of_pipes()
    old, seen = a_pipe(model), list[Any]()
    for _ in range(4):
        old(x)
        pipe = a_pipe(model)
        with pytest.raises(PipeClosedError):
            old(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
        assert runs(pipe) == 1 and pipe_of(model) is pipe
        assert threads_of_pipes() <= before + 6  # three workers, the clock, one or two for forwards
        seen.append(weakref.ref(old))
        old = pipe
    del pipe
    settle()
    gc.collect()
    assert [each() for each in seen] == [None] * 4
    old.close()
    assert "forward" not in vars(model) and threads_of_pipes() == before
    assert torch.equal(model(x), expected)


def test_a_call_of_a_pipe_whose_model_gets_a_new_one_is_cancelled() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Waits(Model):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not go_on.is_set():
                entered.set()
                assert go_on.wait(20)
            return super().forward(x, *args, **kwargs)

    model, x = Waits(), rows()
    old = a_pipe(model)
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(old, x)
        assert entered.wait(20)
        made = threads.submit(a_pipe, model)
        until(lambda: old._runtime.pool.closed)
        go_on.set()
        with pytest.raises(PipeClosedError):
            call.result(20)
        with made.result(20) as pipe:
            assert torch.equal(model(x), pipe(x))
