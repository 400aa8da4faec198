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
        self.encoder, self.head = Encoder(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.how(self.encoder, x))
        return y


def on_a_thread(part: nn.Module, x: Tensor) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(part, x).result()


def again(part: nn.Module, x: Tensor) -> Any:
    return checkpoint(part, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:no partition begins at:UserWarning")  # on another thread
@pytest.mark.parametrize("how", [on_a_thread, again])
def test_a_part_that_the_model_calls_in_its_own_way_is_not_sent_to_the_pipe(how: Any) -> None:
    torch.manual_seed(0)
    model = Model(how).double()
    plain, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    plain(x).sum().backward()
    cuts = ["encoder.second", "head"]
    with pipert.pipeline(model, cuts, devices=["cpu"] * 3, chunks=2, timeout=30) as pipe:
        pipe(x).sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


class Sequences(nn.Module):
    """Takes sequences first, unlike the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.filterwarnings("ignore::pipert.NotBatchFirstWarning")
def test_a_part_gets_its_arguments_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Sequences(), nn.Linear(8, 2))
    x = torch.randn(6, 4, 8)
    with torch.no_grad():
        expected = model[0](x)
        with pipert.pipeline(model, ["0.layers.1"], devices=["cpu"] * 2, chunks=2) as pipe:
            assert torch.equal(model[0](x), expected)
            assert pipe.statistics().runs == 1


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


@pytest.mark.multi_gpu
@pytest.mark.parametrize("there", ["cpu", "cuda:0", "cuda:1"])
def test_a_part_on_two_gpus_called_from_elsewhere_meanwhile_is_an_error_and_no_other_value(
    there: str,
) -> None:
    """It runs plainly, since the thread may be the model's own, and torch refuses two devices."""
    entered, go_on = threading.Event(), threading.Event()

    def wait(part: nn.Module, x: Tensor) -> Any:
        entered.set()
        assert go_on.wait(20)
        return part(x)

    model, x = Model(wait), torch.randn(4, 8, device=there)
    expected = copy.deepcopy(model.encoder)(x.cpu())
    cuts = ["encoder.second", "head"]
    with ThreadPoolExecutor(1) as threads, torch.no_grad():
        with pipert.pipeline(model, cuts, devices=["cuda:0", "cuda:1", "cuda:1"]) as pipe:
            call = threads.submit(pipe, x)
            assert entered.wait(20)
            with pytest.raises(RuntimeError, match="on the same device"):
                model.encoder(x)
            go_on.set()
            call.result(20)
            torch.testing.assert_close(model.encoder(x).cpu(), expected)
