"""Sums of gradients: what is added to what, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.stage.gradients import Gradients, delivery

META = torch.device("meta")


def test_a_weight_of_another_device_is_summed_where_its_gradients_are() -> None:
    weight = torch.ones(3, requires_grad=True)
    sums = Gradients()
    for _ in range(3):
        sums.add([weight], [torch.empty(3, device=META)])
    assert [total.device for _, total in sums.take()] == [META]


def test_the_first_gradient_is_never_changed() -> None:
    weight, first = torch.ones(2, requires_grad=True), torch.ones(2)
    sums = Gradients()
    for gradient in (first, torch.ones(2), torch.ones(2)):
        sums.add([weight], [gradient])
    assert first.tolist() == [1.0, 1.0]
    assert [total.tolist() for _, total in sums.take()] == [[3.0, 3.0]]


def test_a_weight_that_was_not_used_has_no_sum() -> None:
    weight = torch.ones(2, requires_grad=True)
    sums = Gradients()
    sums.add([weight], [None])
    assert not sums.take()


def _used_before(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(*args, **kwargs).fill_(float("nan"))


@pytest.mark.cuda
def test_anomaly_detection_finds_nothing_in_memory_that_was_used_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _used_before(getattr(torch, name)))
    weights = [torch.ones(2, device=device, requires_grad=True) for device in ("cpu", "cuda")]
    with torch.autograd.set_detect_anomaly(True):
        torch.autograd.backward(delivery([(w, torch.ones_like(w)) for w in weights]))
    assert [weight.grad is not None and weight.grad.tolist() for weight in weights] == [[1, 1]] * 2


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_anomaly_detection_reads_nothing_of_a_step_on_another_stream_than_the_caller_s() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    new: Any = torch.cuda.Stream
    with Pipe(layers, [1, 1], devices=["cuda:0", "cuda:1"]) as pipe:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        with (
            torch.cuda.stream(new("cuda:1")), torch.cuda.stream(new("cuda:0")),
            torch.autograd.set_detect_anomaly(True),
        ):  # fmt: skip
            pipe.forward_backward(torch.ones(4, 3), loss_fn=lambda y, _: y.sum())
            assert all(p.grad is not None for p in pipe.parameters())


def test_the_sums_of_a_step_become_the_gradients_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copied, all gradients would be there twice at the end of a step."""
    sums: list[int] = []

    def noted(arriving: list[tuple[Tensor, Tensor]]) -> Tensor:
        sums.extend(gradient.data_ptr() for _, gradient in arriving)
        return delivery(arriving)

    monkeypatch.setattr("pipert.stage.step.delivery", noted)
    with Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2) as pipe:
        pipe.chunks = 2
        pipe.forward_backward(torch.rand(4, 3), loss_fn=lambda y, _: y.sum())
        grads = [parameter.grad for parameter in pipe.parameters()]
    assert {grad.data_ptr() for grad in grads if grad is not None} == set(sums)
