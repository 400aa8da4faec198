"""Tests where stashed values are kept, taken, sent and dropped, in a pipe and in plain models."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, pop, skippable, stash
from pipert.skip.namespace import Key
from pipert.skip.store import ABSENT, Store, current_store
from tests.layers import Apply
from tests.skips import PopAdd

Forward = Generator[Any, Any, Any]

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault

A: Key = (None, "a")
B: Key = (None, "b")
CHANGED = "the skip 'a' was modified in place after it was stashed"


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x)
        return x + 1


def fail(_: Tensor) -> Tensor:
    raise ValueError("the layer in between")


# The store ----------------------------------------------------------------------------------------


def test_a_value_is_taken_once() -> None:
    store = Store()
    store.put(A, "value", 1)
    assert store.take(A) == "value"
    with pytest.raises(RuntimeError, match="there is no skip 'a' to pop"):
        store.take(A)


def test_a_value_for_two_is_taken_twice() -> None:
    store = Store()
    store.put(A, "value", 2)
    assert [store.take(A), store.take(A)] == ["value", "value"]
    with pytest.raises(RuntimeError, match="or all layers that it was for have popped it"):
        store.take(A)


def test_a_value_that_was_never_put_is_missing() -> None:
    with pytest.raises(RuntimeError, match="no layer has stashed it before"):
        Store().take(A)


def test_names_and_namespaces_are_kept_apart() -> None:
    store, isolated = Store(), (Namespace(), "a")
    for number, key in enumerate([A, B, isolated]):
        store.put(key, number, 1)
    assert [store.take(isolated), store.take(B), store.take(A)] == [2, 1, 0]


def test_the_later_of_two_values_is_the_one() -> None:
    store = Store()
    store.put(A, "first", 2)
    store.put(A, "second", 1)
    assert store.take(A) == "second"


def test_none_may_be_stashed() -> None:
    store = Store()
    store.put(A, None, 1)
    assert store.take(A) is None


def test_how_many_pop_may_be_told_by_the_store() -> None:
    store = Store({A: 1})
    store.put(A, "value", 3)
    store.take(A)
    with pytest.raises(RuntimeError, match="no skip"):
        store.take(A)


def test_a_value_that_no_layer_pops_from_a_store_is_not_kept() -> None:
    store = Store({A: 0})
    store.put(A, "value", 3)
    assert store.send(A) is ABSENT


def test_a_value_for_other_partitions_is_kept() -> None:
    store = Store({A: 0}, [A])
    store.put(A, "value", 1)
    assert store.send(A) == "value"


def test_a_value_for_other_partitions_is_kept_after_a_pop_here() -> None:
    store = Store({A: 1}, [A])
    store.put(A, "value", 2)
    assert [store.take(A), store.send(A)] == ["value", "value"]
    with pytest.raises(RuntimeError, match="no skip"):
        store.take(A)


def test_a_value_for_several_partitions_is_sent_to_each() -> None:
    store = Store({A: 0}, [A, A])
    store.put(A, "value", 2)
    assert [store.send(A), store.send(A), store.send(A)] == ["value", "value", ABSENT]


def test_each_partition_is_sent_its_own_copy_in_inference_mode() -> None:
    store = Store({A: 1}, [A, A])
    with torch.inference_mode():
        store.put(A, torch.ones(2), 3)
        values = [store.take(A), store.send(A), store.send(A)]
    assert len({value.data_ptr() for value in values}) == 3


def test_a_received_value_is_taken() -> None:
    store = Store({A: 1})
    store.receive(A, "value")
    assert store.take(A) == "value"


def test_a_received_value_is_taken_as_often_as_it_is_popped() -> None:
    store = Store({A: 2})
    store.receive(A, "value")
    assert (store.take(A), store.take(A)) == ("value", "value")
    with pytest.raises(RuntimeError, match="no skip 'a' to pop"):
        store.take(A)


def test_a_value_received_as_absent_is_missing() -> None:
    store = Store({A: 1})
    store.receive(A, ABSENT)
    with pytest.raises(RuntimeError, match="no skip 'a' to pop"):
        store.take(A)


def test_a_cleared_store_has_nothing() -> None:
    store = Store({A: 0}, [A])
    store.put(A, "value", 1)
    store.clear()
    assert store.send(A) is ABSENT


def test_the_repr_lists_the_values() -> None:
    store = Store()
    assert repr(store) == "<Store of nothing>"
    store.put(A, 1, 1)
    store.put(B, 1, 1)
    assert repr(store) == "<Store of 'a', 'b'>"


# Modified in place --------------------------------------------------------------------------------

VALUES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[:1],
    "detached": lambda x: x.detach(),
    "in a list": lambda x: [7, {"x": x}],
}
values = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


@values
@pytest.mark.parametrize("read", [Store.take, Store.send])
def test_a_tensor_that_was_modified_in_place_is_refused(
    value: Callable[[Tensor], Any], read: Callable[[Store, Key], Any]
) -> None:
    store, x = Store({A: 0}, [A]) if read is Store.send else Store(), torch.ones(2)
    store.put(A, value(x), 1)
    x.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        read(store, A)


def test_a_tensor_that_the_first_who_popped_it_modified_is_refused_to_the_second() -> None:
    store = Store()
    store.put(A, torch.ones(2), 2)
    store.take(A).add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        store.take(A)


@values
def test_in_inference_mode_a_value_is_stashed_as_it_is_then(
    value: Callable[[Tensor], Any],
) -> None:
    store = Store()
    with torch.inference_mode():
        x = torch.ones(2)
        store.put(A, value(x), 1)
        x.add_(1)
        same(store.take(A), value(torch.ones(2)))


def test_in_inference_mode_too_the_second_to_pop_gets_what_was_stashed() -> None:
    """Or the pop is refused; the first one's changes must not pass for the stashed value."""
    store = Store()
    with torch.inference_mode():
        store.put(A, torch.ones(2), 2)
        store.take(A).add_(1)
        assert torch.equal(store.take(A), torch.ones(2))


