"""Tests ``nn.TransformerEncoder`` cut inside: in ``eval()`` its fast path sets padding to 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipert
from tests.helpers.ways import grads_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class Derived(nn.TransformerEncoder):
    """Has own code of which nothing is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 1.0


class Probe(nn.Module):
    def __init__(self, kind: type[nn.TransformerEncoder] = nn.TransformerEncoder) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = kind(layer, 4, norm=nn.LayerNorm(8)).eval().requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(self.before(x), src_key_padding_mask=padding).mean(1))
        return y


GENERATOR = torch.Generator().manual_seed(0)
X, TARGET = torch.randn(6, 7, 8, generator=GENERATOR), torch.arange(6) % 3
PADDING = torch.arange(7) >= torch.tensor([5, 4, 7, 6, 7, 3])[:, None]


def loss_of(model: Any, how: str, x: Tensor = X) -> Tensor:
    if how == "1f1b":
        loss: Tensor = model.forward_backward(x, PADDING, target=TARGET, loss_fn=F.cross_entropy)
        return loss
    with torch.set_grad_enabled(how != "no_grad"):
        loss = F.cross_entropy(model(x, PADDING), TARGET)
        if how != "no_grad":
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@pytest.mark.parametrize("how", ["call", "1f1b", "no_grad"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("trained", [False, True])
def test_padding_is_computed_as_in_the_plain_model(
    how: str, checkpoint: str, trained: bool
) -> None:
    plain = Probe()
    plain.encoder.requires_grad_(trained)
    for cuts in (["encoder.layers.2"], ["encoder.layers.0", "encoder.norm"]):
        model, expected = copy.deepcopy(plain), copy.deepcopy(plain)
        devices = ["cpu"] * (len(cuts) + 1)
        with pipert.pipeline(model, cuts, devices=devices, chunks=3, checkpoint=checkpoint) as pipe:
            loss = loss_of(pipe, how)
        torch.testing.assert_close(loss, loss_of(expected, how.replace("1f1b", "")))
        assert model.head.weight.grad is not None or how == "no_grad"
        torch.testing.assert_close(grads_of(model), grads_of(expected))


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(Derived, "encoder.layers.2"), (nn.TransformerEncoder, "encoder.layers.1.norm2")],
)
def test_where_it_would_not_be_a_step_is_refused(kind: Any, cut: str) -> None:
    model = Probe(kind)
    with pipert.pipeline(model, [cut], devices=["cpu"] * 2, chunks=3) as pipe:
        with pytest.raises(RuntimeError, match="make it with enable_nested_tensor=False"):
            loss_of(pipe, "1f1b")
        model.encoder.use_nested_tensor = False
        torch.testing.assert_close(loss_of(pipe, "1f1b"), loss_of(copy.deepcopy(model), ""))
        model.encoder.use_nested_tensor = True
        loss_of(pipe, "1f1b", X.clone().requires_grad_())  # the plain model has no fast path either


@pytest.mark.multi_gpu
@pytest.mark.parametrize("how", ["call", "1f1b"])
def test_a_trained_encoder_is_cut_inside_on_gpus(how: str) -> None:
    plain = Probe().train()
    for module in plain.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.p = module.dropout = 0.0
    plain.before.requires_grad_()
    plain.encoder.requires_grad_()
    model, devices = copy.deepcopy(plain), ["cuda:0", "cuda:1"]
    cuts = ["encoder.layers.2"]
    with pipert.pipeline(model, cuts, devices=devices, chunks=3) as pipe:
        if how == "1f1b":
            loss_of(pipe, how)
        else:
            loss = F.cross_entropy(pipe(X, PADDING), TARGET.to("cuda:1"))
            loss.backward()  # type: ignore[no-untyped-call]
    loss_of(plain, "")
    torch.testing.assert_close(grads_of(model), grads_of(plain), check_device=False)
