"""Tests a skippable layer: what it yields, the errors for mistakes, its class, and plain models."""

from __future__ import annotations

import inspect
import math
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Skippable, pop, skippable, stash
from pipert.skip.store import current_store
from tests.helpers.skip_layers import Forward, PopAdd, declaring
from tests.layers import Apply


def define() -> type[Any]:
    class Layer(nn.Module):
        """A layer that stashes its input."""

        def __init__(self, factor: float = 1.0, *, width: int = 1) -> None:
            """Make one."""
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([factor]))
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Forward:
            """Multiply."""
            yield stash("a", x)
            return x * self.weight

    return Layer


Undecorated, Stash = define(), skippable(stash=["a"])(define())


def layer_of(
    forward: Callable[..., Any],
    stash: Iterable[str] = (),
    pop: Iterable[str] = (),
) -> nn.Module:
    """Makes a skippable layer with this ``forward(self, x)``."""
    kind: type[nn.Module] = type("Layer", (nn.Module,), {"forward": forward})
    return skippable(stash=stash, pop=pop)(kind)()


def one() -> Tensor:
    return torch.ones(1)


def skipped(layer: nn.Module) -> float:
    """Returns the sum of a layer's output for one and the value it stashes."""
    return float(nn.Sequential(layer, PopAdd())(one()).item())


# What it does -------------------------------------------------------------------------------------


def test_the_value_that_is_popped_is_the_one_that_was_stashed() -> None:
    popped = []

    def look(_: nn.Module, x: Tensor) -> Forward:
        popped.append((yield pop("a")))
        return x

    x = one()
    nn.Sequential(Stash(), layer_of(look, pop=["a"]))(x)
    assert popped[0] is x


def test_a_plain_model_leaves_nothing_behind(no_gc: None) -> None:
    x = one()
    gone = weakref.ref(x)
    nn.Sequential(Stash(), PopAdd())(x)
    del x
    assert gone() is None and current_store().skips() == {}


def test_a_value_left_by_a_failed_forward_is_replaced_by_the_next(no_gc: None) -> None:
    def fail(_: Tensor) -> Tensor:
        raise ValueError("the layer in between")

    x = one()
    gone = weakref.ref(x)
    with pytest.raises(ValueError):
        nn.Sequential(Stash(), Apply(fail))(x)
    del x
    assert nn.Sequential(Stash(), PopAdd())(torch.tensor([2.0])).item() == 4
    assert gone() is None


def test_a_skip_modified_in_place_is_refused_in_a_plain_model() -> None:
    model = nn.Sequential(nn.Identity(), Stash(), PopAdd())
    model[1].register_forward_hook(lambda layer, args, output: args[0].add_(1) * 0 + output)
    with pytest.raises(RuntimeError, match="the skip 'a' was modified in place after it was stas"):
        model(one())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.Sequential(PopAdd()))),
        nn.Sequential(Apply(Stash()), Apply(PopAdd())),
    ],
    ids=["in Sequentials", "in modules"],
)
def test_nested_layers_find_each_other(model: nn.Module) -> None:
    assert model(one()).item() == 2


def test_each_thread_has_skips_of_its_own() -> None:
    Stash()(one())
    caught: list[Exception] = []

    def run() -> None:
        try:
            PopAdd()(one())
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(3.0)
    assert "no skip 'a'" in str(caught[0])


@pytest.mark.slow  # torch.utils.checkpoint imports a lot
def test_a_plain_model_may_be_checkpointed_by_torch_as_a_whole() -> None:
    x = torch.ones(1, requires_grad=True)
    model = nn.Sequential(Stash(), Apply(torch.exp), PopAdd())
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(1 + math.exp(1))


# What it is told ----------------------------------------------------------------------------------


def undeclared_stash(_: nn.Module, x: Tensor) -> Forward:
    yield stash("b", x)  # wrong
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


