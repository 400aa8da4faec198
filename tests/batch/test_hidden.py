"""Objects that torch cannot flatten: mappings are split like a dict, others must hide no rows."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from pipert import Replicate
from pipert.batch.joining import gather
from pipert.batch.microbatch import scatter


def rows(count: int = 4) -> Tensor:
    return torch.arange(count * 2.0).view(count, 2)


class Named(dict[str, Any]):
    """A user's subclass of dict."""


class Both(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(items)
        self.__dict__ = self


MAPPINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "UserDict": UserDict,
    "MappingProxyType": MappingProxyType,
    "a class of dict": Named,
    "attributes": Both,
}
each_mapping = pytest.mark.parametrize("make", MAPPINGS.values(), ids=list(MAPPINGS))


# Mappings.


@each_mapping
def test_a_mapping_is_split_like_a_dict_and_stays_what_it_is(make: Any) -> None:
    whole = make({"x": rows(4), "scale": 2.0})
    parts = scatter((whole,), {}, 2)
    assert [type(part) for part in parts] == [type(whole)] * 2
    assert [list(part) for part in parts] == [["x", "scale"]] * 2
    assert torch.equal(torch.cat([part["x"] for part in parts]), rows(4))
    assert [part["scale"] for part in parts] == [2.0, 2.0]
    assert len(whole["x"]) == 4


@each_mapping
def test_mappings_are_found_at_any_depth(make: Any) -> None:
    whole = make({"inner": [make({"x": rows(4)})]})
    parts = scatter((rows(4),), {"more": (1, whole)}, 4)
    assert [len(part.kwargs["more"][1]["inner"][0]["x"]) for part in parts] == [1] * 4


def test_items_that_are_attributes_are_those_of_the_micro_batch() -> None:
    parts: Any = scatter((Both({"x": rows(4)}),), {}, 2)
    assert [len(part.x) for part in parts] == [2, 2]


@each_mapping
def test_outputs_that_are_mappings_are_joined(make: Any) -> None:
    joined = gather([make({"y": rows(2)}), make({"y": rows(2)})], [2, 2])
    assert type(joined) is type(make({}))
    assert torch.equal(joined["y"], torch.cat([rows(2), rows(2)]))


# Objects.


@dataclass
class Plain:
    content: Any


@dataclass(slots=True)
class Slotted:
    content: Any
    unset: Any = field(init=False)


HIDING: dict[str, Callable[[Any], Any]] = {
    "an attribute": Plain,
    "a slot": Slotted,
    "an object in an object": lambda x: Plain(Plain(Plain(x))),
    "a list of dicts": lambda x: Plain([{"a": 1}, {"b": x}]),
    "a deque": lambda x: Plain(deque([1, x])),
    "a set": lambda x: Plain({1, x}),
    "a mapping": lambda x: Plain(UserDict(a=x)),
    "a class of list": lambda x: type("Rows", (list,), {})([x]),
    "a namespace": lambda x: SimpleNamespace(x=x),
}
each_hiding = pytest.mark.parametrize("make", HIDING.values(), ids=list(HIDING))


@each_hiding
def test_an_object_that_hides_rows_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"kwargs\['extra'\] is a .* cannot split"):
        scatter((rows(4),), {"extra": make(rows(4))}, 2)


@each_hiding
def test_one_micro_batch_may_have_any_object_and_any_numbers_of_rows(make: Any) -> None:
    ((x, three), kwargs), = scatter((rows(4), rows(3)), {"extra": (extra := make(rows(4)))}, 1)
    assert len(x) == 4 and len(three) == 3 and type(kwargs["extra"]) is type(extra)


@each_hiding
def test_an_object_that_hides_rows_may_be_replicated(make: Any) -> None:
    whole = make(rows(4))
    assert [part.args[1] for part in scatter((rows(4), Replicate(whole)), {}, 2)] == [whole] * 2


class Drawn(nn.Module):
    """A module, and a class, with the attributes of an array."""

    ndim, shape = 2, (4, 4)


