"""Compares what ``plan_for`` predicts with steps on simulated GPUs: virtual time, and peaks.

::

    python benchmarks/simulated_plan_for.py --check      # exit with 1 when a bar is missed

**Linears** are sixteen ``Linear(256)`` with ``Tanh`` on four devices, as in
``simulated_schedules.py``; layers are measured in virtual time, too. All candidates that fit run,
and their order by predicted and by measured time is compared. **Peaks** are those of a U-Net, a GPT
and a ResNet, in lockstep, where they are the same in each run; *worst* is the prediction of the
device that is farthest off. *Cut* is the same as a module with a forward of its own, for
``pipeline``.

pipert itself runs; only the devices are simulated, so nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / each) for each in ("benchmarks", "", "examples")]

from tests import simulated_gpus  # noqa: E402

GPUS = simulated_gpus.start()

# isort: split
import torch  # noqa: E402
from _measure import Row, header, report, verdict  # noqa: E402
from models import gpt  # noqa: E402
from models.resnet import resnet  # noqa: E402
from models.unet import unet  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import pipert  # noqa: E402
from pipert.balance import calls, measure  # noqa: E402
from pipert.planning import Candidate, search  # noqa: E402
from tests.devices.lockstep import in_lockstep  # noqa: E402

__all__ = ["main"]

OFF = 0.05  # of a time
PEAKS = 0.95, 1.2
DEVICES = [f"cuda:{k}" for k in range(4)]


def square(y: Tensor, _: object = None) -> Tensor:
    """Computes the loss of the Linears."""
    return y.square().mean()


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """Computes the loss of a GPT."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Cut(nn.Module):
    """The layers of a Sequential, called by a forward of its own."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        """Calls each layer."""
        for layer in self.layers:
            x = layer(x)
        return x


def run(module: nn.Module, each: Candidate, *args: Any) -> tuple[float, list[int]]:
    """Takes a step as a candidate says; returns seconds of virtual time, and peaks."""
    x, target, loss_fn = args
    options: Any = {
        "devices": each.devices, "chunks": each.chunks, "checkpoint": each.checkpoint,
        "deferred_batch_norm": False,
    }  # fmt: skip
    with (
        pipert.Pipe(copy.deepcopy(module), each.balance, **options)
        if isinstance(module, nn.Sequential)
        else pipert.pipeline(copy.deepcopy(module), each.cuts, **options)
    ) as pipe:
        for device in DEVICES:
            torch.cuda.reset_peak_memory_stats(device)
        GPUS.reset_time()
        pipe.forward_backward(x, target=target, loss_fn=loss_fn, schedule=each.schedule)
        seconds = GPUS.makespan() * 1e-6
        return seconds, [torch.cuda.max_memory_allocated(device) for device in DEVICES]


def virtual(device: torch.device) -> float:
    """Reads the clock of the simulation, in seconds."""
    torch.cuda.synchronize(device)
    return float(GPUS.makespan()) * 1e-6


def times() -> list[Row]:
    """Compares times of the Linears."""
    GPUS.rates(launch_us=0, memory_gbps=1e6, link_gbps=12, tflops=0.5)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)]
    plain, x = nn.Sequential(*layers), torch.randn(2048, 256, device="cuda:0")
    table = []
    ways = [(plain, "9MiB"), (plain, "7MiB"), (plain, "6MiB"), (Cut(plain), "9MiB")]
    for module, memory in ways:
        with (
            mock.patch.object(measure, "now", virtual),
            mock.patch.object(search, "now", virtual),
            mock.patch.object(calls, "now", virtual),
        ):
            found = pipert.plan_for(
                module, x, memory=memory, loss_fn=square, devices=DEVICES, best=8
            )
        measured = [run(module, each, x, None, square)[0] for each in found]
        pairs = list(zip(found, measured, strict=True))
        ratios = [each.seconds / seconds for each, seconds in pairs]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        in_order = all(a <= 1.001 * b for a, b in zip(measured, measured[1:], strict=False))
        memory += ", cut" * isinstance(module, Cut)
        missed = [f"{memory}: predicted {worst:.3f} of a time"] * (abs(worst - 1) > OFF)
        missed += [f"{memory}: the candidates are in another order"] * (not in_order)
        best = found[0]
        cells = f"{best.schedule}, chunks={best.chunks}", f"{1e3 * measured[0]:.2f}"
        table.append(Row((memory, *cells, f"{worst:.3f}", str(in_order)), tuple(missed)))
    return table


def subjects() -> dict[str, tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]]:
    """Makes the models, their mini-batches, and losses."""
    tokens = torch.randint(256, (16, 32))
    config = gpt.ModelConfig(layers=8, width=64, context=32)
    images = torch.rand(8, 3, 64, 64)
    return {
        "U-Net": (unet(2, 8), images, torch.rand(8, 1, 64, 64), functional.mse_loss),
        "GPT, cut": (Cut(gpt.build_model(config)), tokens, tokens, of_tokens),
        "GPT": (gpt.build_model(config), tokens, tokens, of_tokens),
        "ResNet": (
            resnet((1, 1, 2, 1), num_classes=10, channels=8), images, torch.randint(10, (8,)),
            functional.cross_entropy,
        ),
    }


def peaks(name: str) -> list[Row]:
    """Compares peaks of one model."""
    module, x, target, loss_fn = subjects()[name]
    gc.collect()
    before = [torch.cuda.memory_allocated(device) for device in DEVICES]
    x, target = x.to(DEVICES[0]), target.to(DEVICES[-1])
    found = pipert.plan_for(
        module, x, memory="1GiB", loss_fn=loss_fn, target=target, devices=DEVICES, chunks=[8],
        best=99,
    )  # fmt: skip
    table = []
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        for mode in ("never", "always"):
            (each,) = (e for e in found if (e.schedule, e.checkpoint) == (schedule, mode))
            gc.collect()  # nothing older may stay or be freed later
            with in_lockstep():
                _, found_peaks = run(module, each, x, target, loss_fn)
            seen = [peak - other for peak, other in zip(found_peaks, before, strict=True)]
            ratios = [a / b for a, b in zip(each.peaks, seen, strict=True)]
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            missed = (f"{name}, {schedule}, {mode}: {worst:.2f} of a peak",)
            cells = [f"{peak / 2**20:.2f}" for peak in seen]
            row = name, schedule, mode, *cells, f"{worst:.2f}"
            table.append(Row(row, missed * (not PEAKS[0] <= worst <= PEAKS[1])))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if a wait was missing, or under ``--check`` a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(), "Simulated GPUs: nothing here was measured on one.", sep="\n", end="\n\n")
    of_times = ("memory", "fastest", "ms", "worst prediction", "in order")
    missed = report("simulated, times of candidates", of_times, times())
    table = [row for name in subjects() for row in peaks(name)]
    of_peaks = ("model", "schedule", "checkpoint", *(f"{k}, MiB" for k in range(4)), "worst")
    missed += report("simulated, peaks of each device", of_peaks, table)
    return verdict(missed, check=arguments.check, reports=GPUS.reports())


if __name__ == "__main__":
    sys.exit(main())
