"""Tests that a recomputation leaves buffers as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, is_recomputing
from pipert.recompute import snapshot
from tests.helpers.ways import CALL, Way, batch, grads_of, linear, mean, same, take_step

RECOMPUTING = [Way(schedule, "always") for schedule in (CALL, "gpipe", "1f1b")]
each_way = pytest.mark.parametrize("way", RECOMPUTING, ids=["call", "gpipe", "1f1b"])


def step(module: nn.Sequential, way: Way, x: Any, chunks: int = 2) -> None:
    options: Any = {"devices": ["cpu"], "checkpoint": "always", "deferred_batch_norm": False}
    with Pipe(module, [len(module)], chunks=chunks, **options) as pipe:
        take_step(pipe, way, x)


class Moving(nn.Module):
    """A layer that changes a buffer in each forward, and computes without it."""

    def __init__(self, change: Callable[[Any], Any], book: Tensor | None = None) -> None:
        super().__init__()
        self.linear = linear(3, 2)
        self.book: Tensor
        self.register_buffer("book", torch.zeros(3) if book is None else book)
        self.change = change

    @torch.no_grad()
    def move(self) -> None:
        self.change(self)

    def forward(self, x: Tensor) -> Any:
        self.move()
        return self.linear(x).tanh()


def replace(layer: Any) -> None:
    layer.book = layer.book + 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "method": lambda layer: layer.book.add_(1),
    "out": lambda layer: torch.add(layer.book, 1, out=layer.book),
    "item": lambda layer: layer.book.__setitem__((), layer.book + 1),
    "data": lambda layer: layer.book.data.add_(1),
    "numpy": lambda layer: layer.book.numpy().__iadd__(1),
    "replaced": replace,
}


@each_way
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_buffer_is_changed_by_forwards_alone(change: Callable[[Any], Any], way: Way) -> None:
    layer = Moving(change)
    buffer = layer.book
    step(nn.Sequential(layer), way, batch(4))
    assert layer.book.tolist() == [2.0] * 3  # two forwards
    assert layer.book is buffer or change is replace


@pytest.mark.parametrize("change", [CHANGES["method"], replace])
def test_a_large_buffer_is_changed_by_forwards_alone(change: Callable[[Any], Any]) -> None:
    layer = Moving(change, torch.zeros(snapshot.SMALL + 1))
    step(nn.Sequential(layer), RECOMPUTING[0], batch(4))
    assert torch.unique(layer.book).tolist() == [2.0]


def test_a_large_buffer_that_nobody_writes_is_not_copied() -> None:
    seen: list[Tensor] = []
    large = torch.zeros(snapshot.SMALL + 1)
    layer = Moving(lambda layer: seen.append(layer.book), large)
    step(nn.Sequential(layer), RECOMPUTING[0], batch(4))
    assert len(seen) == 4 and all(book is large for book in seen)


def test_a_run_copies_a_buffer_once() -> None:
    seen: list[Tensor] = []
    layer = Moving(lambda layer: seen.append(layer.book) if is_recomputing() else None)
    step(nn.Sequential(layer), RECOMPUTING[0], batch(8), chunks=4)
    assert len(seen) == 4 and all(book is seen[0] for book in seen)


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csc])
def test_a_sparse_buffer_is_changed_by_forwards_alone(layout: torch.layout) -> None:
    def double(layer: Any) -> None:
        layer.book = layer.book * 2

    layer = Moving(double, torch.eye(3).to_sparse(layout=layout))
    step(nn.Sequential(layer), RECOMPUTING[0], batch(4))
    assert torch.equal(layer.book.to_dense(), 4 * torch.eye(3))


def test_buffers_are_put_back_after_a_failure() -> None:
    def fail(layer: Any) -> None:
        layer.book = layer.book + 1
        if is_recomputing():
            raise ZeroDivisionError

    layer = Moving(fail)
    with pytest.raises(ZeroDivisionError):
        step(nn.Sequential(layer), RECOMPUTING[0], batch(4))
    assert layer.book.tolist() == [2.0] * 3


class Counting(nn.Module):
    """A layer that counts its forwards, in a buffer that somebody registers, maybe itself."""

    def __init__(self, by_itself: bool) -> None:
        super().__init__()
        self.linear, self.by_itself = linear(3, 2), by_itself
        self.count: Tensor

    def forward(self, x: Tensor) -> Any:
        if self.by_itself and "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
        if "count" in self._buffers:
            self.count += 1
        return self.linear(x)


@each_way
def test_a_buffer_that_the_first_forward_registers_is_changed_by_forwards_alone(way: Way) -> None:
    layer = Counting(by_itself=True)
    step(nn.Sequential(layer, linear(2, 2)), way, batch(4), chunks=1)
    assert layer.count.item() == 1


# Normalisation ------------------------------------------------------------------------------------


def norm_of(**options: Any) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(4, dtype=torch.float64, **options)


def forget_statistics(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    norm.track_running_stats = False
    return norm


def hooked(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    norm.register_forward_hook(lambda *_: None)
    return norm


class Nested(nn.Module):
    """A layer that makes a pipe of its norms, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*[norm_of() for _ in range(6)])

    def forward(self, x: Tensor) -> Any:
        with Pipe(
            self.norms, [6], devices=["cpu"], checkpoint="never", deferred_batch_norm=False
        ) as inner:
            return inner(x)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": norm_of,
    "cumulative": lambda: norm_of(momentum=None),
    "without weights": lambda: norm_of(affine=False),
    "without statistics": lambda: norm_of(track_running_stats=False),
    "that forgets its statistics": lambda: forget_statistics(norm_of()),
    "frozen": lambda: norm_of().eval(),
    "hooked": lambda: hooked(norm_of()),
    "nested": Nested,
}


@each_way
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_and_statistics_are_those_of_the_plain_module(kind: str, way: Way) -> None:
    torch.manual_seed(2)
    layers = [linear(3, 4)]
    for _ in range(6):  # large enough for its graph to be dropped and recomputed
        layers += [NORMS[kind](), nn.Tanh(), linear(4, 4), nn.Tanh(), linear(4, 4)]
    module, x = nn.Sequential(*layers), batch(8)
    plain = copy.deepcopy(module)
    step(module, way, x)
    for part in x.chunk(2):
        (mean(plain(part), None) / 2).backward()
    same(grads_of(module), grads_of(plain))
    same(dict(module.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


def test_what_a_layer_has_in_place_of_a_buffer_leads_to_it() -> None:
    norm = nn.BatchNorm1d(3)
    seen: list[Any] = []
    snapshot.Buffers([norm]).put_aside(lambda: seen.append(norm.running_mean))
    assert seen[0] is not norm.running_mean
    assert snapshot.original_of(seen[0]) is norm.running_mean
    assert snapshot.original_of(norm) is norm
