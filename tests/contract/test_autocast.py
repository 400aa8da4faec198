"""Tests training under autocast, wherever it is entered, against the plain module's under autocast.

Autocast keeps the casts of weights in a cache of the process, which all threads of a pipe share.
So the steps of a pipe are taken without any other autocast in between, which would clear the cache.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import pipert
from tests.helpers.ways import CALL, MODES

SCHEDULES = [CALL, "gpipe", "1f1b", "eager-1f1b"]

Region = AbstractContextManager[object]


class Where(NamedTuple):
    """Where autocast is entered, and whether it caches."""

    caller: bool = False
    own_code: bool = False
    layers: bool = False
    caches: bool = True

    def region(self, is_entered: bool, kind: str, dtype: torch.dtype) -> Region:
        if not is_entered:
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype, cache_enabled=self.caches)


CALLER = Where(caller=True)
WHERE = {
    "caller": CALLER,
    "caller without cache": Where(caller=True, caches=False),
    "own code": Where(own_code=True),
    "layers": Where(layers=True),
    "caller and layers": Where(caller=True, layers=True),
    "caller and own code": Where(caller=True, own_code=True),
}


class How(NamedTuple):
    """A kind of pipe, and where autocast is entered."""

    kind: str
    where: str


HOWS = [How("any model", where) for where in WHERE]
HOWS += [How("layers", where) for where in WHERE if not WHERE[where].own_code]


class Block(nn.Module):
    """Uses a weight of its own and a shared one; its norm is outside of autocast."""

    def __init__(self, shared: nn.Linear, where: Where, dtype: torch.dtype) -> None:
        super().__init__()
        self.own, self.shared, self.norm = nn.Linear(8, 8), shared, nn.LayerNorm(8)
        self._where, self._dtype = where, dtype

    def forward(self, x: Tensor) -> Tensor:
        with self._where.region(self._where.layers, x.device.type, self._dtype):
            y = self.shared(torch.tanh(self.own(x)))
            with torch.autocast(x.device.type, enabled=False):
                y = self.norm(y.float())
            found: Tensor = x + F.linear(y, self.own.weight)
        return found.float()


class Model(nn.Module):
    """Runs blocks in its own ``forward``."""

    def __init__(self, where: Where, dtype: torch.dtype) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.blocks = nn.Sequential(*[Block(shared, where, dtype) for _ in range(4)])
        self._where, self._dtype = where, dtype

    def forward(self, x: Tensor) -> Tensor:
        with self._where.region(self._where.own_code, x.device.type, self._dtype):
            for block in self.blocks:
                x = block(x)
        return x.float()


class Step(NamedTuple):
    """What a step began with, and its gradients."""

    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor
    grads: dict[str, Tensor]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y.float(), target.to(y.device))


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {name: grad.cpu().clone() for name, grad in grads.items() if grad is not None}


def train(
    module: nn.Module, pipe: Any, schedule: str, region: Any, scaler: GradScaler | None, steps: int
) -> Iterator[Step]:
    """Trains ``module`` in ``pipe``, and yields each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for _ in range(steps):
        weights = {name: w.cpu().clone() for name, w in module.state_dict().items()}
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        optimizer.zero_grad()
        if schedule == CALL:
            with region():
                loss = loss_of(pipe(x), target)
            scaled: Any = loss if scaler is None else scaler.scale(loss)
            scaled.backward()
        else:
            with region():
                pipe.forward_backward(
                    x, target=target, loss_fn=loss_of, schedule=schedule, loss_scale=scaler
                )
        if scaler is not None:
            scaler.unscale_(optimizer)
        yield Step(weights, x, target, grads_of(module))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def assert_plain(taken: list[Step], plain: nn.Module, region: Any, device: torch.device) -> None:
    """Asserts that steps had the plain module's gradients within the rounding of autocast."""
    plain.to(device)
    for weights, x, target, grads in taken:
        plain.load_state_dict(weights)
        plain.zero_grad()
        with region():
            loss = loss_of(plain(x.to(device)), target)
        loss.backward()  # type: ignore[no-untyped-call]
        expected = grads_of(plain)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            error = (grads[name] - grad).norm() / grad.norm()
            assert error < 0.03, f"{name}: {error:.3f}"


@pytest.fixture(
    params=[
        pytest.param(["cpu"] * 2, id="cpu"),
        pytest.param(["cuda:0", "cuda:1"], id="two GPUs", marks=pytest.mark.multi_gpu),
        pytest.param([f"cuda:{k}" for k in range(4)], id="four GPUs", marks=pytest.mark.multi_gpu),
    ]
)
def devices(request: pytest.FixtureRequest) -> list[str]:
    found: list[str] = request.param
    if found[0] != "cpu" and torch.cuda.device_count() < len(found):
        pytest.skip(f"needs {len(found)} GPUs")
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", HOWS, ids=["-".join(how) for how in HOWS])
def test_gradients_are_the_plain_module_s_under_autocast(
    how: How, dtype: torch.dtype, mode: str, schedule: str, devices: list[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    is_layered, where = how.kind == "layers", WHERE[how.where]
    model = Model(where, dtype)
    module: nn.Module = model.blocks if is_layered else model
    plain, device = copy.deepcopy(module), torch.device(devices[0])
    settings: Any = {"devices": devices, "chunks": 4, "checkpoint": mode}
    first = [4 // len(devices) * j for j in range(1, len(devices))]
    if is_layered:
        pipe: Any = pipert.Pipe(model.blocks, [4 // len(devices)] * len(devices), **settings)
    else:
        pipe = pipert.pipeline(model, [f"blocks.{k}" for k in first], **settings)

    def region() -> Region:
        return where.region(where.caller, device.type, dtype)

    scaler = GradScaler(device.type, init_scale=256.0) if dtype is torch.float16 else None
    steps = 6 if request.config.option.sweep else 4
    with pipe:
        taken = list(train(module, pipe, schedule, region, scaler, steps))
    torch.clear_autocast_cache()
    assert_plain(taken, plain, region, device)


class Halves(nn.Module):
    """Runs two layers under autocast in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = self.b(torch.tanh(self.a(x)))
        return found.float()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_recomputed_under_the_model_s_own_autocast_leaves_no_cast_behind(
    schedule: str,
) -> None:
    """The next step would compute with the weights of this one."""
    module, x = Halves(), torch.randn(4, 8)
    settings: Any = {"devices": ["cpu"] * 2, "chunks": 2, "checkpoint": "always"}
    with pipert.pipeline(module, ["b"], **settings) as pipe:
        for _ in train(module, pipe, schedule, contextlib.nullcontext, None, 1):
            pass
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(3)
            found = pipe(x)
    torch.clear_autocast_cache()
    torch.testing.assert_close(found, module(x), rtol=0.01, atol=0.01)
