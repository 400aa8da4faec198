"""Tests what a step says of losses that are not the loss of the mini-batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipert
from pipert import Pipe
from tests.helpers.ways import linear

X = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
SOME = torch.tensor([0, 1, 2, -100, 1, -100, -100, -100])
AS_MANY = torch.tensor([0, -100, -100, 1, 2, -100, -100, 1])


def mean(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t)


def total(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t, reduction="sum")


def fixed(y: Tensor, t: Tensor) -> Tensor:
    return (y * torch.ones(2, 1, dtype=y.dtype)).sum() + 0 * t.sum()  # of two rows


COUNT = "^the micro-batches have 2, 1, 1, 0 targets that count.*denominator="
SUM, MEAN = "^loss_fn returns a sum.*reduction='sum'", "^loss_fn returns a mean"


def shifted(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y, t[:, 1])


TEXT = torch.stack([torch.tensor([0, 0, 0, 0, 0, 0, -100, 0]), Y], 1)
TEXT[1, 1] = -100  # each row counts one of its two, but for the second
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a mean over unequal numbers": ({"loss_fn": mean, "target": SOME}, COUNT),
    "a mean over equal numbers": ({"loss_fn": mean, "target": AS_MANY}, ""),
    "a mean over unequal numbers behind the first": (
        {"loss_fn": shifted, "target": TEXT}, "targets that count",
    ),
    "a mean over all": ({"loss_fn": mean, "target": Y}, ""),
    "a sum": ({"loss_fn": total, "target": Y}, SUM),
    "a sum in an object": ({"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "target": Y}, SUM),
    "sums added up": ({"loss_fn": total, "target": SOME, "reduction": "sum"}, ""),
    "sums divided": ({"loss_fn": total, "target": SOME, "denominator": 4}, ""),
    "a mean divided": ({"loss_fn": mean, "target": Y, "denominator": 8}, MEAN),
    "means divided by their number": ({"loss_fn": mean, "target": Y, "denominator": 4}, ""),
    "a sum of so many rows": ({"loss_fn": fixed, "target": Y}, ""),
}


def said(pipe: Any, *args: Any, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pipe.forward_backward(*args, **kwargs)
    return [str(each.message) for each in seen]


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_the_loss_of_the_mini_batch_is_said_once(name: str, ready: bool) -> None:
    options, expected = CASES[name]
    options = dict(options)
    args: Any = (X,)
    if ready:
        args, options["microbatches"] = (), list(X.chunk(4))
        options["target"] = list(options["target"].chunk(4))
    module = nn.Sequential(linear(3, 3), linear(3, 3))
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=4) as pipe:
        found = [said(pipe, *args, **options) for _ in range(4)]
    assert [len(each) for each in found] == [bool(expected), 0, 0, 0]
    if expected:
        assert re.search(expected, found[0][0])


@pytest.mark.parametrize(("kind", "expected"), [("sum", SUM), ("mean", "")])
def test_a_loss_that_was_added_up_in_half_precision_is_a_sum_or_a_mean(
    kind: str, expected: str
) -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y.bfloat16(), t, reduction=kind)

    x = torch.rand(80, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    with Pipe(nn.Sequential(linear(3, 3)), [1], devices=["cpu"], chunks=2) as pipe:
        found = said(pipe, x, target=Y.repeat(10), loss_fn=loss)
    assert bool(found) == bool(expected) and re.search(expected, "".join(found))


@pytest.mark.parametrize("loss_fn, denominator", [(total, None), (mean, 3), (mean, None)])
def test_a_micro_batch_of_one_long_row_is_looked_at_by_its_end(
    loss_fn: Any, denominator: Any
) -> None:
    calls: list[torch.Size] = []

    def loss(y: Tensor, t: Tensor) -> Tensor:
        calls.append(y.shape)
        return loss_fn(y.flatten(0, 1), t.flatten())  # type: ignore[no-any-return]

    module = nn.Sequential(linear(3, 3), linear(3, 3))
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:
        texts = said(pipe, X.expand(2, 8, 3).repeat(1, 4, 1), target=Y.repeat(2, 4),
                     loss_fn=loss, denominator=denominator)  # fmt: skip
    assert len(texts) == (loss_fn is total or denominator is not None)
    assert calls[2:] == [(2, 8, 3), (1, 8, 3), (1, 8, 3)]


def test_labels_of_ready_micro_batches_of_a_step_function_are_counted() -> None:
    model = nn.Sequential(linear(3, 3), linear(3, 3))
    batches = [{"x": x, "labels": t} for x, t in zip(X.chunk(4), SOME.chunk(4), strict=True)]
    step: Callable[..., Any] = lambda b: mean(model(b["x"]), b["labels"])  # noqa: E731
    with pipert.pipeline(model, ["1"], devices=["cpu"] * 2) as pipe:
        with pytest.warns(UserWarning, match="2, 1, 1, 2 targets that count"):
            pipe.forward_backward(microbatches=batches[:3] + batches[:1], step=step)


class OfOwnLoss(nn.Sequential):
    """Computes a mean over targets whose name is the model's own choice."""

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return mean(self[1](self[0](x)), y) + 0 * ids.sum()


@pytest.mark.parametrize("named", [False, True])
def test_targets_of_the_model_s_own_loss_are_counted_whatever_they_are_called(named: bool) -> None:
    args, kwargs = ((X, Y), {"y": SOME}) if named else ((X, Y, SOME), {})
    model = OfOwnLoss(linear(3, 3), linear(3, 3))
    with pipert.pipeline(model, ["1"], devices=["cpu"] * 2, chunks=4) as pipe:
        [found] = said(pipe, *args, **kwargs)
        assert re.search(COUNT, found)


class Centred(nn.Module):
    """Keeps statistics of the outputs, in a layer and in a buffer that is assigned."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        return total(self.norm(y - self.centre), t)


def test_the_look_at_a_loss_leaves_the_statistics_of_a_module_as_they_are() -> None:
    loss, plain = Centred(), Centred()
    module = nn.Sequential(linear(3, 3), linear(3, 3))
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=4) as pipe:
        said(pipe, X, target=Y, loss_fn=loss)
    for x, t in zip(X.chunk(4), Y.chunk(4), strict=True):
        plain(module(x), t)
    torch.testing.assert_close(dict(loss.named_buffers()), dict(plain.named_buffers()))


def test_a_loss_function_is_called_once_for_each_micro_batch_after_it_is_known() -> None:
    calls: list[int] = []

    def loss(y: Tensor, t: Tensor) -> Tensor:
        calls.append(len(y))
        return mean(y, t)

    module = nn.Sequential(linear(3, 3), linear(3, 3))
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=4) as pipe:
        for _ in range(8):
            calls.append(0)
            pipe.forward_backward(X, target=Y, loss_fn=loss)
    assert calls == [0, 2, 2, 2, 2, 1, 1, *[0, 2, 2, 2, 2] * 7]