@pytest.mark.parametrize(
    ("forward", "declared", "kind", "message"),
    [
        (undeclared_stash, {}, RuntimeError, r"'b' has not been declared.*stash=\['b', ...\]"),
        (undeclared_stash, {"pop": ["b"]}, RuntimeError, "'b' has not been declared.*stash="),
        (pop_twice, {"pop": ["a"]}, RuntimeError, "there is no skip 'a' to pop"),
        (pop_what_is_not_there, {"pop": ["never stashed"]}, RuntimeError, "no skip 'never stashe"),
        (yield_a_tensor, {}, TypeError, r"Layer must yield stash.* got float32\[1\]"),
    ],
)
def test_a_layer_that_yields_wrongly_is_told_where_and_what_is_wrong(
    forward: Callable[..., Any], declared: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        nn.Sequential(Stash(), layer_of(forward, **declared))(one())
    frames = traceback.extract_tb(caught.value.__traceback__)
    (line,) = [frame.line for frame in frames if frame.name == forward.__name__]
    assert line is not None and line.endswith("# wrong")


def test_a_stash_without_yield_is_told_where_it_is_popped() -> None:
    def forward(_: nn.Module, x: Tensor) -> Tensor:
        stash("a", x)
        return x

    with pytest.raises(RuntimeError, match="no layer has stashed it before, by yield stash"):
        skipped(layer_of(forward, stash=["a"]))


def test_an_error_of_the_layer_itself_is_raised_unchanged() -> None:
    error = ValueError()

    def forward(_: nn.Module, x: Tensor) -> Forward:
        yield stash("a", x)
        raise error

    with pytest.raises(ValueError) as caught:
        layer_of(forward, stash=["a"])(one())
    assert caught.value is error


def decorated(kind: Any) -> Any:
    return skippable()(kind)


@pytest.mark.parametrize(
    ("decorate", "error", "message"),
    [
        (lambda: skippable(stash="abc"), TypeError, r"^stash .*write \['abc'\]"),
        (lambda: decorated(nn.Linear(1, 1)), TypeError, "skippable decorates subclasses of nn.Mo"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(
    decorate: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        decorate()


# Its class ----------------------------------------------------------------------------------------


def test_the_class_itself_is_decorated_and_keeps_what_it_has() -> None:
    kind = define()
    assert skippable(stash=["a"])(kind) is kind and issubclass(kind, Skippable)
    for ours, own in ((kind, Undecorated), (kind.forward, Undecorated.forward)):
        assert (ours.__qualname__, ours.__doc__) == (own.__qualname__, own.__doc__)
        assert inspect.signature(ours) == inspect.signature(own)
    assert kind().state_dict().keys() == Undecorated().state_dict().keys()


def test_a_class_of_several_bases_keeps_their_order() -> None:
    class First:
        name = "first"

    class Second(nn.Module):
        name = "second"

    @skippable()
    class Layer(First, Second):
        pass

    assert Layer.name == "first" and Layer.__mro__[-4:-2] == (First, Second)


class StashAndPop(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        yield stash("c", x)
        b = yield pop("b")
        return x + b


@pytest.mark.parametrize(
    ("first", "second"),
    [({"pop": ["b"]}, {"stash": ["a", "c"]}), ({"stash": ["a"]}, {"stash": ["c"], "pop": ["b"]})],
)
def test_decorating_twice_declares_both(
    first: dict[str, list[str]], second: dict[str, list[str]]
) -> None:
    layer: Any = skippable(**second)(declaring(StashAndPop, **first))()
    assert (layer.skip_stashes, layer.skip_pops) == ({"a", "c"}, {"b"})


class Doubling(Stash):  # type: ignore[misc,valid-type]
    """Overrides forward, with a generator."""

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x * 2)
        return x


class Calling(Stash):  # type: ignore[misc,valid-type]
    """Overrides forward with a function that calls that of the base."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 10


class Extended(Stash):  # type: ignore[misc,valid-type]
    """Does not override forward."""

    def __init__(self) -> None:
        super().__init__(4.0)
        self.more = nn.Linear(1, 1)


@pytest.mark.parametrize(("kind", "expected"), [(Doubling, 3), (Calling, 11), (Extended, 5)])
def test_a_subclass_of_a_decorated_class_works(kind: type[nn.Module], expected: float) -> None:
    assert skipped(kind()) == expected
