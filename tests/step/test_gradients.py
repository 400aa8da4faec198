"""Tests how gradients are summed, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME
from pipert.stage.gradients import Arriving, Gradients, delivery, give, split_off

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


@pytest.mark.parametrize(
    "share",
    [
        lambda memory: memory.view(2, 2),
        lambda memory: memory.view(2, 2).t().t(),
        lambda memory: memory.detach().view(2, 2),
        lambda memory: memory.data.set_(memory.untyped_storage(), 0, (2, 2)),
        lambda memory: memory[:1].expand(2, 2),
        lambda memory: memory[:2].expand(2, 2),
    ],
)
def test_memory_shared_with_the_first_gradient_is_never_changed(
    share: Callable[[Tensor], Tensor],
) -> None:
    memory, weight = torch.ones(4), torch.ones(2, 2, requires_grad=True)
    sums = Gradients()
    sums.add([weight], [share(memory)])
    for _ in range(2):
        sums.add([weight], [torch.ones(2, 2)])
    assert memory.eq(1).all()
    ((_, total),) = sums.take()
    assert total.eq(3).all()


def test_memory_held_without_a_tensor_is_never_changed() -> None:
    weight, storage = torch.ones(4, requires_grad=True), torch.ones(4).untyped_storage()
    sums = Gradients()
    sums.add([weight], [torch.empty(0).set_(storage)])
    sums.add([weight], [torch.ones(4)])
    assert torch.empty(0).set_(storage).eq(1).all()


def test_a_sum_keeps_no_larger_memory_alive() -> None:
    weight, sums = torch.ones(4, requires_grad=True), Gradients()
    for _ in range(2):
        sums.add([weight], [torch.ones(100)[:4]])
    ((_, total),) = sums.take()
    assert total.untyped_storage().nbytes() == total.nbytes


@pytest.mark.skipif(not ONE_THREAD_AT_A_TIME, reason="references are not counted at once")
@pytest.mark.parametrize("is_view", [False, True])
def test_a_first_gradient_that_nobody_else_holds_becomes_the_sum(*, is_view: bool) -> None:
    weight, sums = torch.ones(2, 3, requires_grad=True), Gradients()
    sums.add([weight], [torch.ones(6).view(2, 3) if is_view else torch.ones(2, 3)])
    address = sums._sums[id(weight)].total.data_ptr()
    sums.add([weight], [torch.ones(2, 3)])
    ((_, total),) = sums.take()
    assert total.data_ptr() == address and total.eq(2).all()


@pytest.mark.parametrize("of_first", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("of_weight", [torch.channels_last, torch.contiguous_format])
def test_a_sum_is_laid_out_as_its_weight(
    of_weight: torch.memory_format, of_first: torch.memory_format
) -> None:
    weight = torch.ones(2, 3, 4, 4).to(memory_format=of_weight).requires_grad_()
    sums = Gradients()
    for _ in range(3):
        sums.add([weight], [torch.ones(2, 3, 4, 4).to(memory_format=of_first)])
    ((_, total),) = sums.take()
    assert total.stride() == weight.stride() and total.eq(3).all()


def test_a_weight_that_comes_twice_with_a_micro_batch_has_the_sum_of_all() -> None:
    weight = torch.ones(2, requires_grad=True)
    sums = Gradients()
    for second in (None, torch.full((2,), 10.0), torch.full((2,), 10.0)):
        sums.add([weight, weight], [torch.ones(2), second])
    assert [total.tolist() for _, total in sums.take()] == [[23.0, 23.0]]


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
    """If they were copied, all gradients would exist twice at the end of a step."""
    sums: dict[str, set[int]] = {}

    def noted(name: str, of: Callable[[Arriving], Any]) -> Callable[[Arriving], Any]:
        def look(arriving: Arriving) -> Any:
            sums[name] = {gradient.data_ptr() for _, gradient in arriving}
            return of(arriving)

        return look

    monkeypatch.setattr("pipert.stage.step.delivery", noted("delivered", delivery))
    monkeypatch.setattr("pipert.stage.step.give", noted("given", give))
    layers: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    with Pipe(layers, [1, 1], devices=["cpu"] * 2) as pipe:
        pipe.chunks = 2
        pipe.forward_backward(torch.rand(4, 3), loss_fn=lambda y, _: y.sum())
        grads = {p.grad.data_ptr() for p in pipe.parameters() if p.grad is not None}
    assert [len(found) for found in (sums["delivered"], sums["given"])] == [1, 3]
    assert grads == sums["delivered"] | sums["given"]


# Without autograd ---------------------------------------------------------------------------------


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3, 4, 4))


def test_an_unshared_gradient_becomes_grad_without_a_copy() -> None:
    one, gradient = weight(), torch.ones(2, 3, 4, 4)
    address = gradient.data_ptr()
    arriving: Arriving = [(one, gradient)]
    del gradient
    unheard = split_off(arriving)
    assert not arriving
    assert not give(unheard)
    assert one.grad is not None and one.grad.data_ptr() == address


def test_a_grad_set_by_others_meanwhile_is_not_overwritten() -> None:
    one, two, three = weight(), weight(), weight()
    unheard = split_off([(x, torch.ones_like(x)) for x in (one, two, three)])
    one.grad = torch.zeros_like(one)
    graph = two * 2  # which may go backward any time
    left = give(unheard)
    assert {id(tensor) for tensor, _ in left} == {id(one), id(two)}
    assert three.grad is not None and two.grad is None and not one.grad.any()
    del graph


def _hooked() -> tuple[Any, ...]:
    one = weight()
    one.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    return one, torch.ones_like(one)


def _hooked_after() -> tuple[Any, ...]:
    one = weight()
    hooked: Any = one
    hooked.register_post_accumulate_grad_hook(lambda _: None)
    return one, torch.ones_like(one)


def _hooked_behind() -> tuple[Any, ...]:
    """Returns a weight, a gradient, and the accumulation node that DDP would hook."""
    one = weight()
    node = one.view_as(one).grad_fn
    assert node is not None
    return one, torch.ones_like(one), node.next_functions[0][0]


def _kept() -> tuple[Any, ...]:
    one = weight()
    gradient = torch.ones_like(one)
    return one, gradient, [gradient]


def _saved() -> tuple[Any, ...]:
    one = weight()
    gradient = torch.ones_like(one)
    return one, gradient, torch.ones(1, requires_grad=True) * gradient


def _frozen() -> tuple[Any, ...]:
    one = weight().requires_grad_(False)
    return one, torch.ones_like(one)


def _laid_out_otherwise() -> tuple[Any, ...]:
    one = weight()
    return one, torch.ones_like(one, memory_format=torch.channels_last)


def _sparse() -> tuple[Any, ...]:
    one = weight()
    return one, torch.ones_like(one).to_sparse()


def _of_another_type() -> tuple[Any, ...]:
    one = weight()
    return one, torch.ones_like(one, dtype=torch.float64)


def _wanted_in_another_type() -> tuple[Any, ...]:
    one = weight()
    one.grad_dtype = torch.float64
    return one, torch.ones_like(one)


def _added() -> tuple[Any, ...]:
    one = weight()
    one.grad = torch.ones_like(one)
    return one, torch.ones_like(one)


def _no_parameter() -> tuple[Any, ...]:
    one = weight().detach().requires_grad_() * 2
    return one, torch.ones_like(one)


@pytest.mark.parametrize(
    "make",
    [
        _hooked, _hooked_after, _hooked_behind, _kept, _saved, _frozen, _laid_out_otherwise,
        _sparse, _of_another_type, _wanted_in_another_type, _added, _no_parameter,
    ],
)  # fmt: skip
def test_a_gradient_that_is_not_ours_alone_is_left_to_autograd(
    make: Callable[[], tuple[Any, ...]]
) -> None:
    one, gradient, *others = make()
    arriving: Arriving = [(one, gradient)]
    del gradient
    assert not split_off(arriving)
    assert [tensor is one for tensor, _ in arriving] == [True]


def test_one_gradient_of_two_weights_is_copied_by_autograd() -> None:
    one, two = weight(), weight()
    gradient = torch.ones_like(one)
    arriving: Arriving = [(one, gradient), (two, gradient)]
    del gradient
    assert not split_off(arriving)
    assert [tensor is one for tensor, _ in arriving] == [True, False]


def test_a_gradient_in_parts_is_added_by_autograd() -> None:
    one = weight()
    arriving: Arriving = [(one, torch.ones_like(one)), (one, torch.ones_like(one))]
    assert not split_off(arriving)
    assert len(arriving) == 2
