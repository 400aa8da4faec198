"""Tests that a decorated class keeps its names, attributes, subclasses and constructor."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash
from tests.helpers.skip_layers import PopAdd, declaring

Forward = Generator[Any, Any, Any]


def define() -> type[Any]:
    class Layer(nn.Module):
        """A layer that stashes its input."""

        limit = 5

        def __init__(self, factor: float = 1.0, *, width: int = 1) -> None:
            """Make one."""
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([factor]))
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Forward:
            """Multiply."""
            yield stash("a", x)
            return x * self.weight

        def describe(self) -> str:
            return f"times {self.weight.item()}"

    return Layer


Undecorated, Stash = define(), skippable(stash=["a"])(define())


def one() -> Tensor:
    return torch.ones(1)


def skipped(layer: nn.Module) -> float:
    """Returns the sum of a layer's output for one and the value it stashes."""
    return float(nn.Sequential(layer, PopAdd())(one()).item())


# Names and attributes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__name__", "__qualname__", "__module__", "__doc__", "limit"])
def test_a_decorated_class_has_the_attributes_of_the_class(name: str) -> None:
    assert getattr(Stash, name) == getattr(Undecorated, name)


@pytest.mark.parametrize("kind", [Stash, Skippable, nn.Module])
def test_a_layer_is_an_instance_of(kind: type[Any]) -> None:
    assert isinstance(Stash(), kind) and issubclass(Stash, kind)


def test_the_class_itself_is_decorated() -> None:
    kind = define()
    assert skippable(stash=["a"])(kind) is kind and skipped(kind()) == 2


def test_a_class_of_several_bases_keeps_their_order() -> None:
    class First:
        name = "first"

    class Second(nn.Module):
        name = "second"

    @skippable()
    class Layer(First, Second):
        pass

    assert Layer.name == "first" and Layer.__mro__[-4:-2] == (First, Second)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_and_documentation_of_what_is_wrapped_are_kept(method: str) -> None:
    ours, own = getattr(Stash, method), getattr(Undecorated, method)
    assert (inspect.signature(ours), ours.__doc__) == (inspect.signature(own), own.__doc__)


def test_the_keys_of_the_state_are_those_of_the_class() -> None:
    assert Stash().state_dict().keys() == Undecorated().state_dict().keys()


def test_a_metaclass_is_kept() -> None:
    class Abstract(nn.Module, abc.ABC):
        @abc.abstractmethod
        def size(self) -> int: ...

    kind: Any = skippable(stash=["a"])(Abstract)
    with pytest.raises(TypeError, match="abstract"):
        kind()


# Decorating in several ways -----------------------------------------------------------------------


def test_a_decorated_class_may_derive_from_skippable() -> None:
    @skippable(stash=["a"])
    class Typed(Skippable):
        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            return x

    layer = Typed().isolate(Namespace())
    with pytest.raises(RuntimeError, match="no skip 'a' to pop"):
        skipped(layer)
    assert skipped(layer.isolate(None)) == 2


class StashAndPop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        yield stash("c", x)
        b = yield pop("b")
        return x + b


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"stash": ["a", "c"]}, {"pop": ["b"]}),
        ({"pop": ["b"]}, {"stash": ["a", "c"]}),
        ({"stash": ["a"]}, {"stash": ["c"], "pop": ["b"]}),
    ],
)
def test_decorating_twice_declares_both(
    first: dict[str, list[str]], second: dict[str, list[str]]
) -> None:
    layer: Any = skippable(**second)(declaring(StashAndPop, **first))()
    assert (dict(layer.skip_stashes), set(layer.skip_pops)) == ({"a": 1, "c": 1}, {"b"})


# Subclasses ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("generator", [True, False])
def test_a_subclass_that_forgets_to_stash_is_told_so(generator: bool) -> None:
    class Forgets(Stash):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor) -> Any:
            return (x for _ in ()) if generator else x

    with pytest.raises(RuntimeError, match="Forgets must have stashed 'a' when its forward ret"):
        Forgets()(one())


def test_a_subclass_that_does_what_its_base_has_done_is_told_so() -> None:
    class Again(Stash):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            return super().forward(x)

    with pytest.raises(RuntimeError, match="Again can stash 'a' only once in a forward"):
        Again()(one())


def test_a_layer_may_run_another_of_its_class() -> None:
    """The outer one is not affected by what the inner one stashes."""

    @skippable(stash=["a"])
    class Outer(Skippable):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            return self.inner(x)

    inner = nn.Sequential(Outer(nn.Identity()).isolate(Namespace()), nn.Identity())
    assert skipped(Outer(inner)) == 2


# The constructor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [nn.Module, Skippable])
def test_a_class_may_name_itself_in_super(base: type[nn.Module]) -> None:
    @skippable(stash=["a"])
    class Old(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super(Old, self).__init__()

        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            return x

    assert skipped(Old()) == 2
