"""Lightning trains a model in a pipe as a plain one, with the strategy of docs/fine_tuning.md."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from pipert import pipeline
from tests.any_model.in_place import CUTS, a_model

lightning = pytest.importorskip("lightning.pytorch", reason="its trainer trains the model")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PAGE = Path(__file__).parents[2] / "docs" / "fine_tuning.md"
CPUS, GPUS = ("cpu", "cpu", "cpu"), ("cuda:0", "cuda:1", "cuda:1")
places = pytest.mark.parametrize("devices", [CPUS, pytest.param(GPUS, marks=pytest.mark.multi_gpu)])


@functools.cache
def strategy() -> Any:
    """Returns the class that the page shows."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (shown,) = [block for block in blocks if "(SingleDeviceStrategy)" in block]
    assert len([line for line in shown.splitlines()[1:] if line]) <= 10
    names: dict[str, Any] = {}
    exec(compile(shown, str(PAGE), "exec"), names)
    return names["InPlace"]


class Tuned(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Is optimized in one of three ways: ``"automatic"``, ``"manual"``, or ``"step"``."""

    def __init__(self, way: str, devices: tuple[str, ...] | None) -> None:
        super().__init__()
        self.model, self.way, self.losses = a_model(), way, list[float]()
        self.automatic_optimization = way == "automatic"
        self.piped = [pipeline(self.model, CUTS, devices=devices, chunks=2)] if devices else []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, target = batch
        if self.way == "step" and self.piped:
            target = target.to(self.piped[0].devices[-1])
            loss: Tensor = self.piped[0].forward_backward(x, target=target, loss_fn=mse_loss)
        else:
            loss = mse_loss(self.model(x), target)
        if self.way != "automatic":
            if loss.requires_grad:
                self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Trained:
    """A training of some steps, from a checkpoint if one is given."""

    def __init__(
        self, way: str, devices: tuple[str, ...] | None, steps: int, checkpoint: Path | None = None
    ) -> None:
        self.module = Tuned(way, devices)
        options: dict[str, Any] = {"accelerator": "cpu"}
        if devices:
            (pipe,) = self.module.piped
            kind = "gpu" if pipe.devices[0].type == "cuda" else "cpu"
            options = {"accelerator": kind, "strategy": strategy()(pipe.devices[0])}
        self.trainer = lightning.Trainer(
            devices=1, max_steps=steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        batches = [
            torch.randn(8, 6, columns, dtype=torch.float64, generator=generator)
            for columns in (4, 2)
        ]
        data = DataLoader(TensorDataset(*batches), batch_size=None)
        self.trainer.fit(self.module, data, ckpt_path=checkpoint)
        self.losses = self.module.losses
        self.state = self.trainer.optimizers[0].state_dict()["state"]
        for pipe in self.module.piped:
            assert pipe.statistics().runs == len(self.losses)
            placed = {parameter.device for parameter in self.module.parameters()}
            assert placed == {torch.device(device) for device in devices or ()}
            for parameter, state in self.trainer.optimizers[0].state.items():
                assert state["exp_avg"].device == parameter.device

    def assert_same(self, other: Trained) -> None:
        assert self.losses and self.losses == pytest.approx(other.losses, rel=1e-9)
        for mine, its in (
            (self.module.state_dict(), other.module.state_dict()), (self.state, other.state),
        ):  # fmt: skip
            torch.testing.assert_close(mine, its, check_device=False)

    def close(self) -> None:
        for pipe in self.module.piped:
            pipe.close()


@places
@pytest.mark.parametrize("way", ["automatic", "manual", "step"])
def test_lightning_trains_a_model_in_a_pipe_as_the_plain_one(
    devices: tuple[str, ...], way: str
) -> None:
    plain, piped = Trained(way, None, 5), Trained(way, devices, 5)
    piped.assert_same(plain)
    piped.close()


@places
def test_a_checkpoint_goes_on_in_a_pipe_and_without_one(
    devices: tuple[str, ...], tmp_path: Path
) -> None:
    begun = Trained("automatic", devices, 2)
    begun.trainer.save_checkpoint(tmp_path / "at.ckpt")
    begun.close()
    rest = [Trained("automatic", each, 5, tmp_path / "at.ckpt") for each in (devices, None)]
    rest[0].assert_same(rest[1])
    assert len(rest[0].losses) == 3
    rest[0].close()
