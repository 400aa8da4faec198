"""Tests that a decorated class keeps its names, attributes, subclasses and constructor."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable, pop, skippable, stash
from tests.skips import PopAdd, declaring

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


def test_arguments_attributes_and_methods_are_those_of_the_class() -> None:
    layer = Stash(2.0, width=3)
    assert (layer.linear.in_features, layer.describe(), layer.limit) == (3, "times 2.0", 5)


def test_an_attribute_that_is_set_is_the_one_the_methods_read() -> None:
    layer = Stash()
    layer.weight = nn.Parameter(torch.tensor([7.0]))
    assert layer.describe() == "times 7.0"


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_and_documentation_of_what_is_wrapped_are_kept(method: str) -> None:
    ours, own = getattr(Stash, method), getattr(Undecorated, method)
    assert (inspect.signature(ours), ours.__doc__) == (inspect.signature(own), own.__doc__)


def test_the_keys_of_the_state_are_those_of_the_class() -> None:
    assert Stash().state_dict().keys() == Undecorated().state_dict().keys()


def test_a_layer_has_the_modules_of_the_class_and_no_others() -> None:
    assert [name for name, _ in Stash().named_modules()] == ["", "linear"]


def test_a_state_of_the_undecorated_class_is_loaded() -> None:
    layer = Stash()
    layer.load_state_dict(Undecorated(3.0).state_dict())
    assert layer.describe() == "times 3.0"


def test_the_repr_is_that_of_the_class() -> None:
    assert repr(Stash()) == repr(Undecorated())


def test_nothing_is_left_behind_in_a_layer_by_its_construction() -> None:
    assert Stash().__dict__.keys() == Undecorated().__dict__.keys()


def test_to_and_half_reach_the_parameters() -> None:
    assert Stash().to(torch.float64).weight.dtype == torch.float64


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


def test_subclasses_of_one_class_may_be_decorated_in_different_ways() -> None:
    class Flexible(Skippable):
        def forward(self, x: Tensor) -> Forward:
            for name in self.skip_stashes:
                yield stash(name, x)
            return x

    kinds = [declaring(Flexible, stash=names) for names in (["a"], ["b", "c"], [])]
    assert [set(kind().skip_stashes) for kind in kinds] == [{"a"}, {"b", "c"}, set()]
    assert not Flexible.skip_stashes


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


def test_decorating_twice_the_later_count_of_a_stash_is_the_one() -> None:
    kind: Any = skippable(stash={"a": 3})(declaring(Undecorated, stash=["a"]))
    assert dict(kind.skip_stashes) == {"a": 3}


def test_a_layer_of_a_class_decorated_twice_does_both() -> None:
    layer = skippable(pop=["b"])(declaring(StashAndPop, stash=["a", "c"]))()
    first = nn.Sequential(StashB(), layer)
    assert skipped(first) == 3


@skippable(stash=["b"])
class StashB(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("b", x)
        return x


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


class CallingInside(Stash):  # type: ignore[misc,valid-type]
    """Overrides forward with a generator that calls that of the base."""

    def forward(self, x: Tensor) -> Forward:
        y = super().forward(x + 1)
        yield from ()
        return y * 10


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Wrapped(Stash):  # type: ignore[misc,valid-type]
    """The generator is hidden behind a decorator."""

    @wrapped
    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x * 2)
        return x


@pytest.mark.parametrize(("kind", "expected"), [(CallingInside, 22), (Wrapped, 3)])
def test_the_forward_of_a_subclass_may_be_any(kind: type[nn.Module], expected: float) -> None:
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


def test_a_class_that_notes_its_subclasses_is_told_of_the_user_s_alone() -> None:
    noted: list[str] = []

    class Noting(nn.Module):
        def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            noted.append(key)

    @skippable(stash=["a"])
    class Layer(Noting, key="layer"):
        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            return x

    class Sub(Layer, key="sub"):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    assert (noted, skipped(Sub())) == (["layer", "sub"], 2)


def test_a_subclass_may_be_decorated_with_what_it_does_in_addition() -> None:
    @skippable(pop=["b"])
    class Both(Stash):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(2.0)

        def forward(self, x: Tensor) -> Forward:
            yield stash("a", x)
            b = yield pop("b")
            return x * self.weight + b

    assert skipped(nn.Sequential(StashB(), Both())) == 4


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


def test_a_layer_may_make_another_of_its_own_class_in_its_constructor() -> None:
    @skippable()
    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Nested(depth - 1) if depth else None

    assert len(list(Nested(3).modules())) == 4
