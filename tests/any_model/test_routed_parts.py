"""Parts of a model in a pipe that are called by themselves, by the model's threads, or again."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipert
from pipert.batch.joining import gather
from tests.helpers.ways import grads_of


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


class Model(nn.Module):
    """Calls its encoder in the way that ``how`` says."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.how = how
        self.first, self.encoder, self.head = nn.Linear(8, 8), Encoder(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.how(self.encoder, self.first(x)))
        return y


def on_a_thread(part: nn.Module, x: Tensor) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(part, x).result()


def again(part: nn.Module, x: Tensor) -> Any:
    return checkpoint(part, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:no partition begins at:UserWarning")  # on another thread
@pytest.mark.parametrize(
    ("how", "cuts"),
    [(on_a_thread, ["encoder.second", "head"]), (again, ["encoder.first", "head"])],
)
def test_a_part_that_the_model_calls_in_its_own_way_computes_as_in_the_plain_model(
    how: Any, cuts: list[str]
) -> None:
    torch.manual_seed(0)
    model = Model(how).double()
    plain, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    plain(x).sum().backward()
    with pipert.pipeline(model, cuts, devices=["cpu"] * 3, chunks=2, timeout=30) as pipe:
        pipe(x).sum().backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))


def rows_of(y: Tensor) -> list[Any]:
    return [{"boxes": row[:3].unsqueeze(1)} for row in y]


@pytest.mark.parametrize(
    ("output", "joined"),
    [
        (rows_of, 4),  # as detectors return
        (lambda y: [y, y], 2),  # features, as many as a micro-batch has rows
        (lambda y: [y, "name"], 2),
        (lambda y: [y.repeat(3, 1), y], 2),
        (lambda y: [{"of": y}, {"of": y}, {"of": y}], 3),
    ],
)
def test_a_list_is_one_of_rows_only_if_each_has_a_container(output: Any, joined: int) -> None:
    parts = torch.randn(4, 8).chunk(2)
    found = gather([output(part) for part in parts], [2, 2])
    assert type(found) is list and len(found) == joined


@pytest.mark.parametrize("sizes", [[2, 2], [2, 1, 1], [1, 1, 1, 1], [3, 1]])
@pytest.mark.parametrize(
    "output",
    [
        lambda y: list(y.unsqueeze(-1).expand(-1, -1, 3)),  # LLaVA's features of images
        lambda y: [row[: 3 + n] for row, n in zip(y, range(7), strict=False)],
        lambda y: [(row[:5], {"score": row.sum()}) for row in y],
        lambda y: {"of rows": [row[:3] for row in y], "features": [y] * 5, "sum": y},
    ],
)
def test_a_list_of_rows_is_joined_alike_however_rows_are_split(
    output: Callable[[Tensor], Any], sizes: list[int]
) -> None:
    y = torch.randn(4, 8)
    found = gather([output(part) for part in torch.split(y, sizes)], sizes)
    rows = found["of rows"] if isinstance(found, dict) else found
    assert type(rows) is list and len(rows) == 4
    if isinstance(found, dict):
        assert torch.equal(found["sum"], y) and torch.equal(found["features"][0], y)
        assert all(map(torch.equal, rows, y[:, :3]))


def test_lists_with_as_many_entries_as_one_of_the_micro_batches_has_rows_are_features() -> None:
    y = torch.randn(5, 8)
    for sizes in ([2, 2, 1], [2, 1, 1, 1]):
        found = gather([[part, {"of": part * 2}] for part in torch.split(y, sizes)], sizes)
        assert torch.equal(found[0], y) and torch.equal(found[1]["of"], y * 2)


def test_a_list_that_might_be_one_of_rows_is_refused() -> None:
    parts = torch.randn(4, 8).chunk(2)
    with pytest.raises(ValueError, match="list of 2 containers .* 2 rows, .* unclear"):
        gather([[{"boxes": part}, {"boxes": part}] for part in parts], [2, 2])


