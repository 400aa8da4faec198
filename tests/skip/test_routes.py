"""From which partition a skip goes to which, and what is between them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import Namespace, Skippable
from pipert.skip.namespace import Key
from pipert.skip.routes import PartitionSkips, routes
from pipert.skip.store import ABSENT
from pipert.stage.links import SkipLinks
from tests.skips import declaring

NO_SKIPS = PartitionSkips((), (), {})


class Layer(Skippable):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        raise NotImplementedError


def s(*names: str, **counts: int) -> Layer:
    """Stashes."""
    return declared({**dict.fromkeys(names, 1), **counts}, [])


def p(*names: str) -> Layer:
    """Pops."""
    return declared({}, names)


def declared(stashes: Mapping[str, int], pops: Iterable[str]) -> Layer:
    return declaring(Layer, stash=stashes, pop=pops)()


def routes_of(*partitions: list[nn.Module]) -> tuple[PartitionSkips, ...]:
    return routes([nn.Sequential(*layers) for layers in partitions])


def key(name: str) -> Key:
    return None, name


A, B = key("a"), key("b")


# Routes -------------------------------------------------------------------------------------------


def test_a_skip_goes_straight_to_the_partition_that_pops_it() -> None:
    first, between, last = routes_of([s("a")], [nn.Tanh()], [p("a")])
    assert first == PartitionSkips((), ((A, 2),), {A: 0})
    assert between == NO_SKIPS
    assert last == PartitionSkips(((A, 0),), (), {A: 1})


def test_a_skip_within_a_partition_goes_nowhere() -> None:
    assert routes_of([s("a"), p("a")], []) == (PartitionSkips((), (), {A: 1}), NO_SKIPS)


def test_partitions_without_skips_have_none() -> None:
    assert routes_of([nn.Tanh()], [nn.Linear(1, 1)], []) == (NO_SKIPS, NO_SKIPS, NO_SKIPS)


def test_skips_that_cross_go_past_each_other() -> None:
    skips = routes_of([s("a")], [s("b")], [p("a")], [p("b")])
    assert [skip.arriving for skip in skips] == [(), (), ((A, 0),), ((B, 1),)]
    assert [skip.leaving for skip in skips] == [((A, 2),), ((B, 3),), (), ()]


def test_a_skip_for_several_goes_to_each_partition_once() -> None:
    skips = routes_of([s(a=4), p("a")], [nn.Tanh()], [p("a"), p("a")], [p("a")])
    assert [skip.leaving for skip in skips] == [((A, 2), (A, 3)), (), (), ()]
    assert [skip.pops for skip in skips] == [{A: 1}, {}, {A: 2}, {A: 1}]


def test_a_partition_may_get_one_skip_and_send_another() -> None:
    _, middle, _ = routes_of([s("a")], [declared({"b": 1}, ["a"])], [p("b")])
    assert middle == PartitionSkips(((A, 0),), ((B, 2),), {A: 1, B: 0})


def test_skips_of_inner_layers_count_for_the_outer_layer() -> None:
    inside = nn.Sequential(nn.Sequential(nn.Tanh(), s("a")))
    first, last = routes_of([inside], [nn.Sequential(p("a"))])
    assert (first.leaving, last.arriving) == (((A, 1),), ((A, 0),))


def test_one_name_in_two_namespaces_are_two_skips() -> None:
    namespace = Namespace()
    _, last = routes_of([s("a").isolate(namespace), s("a")], [p("a"), p("a").isolate(namespace)])
    assert set(last.arriving) == {((namespace, "a"), 0), (A, 0)}


# The store of a task ------------------------------------------------------------------------------


def test_the_store_of_a_task_has_what_arrives() -> None:
    _, last = routes_of([s("a", "b")], [p("b", "a")])
    store = last.store([f"value of {name}" for (_, name), _ in last.arriving])
    assert [store.take(A), store.take(B)] == ["value of a", "value of b"]


def test_the_store_of_a_task_keeps_what_leaves() -> None:
    first, _ = routes_of([s("a")], [p("a")])
    store = first.store([])
    store.put(A, "value", 1)
    assert store.send(A) == "value"


def test_a_skip_that_was_not_stashed_leaves_as_absent() -> None:
    first, _ = routes_of([s("a")], [p("a")])
    assert first.store([]).send(A) is ABSENT


# The links ----------------------------------------------------------------------------------------


def test_a_skip_is_received_by_name_micro_batch_and_partition() -> None:
    links = SkipLinks()
    places = [(A, 0, 1), (A, 0, 2), (A, 1, 1), (B, 0, 1)]
    for place in places:
        links.send(*place, repr(place))
    assert [links.receive(*place) for place in places[::-1]] == [*map(repr, places[::-1])]


def test_a_received_skip_is_no_longer_in_transit() -> None:
    links = SkipLinks()
    links.send(A, 0, 1, "value")
    links.send(A, 0, 2, "value")
    links.receive(A, 0, 1)
    assert repr(links) == "<SkipLinks, 1 skips and 0 gradients>"
    links.receive(A, 0, 2)
    assert repr(links) == "<SkipLinks, 0 skips and 0 gradients>"


def test_a_skip_modified_in_place_in_transit_is_refused() -> None:
    links, x = SkipLinks(), torch.ones(2)
    links.send(A, 0, 1, [x])
    x.add_(1)
    with pytest.raises(RuntimeError, match="'a' was modified in place after it was stashed"):
        links.receive(A, 0, 1)


def test_a_skip_that_was_not_stashed_arrives_as_absent() -> None:
    links = SkipLinks()
    links.send(A, 0, 1, ABSENT)
    assert links.receive(A, 0, 1) is ABSENT


def test_gradients_go_back_by_the_same_places() -> None:
    links, dx = SkipLinks(), torch.ones(2)
    links.send_back(A, 0, 1, [dx])
    assert links.receive_back(A, 0, 1) == [dx] and links.receive_back(A, 0, 1) is None


def test_skips_that_will_not_be_received_can_be_dropped() -> None:
    links = SkipLinks()
    links.send(A, 0, 1, "value")
    links.send_back(B, 0, 1, [None])
    links.clear()
    assert repr(links) == "<SkipLinks, 0 skips and 0 gradients>"
