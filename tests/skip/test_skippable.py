"""Tests a skippable layer: what it yields, the errors for mistakes, and its class."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import pop, skippable, stash
from tests.helpers.skip_layers import PopAdd

Forward = Generator[Any, Any, Any]


@skippable(stash=["a"])
class Stash(nn.Module):
    """A layer that stashes its input."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([factor]))
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        return x * self.weight

    def describe(self) -> str:
        return f"times {self.weight.item()}"


def layer_of(
    forward: Callable[..., Any],
    stash: Iterable[str] | Mapping[str, int] = (),
    pop: Iterable[str] = (),
) -> nn.Module:
    """Makes a skippable layer with this ``forward(self, x)``."""
    kind: type[nn.Module] = type("Layer", (nn.Module,), {"forward": forward})
    return skippable(stash=stash, pop=pop)(kind)()


def one() -> Tensor:
    return torch.ones(1)


# What it does -------------------------------------------------------------------------------------


def test_a_layer_pops_a_value_stashed_by_another() -> None:
    assert nn.Sequential(Stash(factor=2.0), PopAdd())(one()).item() == 3


def test_the_value_that_is_popped_is_the_one_that_was_stashed() -> None:
    popped = []

    def look(_: nn.Module, x: Tensor) -> Forward:
        popped.append((yield pop("a")))
        return x

    x = one()
    nn.Sequential(Stash(), layer_of(look, pop=["a"]))(x)
    assert popped[0] is x


def test_a_helper_may_yield_for_the_forward() -> None:
    def helper(x: Tensor) -> Forward:
        yield stash("a", x)
        return x * 2

    def forward(_: nn.Module, x: Tensor) -> Forward:
        return (yield from helper(x))

    assert nn.Sequential(layer_of(forward, stash=["a"]), PopAdd())(one()).item() == 3


# What it is told ----------------------------------------------------------------------------------


def undeclared_stash(_: nn.Module, x: Tensor) -> Forward:
    yield stash("b", x)  # wrong
    return x


def undeclared_pop(_: nn.Module, x: Tensor) -> Forward:
    yield pop("b")  # wrong
    return x


def stash_twice(_: nn.Module, x: Tensor) -> Forward:
    yield stash("a", x)
    yield stash("a", x)  # wrong
    return x


def pop_twice(_: nn.Module, x: Tensor) -> Forward:
    yield pop("a")
    yield pop("a")  # wrong
    return x


def pop_what_is_not_there(_: nn.Module, x: Tensor) -> Forward:
    yield pop("never stashed")  # wrong
    return x


def yield_a_tensor(_: nn.Module, x: Tensor) -> Forward:
    yield x  # wrong
    return x


def yield_the_class(_: nn.Module, x: Tensor) -> Forward:
    yield stash  # wrong
    return x


def yield_nothing(_: nn.Module, x: Tensor) -> Forward:
    yield  # wrong
    return x


WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (undeclared_stash, {}, RuntimeError, r"'b' has not been declared.*stash=\['b', ...\]"),
    (undeclared_stash, {"pop": ["b"]}, RuntimeError, "'b' has not been declared.*stash="),
    (undeclared_pop, {}, RuntimeError, r"'b' has not been declared.*pop=\['b', ...\]"),
    (undeclared_pop, {"stash": ["b"]}, RuntimeError, "'b' has not been declared.*pop="),
    (stash_twice, {"stash": ["a"]}, RuntimeError, "Layer can stash 'a' only once"),
    (pop_twice, {"pop": ["a"]}, RuntimeError, "Layer can pop 'a' only once"),
    (
        pop_what_is_not_there,
        {"pop": ["never stashed"]},
        RuntimeError,
        "no skip 'never stashed' to pop: no layer has stashed it before",
    ),
    (yield_a_tensor, {}, TypeError, r"Layer must yield stash.* got float32\[1\]"),
    (yield_the_class, {}, TypeError, "Layer must yield stash.* got <class 'pipert.skip"),
    (yield_nothing, {}, TypeError, "Layer must yield stash.* got None"),
]
wrong = pytest.mark.parametrize(
    ("forward", "declared", "kind", "message"),
    WRONG,
    ids=[f"{forward.__name__}-{sorted(declared)}" for forward, declared, _, _ in WRONG],
)