@pytest.mark.parametrize(
    "harmless",
    [
        Plain(3), Plain([1, "a", None]), Plain(torch.tensor(1.0)), Plain(torch.float32),
        nn.Linear(2, 2), Plain(nn.Linear(2, 2)), Tensor, torch.nn, rows, torch.Generator(),
        Plain(SimpleNamespace(ndim=0, shape=())), SimpleNamespace(ndim=3), Drawn(), nn.Linear,
        Plain(Drawn),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_object_that_hides_no_rows_goes_to_each_micro_batch(harmless: Any) -> None:
    assert all(part.args[1] is harmless for part in scatter((rows(4), harmless), {}, 2))


def test_objects_may_refer_to_each_other() -> None:
    first, second = Plain(None), Plain(None)
    first.content, second.content = second, [first, second]
    assert len(scatter((rows(4), first), {}, 2)) == 2
    second.content.append(rows())
    with pytest.raises(TypeError, match=r"args\[1\] is a Plain, which pipert cannot split"):
        scatter((rows(4), first), {}, 2)


# Layouts that have no rows.


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "jagged", "strided"])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_layout_that_cannot_be_split_is_refused(layout: str, wants_grad: bool) -> None:
    if layout.startswith("sparse"):
        tensor = torch.eye(4).to_sparse(layout=getattr(torch, layout))
    else:
        parts = [torch.ones(k, 2) for k in range(1, 5)]
        tensor = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    tensor.requires_grad_(wants_grad)
    with pytest.raises(TypeError, match=r"kwargs\['a'\] is a sparse or nested .* make it"):
        scatter((rows(4),), {"a": tensor}, 2)
    assert scatter((rows(4),), {"a": tensor}, 1)[0].kwargs["a"] is tensor
    assert scatter((rows(4),), {"a": Replicate(tensor)}, 2)[1].kwargs["a"] is tensor


# Containers that keep the number of rows, as a TensorDict does.


class Sized:
    """A registered container with its batch size beside its tensors."""

    def __init__(self, content: dict[str, Tensor], batch_size: torch.Size) -> None:
        self.content, self.batch_size = content, batch_size


pytree.register_pytree_node(
    Sized,
    lambda sized: (list(sized.content.values()), (tuple(sized.content), sized.batch_size)),
    lambda values, context: Sized(dict(zip(context[0], values, strict=True)), context[1]),
)


def sized() -> Sized:
    return Sized({"x": rows(4), "y": rows(4)}, torch.Size([4]))


def test_a_container_that_would_keep_the_batch_size_of_all_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="a Sized keeps its batch_size .* use a dict"):
        scatter((sized(),), {}, 2)
    given = sized()
    whole: Any = scatter((given,), {}, 1)[0]
    assert whole.batch_size == (4,) and whole.content["x"] is given.content["x"]


class Measured(Sized):
    """Finds its batch size out when it is rebuilt."""


def measured(values: Iterable[Tensor], names: tuple[str, ...]) -> Measured:
    content = dict(zip(names, values, strict=True))
    return Measured(content, content["x"].shape[:1])


pytree.register_pytree_node(
    Measured, lambda given: (list(given.content.values()), tuple(given.content)), measured
)


def test_a_container_that_finds_its_batch_size_out_is_split() -> None:
    parts: Any = scatter((Measured({"x": rows(4), "y": rows(4)}, torch.Size([4])),), {}, 2)
    assert [part.batch_size for part in parts] == [(2,), (2,)]


def test_an_output_that_would_keep_the_batch_size_of_a_micro_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="a Sized keeps its batch_size"):
        gather([{"y": sized()}, {"y": sized()}], [4, 4])
    assert gather([sized()], [4]).batch_size == (4,)


# Packed sequences, which are named tuples.


def packed() -> Any:
    return pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([2, 1, 1]), batch_first=True)


def test_a_packed_sequence_is_refused() -> None:
    with pytest.raises(TypeError, match=r"args\[0\] is a PackedSequence.* cannot split"):
        scatter((packed(),), {}, 2)


# Outputs that cannot be joined.


@pytest.mark.parametrize("make", [Plain, lambda x: SimpleNamespace(layers=[x])])
def test_an_output_that_hides_rows_is_refused_with_a_remedy(make: Any) -> None:
    output = {"logits": rows(2), "past_key_values": make(rows(2))}
    message = r"output\['past_key_values'\] is a .*cannot join.*register.*return None for it"
    with pytest.raises(ValueError, match=message):
        gather([output, output], [2, 2])
    assert pytree.tree_leaves(gather([output], [2]))[1] is output["past_key_values"]


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [([2, 2, 2], [3, 3, 3]), ([3, 3, 3], [3, 3, 2]), ([4, 4], [2, 1]), ([1, 1], [2, 2])],
    ids=["fewer", "the same", "another multiple", "one"],
)
def test_rows_that_are_not_those_of_the_micro_batch_are_refused(
    numbers: list[int], sizes: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"output\[0\] must have as many rows "):
        gather([(rows(number),) for number in numbers], sizes)


@pytest.mark.parametrize("each", [0, 1, 3])
def test_rows_may_be_so_many_times_those_of_the_micro_batch(each: int) -> None:
    assert len(gather([rows(2 * each), rows(1 * each)], [2, 1])) == 3 * each
