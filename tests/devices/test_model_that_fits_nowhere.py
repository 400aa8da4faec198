"""A model that fits on no device, nor on the host: planned, loaded, trained, saved, loaded again.

Its training state is five times what each of eight devices may hold, and its weights four times
what the host may hold beside them.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _malloc import bytes_in_use
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipert
from tests.simulated_gpus.simulation import Simulation

safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints are in its files")

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

BLOCKS, WIDTH, STEPS, MIB = 40, 512, 3, 2**20
WEIGHTS = BLOCKS * (2 * WIDTH * WIDTH + 2 * WIDTH) * 4
DEVICE = 4 * WEIGHTS // 5  # with gradients and the state of AdamW
SHARDS = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(self.first(x).relu())
        return y


class Deep(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(16, WIDTH, generator=made), torch.randn(16, WIDTH, generator=made)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def write_what_is_expected(folder: Path) -> None:
    """Writes a model's shards, and its state after three steps, computed without limits."""
    torch.manual_seed(0)
    model = Deep()
    names = [*model.state_dict()]
    for k in range(SHARDS):
        part = names[k * len(names) // SHARDS : (k + 1) * len(names) // SHARDS]
        state = model.state_dict()
        safetensors.save_file({n: state[n] for n in part}, folder / f"model-{k:02}.safetensors")
    x, target = batch()
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for k in reversed(range(4)):  # as a step sums, which goes backward in the order of 1F1B
            rows = slice(4 * k, 4 * k + 4)
            loss = mse_loss(model(x[rows]), target[rows]) / 4
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.save(model.state_dict(), folder / "expected.pt")


class Host:
    """The bytes of the host's memory in use, without those of simulated devices."""

    def __init__(self, gpus: Simulation) -> None:
        self._gpus, self._most = gpus, 0

    def now(self) -> int:
        """Return the bytes at this moment, at least: devices change theirs meanwhile."""
        before, found, after = self._on_devices(), bytes_in_use(), self._on_devices()
        return found - max(before, after)

    def _on_devices(self) -> int:
        return sum(map(self._gpus.live_bytes, range(8)))

    @contextmanager
    def at_most(self, limit: int) -> Iterator[None]:
        """Check the peak in the block, beyond what there was before, each millisecond."""
        gc.collect()
        before, peak, ended = self.now(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.001):
                peak[0] = max(peak[0], self.now())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        assert peak[0] - before <= limit, f"{(peak[0] - before) / MIB:.1f} MiB on the host"


def train(pipe: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x, target = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.forward_backward(x, target=target, loss_fn=mse_loss)
        optimizer.step()


def test_it_is_planned_loaded_trained_saved_and_loaded_again(
    gpus: Simulation, tmp_path: Path
) -> None:
    write_what_is_expected(tmp_path)
    host, (x, target) = Host(gpus), batch()
    options: Any = {"target": target, "loss_fn": mse_loss, "optimizer": torch.optim.AdamW}
    options |= {"memory": DEVICE, "chunks": 4, "best": 1}
    first = Deep(8)  # whatever runs first imports modules
    with pipert.plan_for(first, x, devices=range(8), **options)[0].make(first) as pipe:
        train(pipe, optimizer_of(pipe), 1)
    del first, pipe
    gc.collect()
    for device in range(8):
        gpus.limit_memory(device, DEVICE)
    with host.at_most(WEIGHTS // 4):
        with pipert.empty_parameters():
            model = Deep()
        plan = pipert.plan_for(model, x, devices=range(8), **options)[0]
        pipe = plan.make(model, load=tmp_path)
    with pipe, host.at_most(WEIGHTS // 4):
        optimizer = optimizer_of(pipe)
        train(pipe, optimizer, STEPS - 1)
        for device, peak in enumerate(plan.peaks):
            assert gpus.peak_bytes(device) <= 1.05 * peak
        torch.save(model.state_dict(), tmp_path / "model.pt")
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    del pipe, model, optimizer
    gc.collect()
    with host.at_most(WEIGHTS // 4):
        with pipert.empty_parameters():
            model = Deep()
        plan = pipert.plan_for(model, x, devices=range(1, 8), **options)[0]
        pipe = plan.make(model, load=torch.load(tmp_path / "model.pt", mmap=True).get)
        with pipe:
            optimizer = optimizer_of(pipe)
            optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", mmap=True))
            train(pipe, optimizer, 1)
            expected = torch.load(tmp_path / "expected.pt", mmap=True)
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(tensor.cpu(), expected[name], rtol=1e-3, atol=2e-6)


def test_a_full_device_is_named_with_the_plan_and_nothing_is_left(
    gpus: Simulation, tmp_path: Path
) -> None:
    plain, (x, target) = Deep(8), batch()
    safetensors.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    options: Any = {"target": target, "loss_fn": mse_loss, "memory": DEVICE, "chunks": 4}
    with pipert.empty_parameters():
        model = Deep(8)
    plan = pipert.plan_for(model, x, devices=range(2), **options)[0]
    gc.collect()
    before = [gpus.live_bytes(device) for device in range(2)]
    gpus.limit_memory(1, before[1] + 3 * WIDTH * WIDTH * 4)  # of eight weights
    with pytest.raises(torch.OutOfMemoryError) as caught:
        plan.make(model, load=tmp_path)
    told = "\n".join(caught.value.__notes__)
    assert "blocks." in told and "to cuda:1" in told and plan.report() in told
    del caught
    gc.collect()
    assert [gpus.live_bytes(device) for device in range(2)] == before
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
