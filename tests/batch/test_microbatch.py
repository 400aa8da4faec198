"""Tests splitting a call's arguments into micro-batches and joining the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipert import Pipe, is_checkpointing
from pipert.batch.joining import gather
from pipert.batch.microbatch import scatter
from tests.layers import Apply

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Registered:
    rows: Tensor
    scale: float


class Box:
    """A pytree registered without the names of its children."""

    def __init__(self, content: Any) -> None:
        self.content = content


torch.export.register_dataclass(Registered)
pytree.register_pytree_node(Box, lambda box: ([box.content], None), lambda c, _: Box(*c))


def call(functions: list[Callable[..., Any]], *args: Any, chunks: int = 2, **kwargs: Any) -> Any:
    """Calls a pipe with one partition for each function."""
    n = len(functions)
    module = nn.Sequential(*map(Apply, functions))
    with Pipe(module, [1] * n, devices=["cpu"] * n, chunks=chunks) as pipe:
        return pipe(*args, **kwargs)


def unchanged(value: Any) -> Any:
    return value


def rows(count: int) -> Tensor:
    return torch.arange(count * 2.0).view(count, 2)


def sizes(batch: int, chunks: int) -> list[int]:
    return [len(part) for part in scatter((rows(batch),), {}, chunks)]


# How many micro-batches of which size.


def test_pitfall_16_no_rows_are_one_micro_batch() -> None:
    assert sizes(0, 4) == [0]


def test_pitfall_16_last_micro_batch_is_the_last_of_those_there_are() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_checkpointing())
        return x

    call([look], rows(3).requires_grad_(), chunks=8)
    assert seen == [True, True, False]


def test_0_dimensional_tensor_does_not_set_the_batch_size() -> None:
    assert len(scatter((torch.tensor(1.0), rows(4)), {}, 2)) == 2


# Pitfall 2: everything that has rows is split, or refused.


@pytest.mark.parametrize(
    ("args", "kwargs", "paths"),
    [
        ((rows(8), rows(2)), {}, r"args\[0\] has 8 and args\[1\] has 2"),
        (((rows(8), rows(2)),), {}, r"args\[0\]\[0\] has 8 and args\[0\]\[1\] has 2"),
        ((rows(8),), {"mask": rows(2)}, r"args\[0\] has 8 and kwargs\['mask'\] has 2"),
        ((), {"a": rows(3), "b": [rows(4)]}, r"kwargs\['a'\] has 3 and kwargs\['b'\]\[0\] has 4"),
        ((Pair(rows(3), rows(4)),), {}, r"args\[0\]\.left has 3 and args\[0\]\.right has 4"),
        ((3, rows(3), None, rows(4)), {}, r"args\[1\] has 3 and args\[3\] has 4"),
        ((rows(1), rows(3)), {}, r"args\[0\] has 1 and args\[1\] has 3"),
        ((rows(0), rows(3)), {}, r"args\[0\] has 0 and args\[1\] has 3"),
    ],
)
def test_pitfall_2_refusal_names_both_paths_and_sizes(
    args: tuple[Any, ...], kwargs: dict[str, Any], paths: str
) -> None:
    with pytest.raises(ValueError, match=paths):
        scatter(args, kwargs, 4)


def test_pitfall_2_refusal_names_the_sizes_below_a_pytree_without_names() -> None:
    with pytest.raises(ValueError, match=r"has 3 and .* has 4"):
        scatter((Box(rows(3)), rows(4)), {}, 2)


# The gradient of what is split.


def test_split_does_not_copy_the_batch() -> None:
    x = rows(4)
    assert scatter((x,), {}, 2)[0].data_ptr() == x.data_ptr()


# Gather.


@pytest.mark.parametrize("chunks", [1, 3])
def test_pitfall_17_scalar_for_each_micro_batch_is_stacked(chunks: int) -> None:
    parts = rows(6).tensor_split(chunks)
    same(call([torch.sum], rows(6), chunks=chunks), torch.stack([part.sum() for part in parts]))


def test_pitfall_17_scalar_beside_rows() -> None:
    total, x = call([lambda x: (x.sum(), x)], rows(6), chunks=3)
    assert (total.shape, x.shape) == ((3,), (6, 2))


def test_pitfall_17_gradient_goes_through_the_stack() -> None:
    x = rows(6).requires_grad_()
    call([lambda x: x.square().sum()], x, chunks=3).sum().backward()
    same(x.grad, 2 * rows(6))


def test_output_need_not_have_as_many_rows_as_the_input() -> None:
    assert call([lambda x: x.repeat(3, 1)], rows(4), chunks=2).shape == (12, 2)


def time_first(x: Tensor) -> Tensor:
    return x[None].repeat(4, 1, 1)


def test_rows_in_dimension_1_of_all_outputs_are_refused_by_path() -> None:
    for functions in ([time_first], [lambda x: {"found": time_first(x), "time": rows(4)}]):
        with pytest.raises(ValueError, match=r"output.* has the rows .* 1.* transpose"):
            call(functions, rows(6), chunks=3)


def test_rows_in_dimension_1_are_accepted_beside_an_output_that_has_them_first() -> None:
    both: Any = call([lambda x: (x, x[:, None].repeat(2, 2, 1))], rows(6), chunks=3)
    assert [y.shape for y in both] == [(6, 2), (12, 2, 2)]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([3, 4], r"output is not a tensor.*3 in micro-batch 0 and 4 in micro-batch 1"),
        ([(0, {"n": 3}), (0, {"n": 4})], r"output\[1\]\['n'\] is not a tensor"),
        ([Pair(1, 2), Pair(1, 3)], r"output\.right is not a tensor"),
        ([1, 1.0], r"1 in micro-batch 0 and 1\.0 in micro-batch 1"),
        ([1, True], r"1 in micro-batch 0 and True in micro-batch 1"),
        ([(rows(1), 0), (None, 0)], r"output\[0\] is not a tensor"),
        ([5, 5, 6], r"5 in micro-batch 0 and 6 in micro-batch 2"),
        ([3, 4], "return a tensor"),
    ],
)
def test_unequal_leaves_are_refused_by_path(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 3), torch.zeros(2, 2, 1), torch.zeros(2, 2).long(), torch.tensor(1.0)],
    ids=["columns", "dimensions", "dtype", "0-dimensional"],
)
def test_tensors_that_cannot_be_concatenated_are_refused_by_path(other: Tensor) -> None:
    with pytest.raises(ValueError, match=r"output\[0\]"):
        gather([(rows(2),), (other,)])


# Pitfall 27: settings and inputs that change.


def test_pitfall_27_changed_chunks_are_the_number_of_micro_batches() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x

    with Pipe(nn.Sequential(Apply(look)), [1], chunks=2) as pipe:
        for pipe.chunks in (2, 4, 1):
            pipe(rows(4))
    assert seen == [2, 2, 1, 1, 1, 1, 4]


@pytest.mark.parametrize("chunks", [1, 2])
def test_pitfall_27_input_without_data_is_refused(chunks: int) -> None:
    with pytest.raises(NotImplementedError, match="meta tensor"):
        call([unchanged], rows(4).to("meta"), chunks=chunks)


@pytest.mark.cuda
def test_pitfall_27_input_on_another_device_is_brought_to_the_first_partition() -> None:
    with Pipe(nn.Sequential(nn.ReLU()), [1], devices=["cuda:0"], chunks=2) as pipe:
        same(pipe(rows(4)), rows(4).cuda())