def fail(forward: Callable[..., Any], declared: dict[str, Any]) -> Exception:
    """Returns the error of a layer that follows one that stashes ``a`` for it."""
    model = nn.Sequential(Stash(), layer_of(forward, **declared))
    with pytest.raises(Exception) as caught:
        model(one())
    return caught.value


@wrong
def test_a_layer_that_yields_wrongly_is_told_what_is_wrong(
    forward: Callable[..., Any], declared: dict[str, Any], kind: type[Exception], message: str
) -> None:
    error = fail(forward, declared)
    with pytest.raises(kind, match=message):
        raise error


@wrong
def test_the_traceback_shows_the_yield_that_is_wrong(
    forward: Callable[..., Any], declared: dict[str, Any], kind: type[Exception], message: str
) -> None:
    frames = traceback.extract_tb(fail(forward, declared).__traceback__)
    (line,) = [frame.line for frame in frames if frame.name == forward.__name__]
    assert line is not None and line.endswith("# wrong")


def forget(layer: Any, x: Tensor) -> Forward:
    """A forward that does not stash or pop ``b``."""
    if "a" in layer.skip_stashes:
        yield stash("a", x)
    return x


@pytest.mark.parametrize("forward", [forget, lambda _, x: x], ids=["generator", "function"])
@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"stash": ["a", "b"]}, "stashed ('a', )?'b'"),
        ({"pop": ["b"]}, "popped 'b'"),
    ],
)
def test_a_layer_that_does_not_do_what_it_declared_gets_an_error(
    forward: Callable[..., Any], declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"Layer must have {message} when its forward"):
        layer_of(forward, **declared)(one())


def test_an_error_of_the_layer_itself_is_raised_unchanged() -> None:
    error = ValueError()

    def forward(_: nn.Module, x: Tensor) -> Forward:
        yield stash("a", x)
        raise error

    with pytest.raises(ValueError) as caught:
        layer_of(forward, stash=["a"])(one())
    assert caught.value is error


# What is decorated --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["a"], ("a",), {"a"}, iter(["a"]), {"a": 1}], ids=type)
def test_names_may_come_in_any_collection(names: Any) -> None:
    assert nn.Sequential(layer_of(forget, stash=names), PopAdd())(one()).item() == 2


@pytest.mark.parametrize("key", ["stash", "pop"])
def test_names_in_a_string_are_refused(key: str) -> None:
    with pytest.raises(TypeError, match=rf"^{key} .*write \['abc'\]"):
        skippable(**{key: "abc"})


@pytest.mark.parametrize("layers", [0, -1, True, 1.5, "2", None])
def test_a_number_of_layers_that_is_no_positive_number_is_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match="positive number of layers that pop 'a'"):
        skippable(stash={"a": layers})


@pytest.mark.parametrize("kind", [int, nn.Linear(1, 1), lambda x: x], ids=["class", "obj", "fn"])
def test_a_class_that_is_no_module_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="skippable decorates subclasses of nn.Module"):
        skippable()(kind)


def test_a_class_with_an_attribute_that_skippable_adds_is_refused() -> None:
    with pytest.raises(TypeError, match="has an attribute 'isolate', which skippable adds"):
        skippable()(type("Layer", (nn.Module,), {"isolate": lambda self: self}))


def test_each_thread_has_skips_of_its_own() -> None:
    """All stash before any pops; with one store for all, the last stash would win."""
    stashed, outputs = threading.Barrier(4, timeout=3.0), {}

    def meet(_: nn.Module, x: Tensor) -> Tensor:
        stashed.wait()
        return x

    model = nn.Sequential(Stash(), layer_of(meet), PopAdd())

    def run(k: int) -> None:
        outputs[k] = model(torch.tensor([float(k)])).item()

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3.0)
    assert outputs == {k: 2.0 * k for k in range(4)}
