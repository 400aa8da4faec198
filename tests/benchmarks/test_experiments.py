"""Tests the models and settings of the paper's experiments."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchgpipe", reason="the experiments run torchgpipe beside pipert")
pytest.importorskip("tqdm", reason="the experiments show their progress with tqdm")

from _models import RESNET, UNET, Model, for_torchgpipe  # noqa: E402
from _paper import ABLATION, AMOEBANET_SPEED, UNET_SPEED, Setting  # noqa: E402
from torchgpipe import GPipe  # noqa: E402

from pipert import Pipe  # noqa: E402


@pytest.mark.parametrize(
    ("settings", "layers"), [(UNET_SPEED, 241), (AMOEBANET_SPEED, 24), (ABLATION, 241)]
)
def test_a_balance_of_the_paper_takes_all_layers(
    settings: tuple[Setting, ...], layers: int
) -> None:
    assert {sum(setting.balance) for setting in settings} == {layers}


@pytest.mark.slow
@pytest.mark.parametrize("model", [UNET, RESNET], ids=lambda model: model.name)
def test_the_model_for_torchgpipe_computes_the_same(model: Model) -> None:
    module = model.at_width(0.0625).eval()
    x = torch.rand(2, *model.image(0.0625))
    half = len(module) // 2
    balance = [half, len(module) - half]
    peer = GPipe(for_torchgpipe(module), balance, devices=["cpu"] * 2, chunks=2)
    with torch.no_grad(), Pipe(module, balance, devices=["cpu"] * 2, chunks=2) as pipe:
        torch.testing.assert_close(peer(x), pipe(x))
