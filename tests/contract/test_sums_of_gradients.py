"""Tests how gradients are summed, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from pipert import Pipe


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


# Memory -------------------------------------------------------------------------------------------


class SumOfWeights(nn.Module):
    """A layer whose weight is a sum: the gradients of both terms are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.dw = nn.Parameter(torch.zeros(16))
        self.b = nn.Parameter(torch.zeros(4))
        self.db = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w + self.dw.view(4, 4), self.b + self.db).tanh()


class Keeping(torch.autograd.Function):
    """Multiplies by one. Its gradient is a view of a tensor that it keeps."""

    kept: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        Keeping.kept = dx.clone()
        return Keeping.kept.view_as(dx)


class KeptWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = Keeping.apply(self.weight)  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight, self.bias)


def make_model() -> nn.Sequential:
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(0, -2))
    return nn.Sequential(sparse, SumOfWeights(), KeptWeight(4, 4), nn.Linear(4, 4))


def storages(tensors: Iterable[Tensor]) -> list[int]:
    parts = [x._values() if x.layout == torch.sparse_coo else x for x in tensors]
    return [x.untyped_storage().data_ptr() for x in parts]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_no_two_gradients_share_memory_with_each_other_or_with_anything(
    chunks: int, schedule: str, checkpoint: str
) -> None:
    model: Any = make_model()
    x, seen = torch.arange(6).view(6, 1) % 5, list[Tensor]()
    for weight in (model[1].w, model[3].weight):
        weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad))
    with Pipe(model, [2, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint) as pipe:
        _, y = pipe.forward_backward(
            x, target=torch.randn(6, 4), loss_fn=nn.functional.mse_loss, return_outputs=True,
            schedule=schedule,
        )  # fmt: skip
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters())) and len(seen) == 2
    others = [*model.parameters(), x, y, Keeping.kept]
    found = storages(grads)
    assert len({*found}) == len(found) and not {*found} & {*storages(others)}


class Quantised(Tensor):
    """A weight that, like those of quantised training, cannot make others of its kind."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty_like, torch.zeros_like, Tensor.new_empty):
            raise NotImplementedError(func)
        plain: Any = super().__torch_function__
        return plain(func, types, args, kwargs)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_a_class_that_cannot_make_others_get_their_sums(bias: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4, bias), nn.Linear(4, 4, bias))
    for layer in layers:
        layer.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Quantised))
    x = torch.randn(6, 4)
    layers(x).sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    with Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=3) as pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), reduction="sum")
    for parameter, gradient in zip(layers.parameters(), expected, strict=True):
        assert parameter.grad is not None and gradient is not None
        torch.testing.assert_close(
            parameter.grad.as_subclass(Tensor), gradient.as_subclass(Tensor)
        )


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_weights_that_are_dtensors_get_their_sums_beside_others() -> None:
    pairs = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)]
    layers, x = nn.Sequential(*pairs), torch.randn(6, 4)
    layers(x).sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    for pair in pairs:
        parallelize_module(pair, init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})
    with Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=3) as pipe:
        pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), reduction="sum")
    for parameter, gradient in zip(layers.parameters(), expected, strict=True):
        assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor)
        grad: Any = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(whole, gradient)
    assert len({*map(type, layers.parameters())}) == 2


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_gradients_of_a_class_that_wraps_others_are_added_up_in_it(chunks: int) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def found(step: Callable[[Tensor], object]) -> list[Tensor]:
        module.zero_grad()
        make: Any = TwoTensor
        step(make(x.clone(), x + 1))
        grads: list[Any] = [parameter.grad for parameter in module.parameters()]
        assert all(isinstance(grad, TwoTensor) for grad in grads)
        return [each for grad in grads for each in (grad.a, grad.b)]

    def loss_fn(y: Tensor, target: Tensor | None) -> Tensor:
        return y.sin().sum()

    expected = found(lambda x: torch.autograd.backward(loss_fn(module(x), None)))
    with Pipe(module, [2, 1], devices=["cpu", "cpu"], chunks=chunks) as pipe:
        step = partial(pipe.forward_backward, target=None, loss_fn=loss_fn, reduction="sum")
        torch.testing.assert_close(found(step), expected)
