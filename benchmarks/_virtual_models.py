"""Builds small models to run in virtual time, and the machines that suit them.

A narrow model moves more bytes per operation than a wide one. Copies and memory should have the
relative cost that they have for a model of the *full* size on a Tesla P40 with PCIe 3.0 (12
TFLOP/s, 346 GB/s, 12 GB/s per link and direction). So the simulated devices' rates are those of the
P40 times the ratio of a narrow sample to a full-size one: in FLOPs, and in bytes between layers.
Then a sample takes as long as a full-size one does on that machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from _models import AMOEBANET, UNET, Model, for_torchgpipe
from _virtual import GPUS, Case, Machine
from models.gpt import VOCABULARY, ModelConfig, build_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipert.balance import balance_by_cost, layer_times, measure
from pipert.batch.tensors import tensors_of

__all__ = ["P40", "WORKLOADS", "Workload"]

P40 = Machine(tflops=12, memory_gbps=346, link_gbps=12)
SCALE = 1 / 16  # fraction of the paper's width
SLEEP_US = 100.0  # microseconds of a forward; a backward takes twice as long
SEED = 0

Build = Callable[[], nn.Sequential]


@dataclass(frozen=True)
class Workload:
    """A model, a mini-batch, and the machine to run them on.

    Args:
        build: makes the model, each time with the same weights.
        batch: makes the given number of samples.
        rows: samples in a mini-batch, or as many as micro-batches if these are more.
        full: makes the full-size model and a sample for it, on the meta device. The machine's rates
            are scaled by it; ``None`` leaves them unscaled.
        machine: the unscaled rates.
        for_peer: see :class:`Case`.
        sizes: n and m of each case; the large models take minutes for each.
    """

    name: str
    build: Build
    batch: Callable[[int], Tensor]
    rows: int
    full: Callable[[], tuple[nn.Sequential, Tensor]] | None = None
    machine: Machine = P40
    for_peer: Callable[[nn.Sequential], nn.Sequential] = lambda module: module
    sizes: Sequence[tuple[int, int]] = ((1, 8), (2, 8), (4, 16), (8, 32))

    def case(self, n: int, m: int) -> Case:
        """Makes a case with the best balance for the layers' virtual seconds."""
        balance = tuple(balance_by_cost(self.times(), n))
        rows = max(m, self.rows)
        return Case(self.build, partial(self.batch, rows), balance, m, self.for_peer)

    @cache  # noqa: B019  the few workloads live as long as the process
    def rates(self) -> Machine:
        """Returns the simulated machine."""
        if self.full is None:
            return self.machine
        with torch.device("meta"):
            small = _work(self.build().eval(), self.batch(1).to("meta"))
            full = _work(*self.full())
        flops, size = (a / b for a, b in zip(small, full, strict=True))
        machine = self.machine
        return Machine(
            flops * machine.tflops, size * machine.link_gbps, size * machine.memory_gbps
        )

    @cache  # noqa: B019
    def times(self) -> list[float]:
        """Returns the virtual seconds of each layer."""
        GPUS.rates(**self.rates().rates())
        with mock.patch.object(measure, "now", _now):
            return layer_times(self.build(), self.batch(self.rows), timeout=0, device="cuda:0")


def _now(device: torch.device) -> float:
    return 1e-6 * GPUS.time(device.index)


def _work(module: nn.Sequential, sample: Tensor) -> tuple[float, float]:
    """Counts the FLOPs of a forward, and the bytes of the layers' outputs."""
    value, size = sample, 0
    with FlopCounterMode(display=False) as counter:
        for layer in module:
            value = layer(value)
            storages = [t.untyped_storage() for t in tensors_of(value)[0]]
            size += sum({s._cdata: s.nbytes() for s in storages}.values())
    return counter.get_total_flops(), size


# Stages that sleep --------------------------------------------------------------------------------


class Sleep(nn.Module):
    """A layer that keeps its device busy, and whose output is too small to count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x + self.weight)  # type: ignore[no-untyped-call]
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # a layer that saves nothing would not be recomputed
        _sleep(len(x) * SLEEP_US)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.saved_tensors
        _sleep(2 * len(grad) * SLEEP_US)
        return grad


def _sleep(us: float) -> None:
    sleep: Any = torch.cuda._sleep
    sleep(int(us * 2000))  # cycles of the simulated clock


# The others ---------------------------------------------------------------------------------------


def _seeded(build: Build) -> nn.Sequential:
    torch.manual_seed(SEED)
    return build()


def _random(shape: tuple[int, ...], rows: int) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(SEED))


def _tokens(context: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCABULARY, (rows, context), generator=generator)


def _sleeping() -> nn.Sequential:
    return nn.Sequential(*[Sleep() for _ in range(16)])


def _linears(width: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(16)]
    return nn.Sequential(*layers)


def _convolutions(channels: int) -> nn.Sequential:
    layers = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(16)]
    return nn.Sequential(*layers)


def _full_convolutions() -> tuple[nn.Sequential, Tensor]:
    return _convolutions(512).to("meta"), torch.empty(1, 512, 32, 32, device="meta")


def _gpt(width: int, context: int) -> nn.Sequential:
    return build_model(ModelConfig(context, width, layers=14, heads=width // 16))


def _full_gpt() -> tuple[nn.Sequential, Tensor]:
    return _gpt(1600, 1024), torch.empty(1, 1024, dtype=torch.int64, device="meta")


def _out_of_place(model: Model) -> nn.Sequential:
    """Builds a small model without in-place layers; no torchgpipe partition may begin with one."""
    module = model.at_width(SCALE)
    for layer in module.modules():
        if isinstance(layer, nn.LeakyReLU):
            layer.inplace = False
    return module


def _of_paper(model: Model, rows: int) -> Workload:
    def full() -> tuple[nn.Sequential, Tensor]:
        return model.at_width(1.0).eval(), torch.empty(1, *model.image(1.0), device="meta")

    build = partial(_seeded, partial(_out_of_place, model))
    batch = partial(_random, model.image(SCALE))
    sizes = tuple(product((2, 4, 8), (1, 4, 32)))
    return Workload(model.name, build, batch, rows, full, for_peer=for_torchgpipe, sizes=sizes)


_LINEAR_MACHINE = Machine(tflops=0.5, memory_gbps=1000, link_gbps=12)

WORKLOADS = {
    "sleeping": Workload("16 stages that sleep", _sleeping, partial(_random, (1,)), 32),
    "linears": Workload(
        "16 of Linear(256), Tanh",
        *(partial(_seeded, partial(_linears, 256)), partial(_random, (256,)), 2048),
        machine=_LINEAR_MACHINE,
    ),
    "convolutions": Workload(
        "16 convolutions, 3x3",
        *(partial(_seeded, partial(_convolutions, 16)), partial(_random, (16, 16, 16)), 32),
        _full_convolutions,
    ),
    "gpt": Workload(
        "a GPT of 14 blocks",
        *(partial(_seeded, partial(_gpt, 64, 32)), partial(_tokens, 32), 32),
        _full_gpt,
    ),
    "unet": _of_paper(UNET, 16),
    "amoebanet": _of_paper(AMOEBANET, 16),
}
