"""Operators: values and gradients on a device are the CPU's, for what is more than a CPU kernel."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.simulated_gpus.simulation import Simulation

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda:1")


@pytest.fixture(autouse=True)
def _simulated(gpus: Simulation) -> Iterator[None]:
    yield


def randn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def outputs(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [t for part in value for t in outputs(part)]


def channels_last(module: Any) -> Any:
    return module.to(memory_format=torch.channels_last)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(5, 6, num_layers=2, bidirectional=True), lambda: randn(4, 3, 5)),
    "lstm without bias": (lambda: nn.LSTM(5, 6, bias=False), lambda: randn(4, 3, 5)),
    "lstm cell": (lambda: nn.LSTMCell(5, 6), lambda: randn(3, 5)),
    "gru": (lambda: nn.GRU(5, 6, batch_first=True), lambda: randn(4, 3, 5)),
    "gru without bias": (lambda: nn.GRU(5, 6, bias=False), lambda: randn(4, 3, 5)),
    "rnn": (lambda: nn.RNN(5, 6), lambda: randn(4, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, stride=2), lambda: randn(2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), lambda: randn(2, 4, 9, 8)),
    "conv2d channels last": (
        lambda: channels_last(nn.Conv2d(4, 6, 3)),
        lambda: randn(2, 4, 9, 8).to(memory_format=torch.channels_last),
    ),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), lambda: randn(2, 4, 9, 8)),
    "depthwise1d": (lambda: nn.Conv1d(4, 8, 3, groups=4), lambda: randn(2, 4, 9)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2), lambda: randn(2, 4, 9, 8)),
    "grouped": (lambda: nn.Conv2d(4, 6, 1, groups=2, bias=False), lambda: randn(2, 4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: randn(2, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), lambda: randn(2, 4, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(4), lambda: randn(3, 4, 5, 5)),
    "batch norm, eval": (lambda: nn.BatchNorm2d(4).eval(), lambda: randn(3, 4, 5, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: randn(3, 4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), lambda: randn(3, 5)),
    "max pool": (lambda: nn.MaxPool2d(2), lambda: randn(2, 4, 6, 6)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(2), lambda: randn(2, 4, 6, 6)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), lambda: randn(2, 4, 3, 3)),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda: randn(4, 3, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0), lambda: randn(4, 3, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_the_same_as_on_the_cpu(name: str) -> None:
    make, data = MODULES[name]
    here = make()
    there = copy.deepcopy(here).to(DEVICE)
    results = []
    for module, device in ((here, torch.device("cpu")), (there, DEVICE)):
        x = data().to(device).requires_grad_()
        arguments = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        out = outputs(module(*arguments))
        assert all(t.device == device for t in out)
        torch.autograd.backward(sum((t.float() ** 2).sum() for t in out))  # type: ignore[arg-type]
        gradients = [p.grad for p in module.parameters()]
        results.append([*out, x.grad, *gradients, *module.buffers()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-4, atol=1e-4)


def q() -> Tensor:
    return randn(2, 2, 5, 4)


def spd() -> Tensor:
    x = randn(4, 4)
    return x @ x.t() + 4 * torch.eye(4)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "index_put_": lambda x: x.clone().index_put_((torch.tensor([1, 0], device=x.device),), x.sum()),
    "mask": lambda x: x[x > 0],
    "index by the host's": lambda x: x[torch.tensor([1, 0])],
    "scatter": lambda x: x.scatter(0, torch.zeros_like(x, dtype=torch.long), x * 2),
    "gather": lambda x: x.gather(-1, torch.zeros_like(x, dtype=torch.long)),
    "sort": lambda x: x.sort(dim=-1)[0],
    "topk": lambda x: x.topk(2, dim=-1)[0],
    "cumsum": lambda x: x.cumsum(-1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "einsum": lambda x: torch.einsum("abij,abkj->abik", x, x),
    "cross entropy": lambda x: F.cross_entropy(x.flatten(1), torch.tensor([1, 2], device=x.device)),
    "complex": lambda x: torch.view_as_real(torch.fft.fft(torch.complex(x, x)).conj() * 2j),
    "real": lambda x: torch.complex(x, x * 2).conj().imag,
    "solve": lambda x: torch.linalg.solve(spd().to(x.device), x[0, 0, :4, :4]),
    "cholesky": lambda x: torch.linalg.cholesky(spd().to(x.device) + x[0, 0, 0, 0] * 0),
    "svd": lambda x: torch.linalg.svdvals(x),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "stack": lambda x: torch.stack(x.unbind(1)).movedim(0, 1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "unfold": lambda x: F.unfold(x, 2),
    "out=": lambda x: torch.add(x.detach(), 1, out=torch.empty(0, device=x.device)) * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_the_same_as_on_the_cpu(name: str) -> None:
    results = []
    for device in (torch.device("cpu"), DEVICE):
        x = q().to(device).requires_grad_()
        (out,) = outputs(FUNCTIONS[name](x))
        assert out.device == device
        out.square().sum().backward()
        results.append([out, x.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-4, atol=1e-4)