def test_an_iterator_that_is_collected_in_a_layer_does_not_block_the_pipe(no_gc: None) -> None:
    go_on, calls = threading.Event(), []

    class Collects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            if len(calls) == 2:
                assert go_on.wait(30)
                gc.collect()
            return x

    module = nn.Sequential(Collects(), nn.Linear(4, 4))
    with pipert.Pipe(module, [1, 1], devices=["cpu"] * 2, timeout=30) as pipe, torch.no_grad():
        outputs = pipe.map(torch.randn(2, 4) for _ in range(50))
        next(outputs)
        cycle: list[Any] = [outputs]
        cycle.append(cycle)
        del outputs, cycle
        go_on.set()
        assert pipe(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch < 2.13
def test_a_cut_in_the_middle_of_a_function_that_is_checkpointed_is_refused() -> None:
    model = Model(lambda part, x: checkpoint(part, x, use_reentrant=False))
    with pipert.pipeline(model, ["encoder.second"], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(pipert.NestedCheckpointError, match=r"encoder\.second.*in the middle"):
            pipe(torch.randn(4, 8))
        with torch.no_grad():
            assert pipe(torch.randn(4, 8)).shape == (4, 8)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("schedule", ["", "1f1b"])
@pytest.mark.parametrize("checkpointing", ["never", "always"])
def test_a_cut_where_a_checkpointed_function_begins_is_right_on_gpus(
    schedule: str, checkpointing: str
) -> None:
    torch.manual_seed(0)
    model = Model(again).double()
    plain, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    plain(x).sum().backward()
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1", "cuda:0"], "chunks": 2}
    cuts = ["encoder.first", "head"]
    with pipert.pipeline(model, cuts, checkpoint=checkpointing, **options) as pipe:
        if schedule:
            pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), reduction="sum")
        else:
            pipe(x).sum().backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)


# On GPUs ------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A head whose weight is tied to a layer of another GPU, and which has others."""

    def __init__(self, tied: nn.Linear) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.out.weight = tied.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(x))
        return y


class Sum(nn.Module):
    """A layer without weights of its own."""

    def forward(self, x: Tensor, *, others: list[Tensor]) -> Tensor:
        return x + sum(others)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = Encoder(), nn.BatchNorm1d(8, affine=False)
        self.head, self.add = Head(self.encoder.first), Sum()

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        z: Tensor = self.add(self.head(self.middle(y)), others=[x, y])
        return z


@pytest.mark.multi_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("call", [lambda part, x: part(x), again], ids=["plainly", "checkpointed"])
def test_a_layer_called_by_itself_brings_its_arguments_to_its_device(there: str, call: Any) -> None:
    """As libraries do: a model without its head, then the head, on a chunk of tokens at a time."""
    torch.manual_seed(0)
    model, x = Parts().double().eval(), torch.randn(4, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    devices = ["cuda:0", "cuda:1", "cuda:1"]
    with pipert.pipeline(model, ["encoder.second", "head"], devices=devices) as pipe:
        y = x.to(there)
        with torch.no_grad():
            assert model.encoder(y).device.index == 1
        hidden = model.middle(model.encoder(y).to(there))
        chunks = [call(model.head, each) for each in torch.split(hidden, 2)]
        z = model.add(torch.cat(chunks), others=[y, call(model.encoder, y)])
        z.square().sum().backward()
        assert pipe.statistics().runs == 0
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_two_gpus_trains_on_when_its_pipe_is_closed(tied: bool) -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "abc")), torch.randn(4, 4)
    if tied:
        model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    for _ in range(3):
        plain(x).sum().backward()
    for _ in range(2):  # a later pipe of the model is like the first
        with pipert.pipeline(model, ["1"], devices=["cuda:0", "cuda:1"]) as pipe:
            pipe(x).sum().backward()
    model(x).sum().backward()
    assert not any(type(value).__module__.startswith("pipert") for value in vars(model).values())
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)
    pipert.pipeline(model, ["1"], devices=["cpu"] * 2).close()
    of_layers = [value for layer in model for value in vars(layer).values()]
    assert not any(type(value).__module__.startswith("pipert") for value in of_layers)


@pytest.mark.multi_gpu
def test_a_part_on_two_gpus_is_called_while_the_model_runs() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(part: nn.Module, x: Tensor) -> Any:
        entered.set()
        assert go_on.wait(20)
        return part(x)

    model, x = Model(wait), torch.randn(4, 8)
    expected = copy.deepcopy(model.encoder)(x)
    cuts = ["encoder.second", "head"]
    with ThreadPoolExecutor(1) as threads, torch.no_grad():
        with pipert.pipeline(model, cuts, devices=["cuda:0", "cuda:1", "cuda:1"]) as pipe:
            call = threads.submit(pipe, x)
            assert entered.wait(20)
            torch.testing.assert_close(model.encoder(x).cpu(), expected)
            go_on.set()
            call.result(20)