def test_a_tensor_of_inference_mode_is_stashed_as_a_copy_outside_of_it_too() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    store = Store()
    store.put(A, x, 1)
    with torch.inference_mode():
        x.add_(1)
    assert torch.equal(store.take(A), torch.ones(2))


def test_outside_of_inference_mode_nothing_is_copied() -> None:
    store, x = Store(), torch.ones(2)
    store.put(A, x, 1)
    assert store.take(A) is x


@pytest.mark.parametrize("change", [lambda v: v.update(x=2), lambda v: v.clear()], ids=["set", "0"])
def test_a_container_that_is_changed_later_is_popped_as_it_was_stashed(
    change: Callable[[dict[str, int]], Any],
) -> None:
    store, value = Store(), {"x": 1}
    store.put(A, value, 1)
    change(value)
    assert store.take(A) == {"x": 1}


def test_each_popping_layer_gets_its_own_container() -> None:
    store = Store()
    store.put(A, {"x": 1}, 2)
    store.take(A).clear()
    assert store.take(A) == {"x": 1}


# In plain models ----------------------------------------------------------------------------------


def test_a_plain_model_leaves_nothing_behind(no_gc: None) -> None:
    model, x = nn.Sequential(Stash(), PopAdd()), torch.ones(1)
    gone = weakref.ref(x)
    model(x)
    del x
    assert gone() is None and repr(current_store()) == "<Store of nothing>"


def test_a_value_left_by_a_failed_forward_is_replaced_by_the_next(no_gc: None) -> None:
    x = torch.ones(1)
    gone = weakref.ref(x)
    with pytest.raises(ValueError):
        nn.Sequential(Stash(), Apply(fail))(x)
    del x
    assert nn.Sequential(Stash(), PopAdd())(torch.tensor([2.0])).item() == 5
    assert gone() is None


def test_a_skip_modified_in_place_is_refused_in_a_plain_model() -> None:
    model = nn.Sequential(nn.Identity(), Stash(), PopAdd())
    model[1].register_forward_hook(lambda layer, args, output: args[0].add_(1) * 0 + output)
    with pytest.raises(RuntimeError, match=CHANGED):
        model(torch.ones(1))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.Sequential(PopAdd()))),
        nn.Sequential(nn.Sequential(Stash(), Apply(torch.neg), Apply(torch.neg), PopAdd())),
        Apply(nn.Sequential(Stash(), PopAdd())),
        nn.Sequential(Apply(Stash()), Apply(PopAdd())),
    ],
    ids=["two Sequentials", "one in another", "in a module", "in modules"],
)
def test_nested_layers_find_each_other(model: nn.Module) -> None:
    assert model(torch.ones(1)).item() == 3


def test_a_model_in_a_layer_between_may_have_a_skip_of_another_name() -> None:
    @skippable(stash=["b"], pop=["a"])
    class Swap(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            a = yield pop("a")
            yield stash("b", a * 10)
            return x

    @skippable(pop=["b"])
    class PopB(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            b = yield pop("b")
            return x + b

    model = nn.Sequential(Stash(), nn.Sequential(Swap(), Apply(torch.neg), PopB()))
    assert model(torch.ones(1)).item() == -2 + 10


def test_a_model_that_stashed_on_one_thread_does_not_pop_on_another() -> None:
    Stash()(torch.ones(1))
    caught: list[Exception] = []

    def run() -> None:
        try:
            PopAdd()(torch.ones(1))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(3.0)
    assert "no skip 'a'" in str(caught[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_plain_model_computes_the_same_in_every_mode(mode: Callable[[], Any]) -> None:
    with mode():
        model = nn.Sequential(Stash(), Apply(torch.Tensor.neg_), PopAdd())
        assert model(torch.ones(1)).item() == -1


def test_a_gradient_goes_through_a_skip_of_a_plain_model() -> None:
    x = torch.ones(1, requires_grad=True)
    nn.Sequential(Stash(), Apply(lambda y: y * 5), PopAdd())(x).backward()
    assert x.grad is not None and x.grad.item() == 6


@pytest.mark.slow  # torch.utils.checkpoint imports a lot
def test_a_plain_model_may_be_checkpointed_by_torch_as_a_whole() -> None:
    x = torch.ones(1, requires_grad=True)
    model = nn.Sequential(Stash(), Apply(torch.exp), PopAdd())
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(1 + math.exp(2))
