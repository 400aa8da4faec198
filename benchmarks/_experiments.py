"""Runs the paper's experiments: reads options, measures layers, prints both tables, writes JSON.

Each experiment prints the paper's measurements beside predictions for pipert from the model's
layers, and measures pipert and torchgpipe where there are enough devices.

**The predictions.** The layers are measured on the first device, at ``--scale`` times the
paper's width and image size. ``_simulator.py`` runs pipert's schedule with these seconds. Bytes of
copies and memory are always those of the paper's sizes, so the seconds must match them: all are
divided by one number, the *speed*, chosen so that the first row has the paper's throughput. The
speed stands for the P40; the other rows are predictions. Without it, copies would look free beside
the seconds of a CPU. ``--clock device`` leaves the seconds unscaled, which is right for a GPU at
``--scale paper`` and the default there.

Not modelled: the lower efficiency of kernels on small micro-batches, the host's launch time, the
loss, the optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _layer_costs import Bytes, Times, layer_bytes, layer_times
from _measure import Row, cell, header, one_thread_everywhere, report
from _models import Model
from _paper import Setting
from _predict import Link, Prediction, best_balance, calibrated, predict
from _steps import measured
from tqdm import tqdm

__all__ = [
    "GIB", "Experiment", "assumptions", "costs_of", "options", "parse", "run", "speed_of", "write",
]  # fmt: skip

SCALES = {"paper": 1.0, "laptop": 0.25, "tiny": 0.0625}
GIB = 2**30


@dataclass(frozen=True)
class Experiment:
    """A model and the settings to try.

    Args:
        baseline: samples per second that the first setting is calibrated to.
        gpipe: whether the paper quotes GPipe's figures for it.
    """

    title: str
    model: Model
    settings: Sequence[Setting]
    baseline: float
    gpipe: bool = False


def options(description: str | None) -> argparse.ArgumentParser:
    """Defines the options that all experiments have."""
    cuda = torch.cuda.device_count()
    names = ",".join(f"cuda:{k}" for k in range(cuda)) or "cpu,cpu"
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--scale", type=_scale, default="paper" if cuda else "laptop",
        help="fraction of the paper's width and image size: paper, laptop, tiny or up to 1")
    add("--devices", type=_devices, default=names, help="devices to measure on")
    add("--steps", type=_positive, default=3, help="how often to measure layers and steps")
    add("--bandwidth", type=float, default=10.0, help="GB/s of a simulated link, each way")
    add("--latency", type=float, default=20.0, help="microseconds of a simulated copy")
    add("--clock", choices=("paper", "device"), default="device" if cuda else "paper",
        help="speed of the simulated devices: the paper's or that of the first device")
    add("--json", type=Path, help="file for all figures")
    return parser  # fmt: skip


def _scale(text: str) -> float:
    fraction = SCALES.get(text) or float(text)
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f"must be {', '.join(SCALES)} or 0 < x <= 1, not {text}")
    return fraction


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def _devices(text: str) -> list[torch.device]:
    try:
        return [torch.device(name.strip()) for name in text.split(",")]
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be like cpu,cpu: {error}") from error


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the options, fixes the threads and the seed, and prints versions and hardware."""
    arguments = parser.parse_args(argv)
    if not (arguments.bandwidth > 0 and arguments.latency >= 0):
        parser.error("--bandwidth must be above 0 and --latency 0 or more")
    if argv is None:
        one_thread_everywhere()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(), hardware(arguments.devices[0]), sep="\n", end="\n\n")
    return arguments


def hardware(device: torch.device) -> str:
    """Returns the name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("model name")
    ]
    return names[0] if names else "a CPU"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def costs_of(experiment: Experiment, arguments: argparse.Namespace) -> tuple[Times, Bytes]:
    """Returns measured seconds of the layers, and their bytes at the paper's sizes."""
    model, device = experiment.model, arguments.devices[0]
    rows = 2
    if device.type == "cuda":
        rows = min(setting.batch // setting.chunks for setting in experiment.settings)
    module = model.at_width(arguments.scale)
    sample = torch.rand(rows, *model.image(arguments.scale))
    total = arguments.steps * len(module)
    with tqdm(total=total, desc="measuring layers", unit="layer", file=sys.stderr) as bar:
        times = layer_times(module, sample, device, arguments.steps, bar.update)
    with torch.device("meta"):
        sizes = layer_bytes(model.at_width(1.0), torch.empty(1, *model.image(1.0)))
    return times, sizes


def speed_of(
    experiment: Experiment, arguments: argparse.Namespace, times: Times, sizes: Bytes, link: Link
) -> float:
    """Returns how many times as fast the simulated devices are as the measured one."""
    if arguments.clock == "device":
        return 1.0
    return calibrated(experiment.settings[0], experiment.baseline, times, sizes, link)


def predicted(experiment: Experiment, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the predictions and returns all figures."""
    times, sizes = costs_of(experiment, arguments)
    link = Link(1e9 * arguments.bandwidth, 1e-6 * arguments.latency)
    speed = speed_of(experiment, arguments, times, sizes, link)

    def throughputs(setting: Setting) -> tuple[Prediction, Prediction | None]:
        best = predict(setting, best_balance(times, setting), times, sizes, link, speed=speed)
        if not setting.balance:
            return best, None
        return best, predict(setting, setting.balance, times, sizes, link, speed=speed)

    found = [throughputs(setting) for setting in experiment.settings]
    base = found[0][0].throughput
    table = [_row(best, papers, base, gpipe=experiment.gpipe) for best, papers in found]
    print(assumptions(arguments, speed), end="\n\n")
    columns = (
        *("setting", "batch", "paper, samples/s", "predicted", "paper, speed-up", "predicted"),
        *("with the paper's balance", "bubble", "(n-1)/(m+n-1)", "largest device, GiB"),
        *(("GPipe on TPUs",) if experiment.gpipe else ()),
    )
    where = hardware(arguments.devices[0])
    report(f"{experiment.title}: simulated from layers measured on {where}", columns, table)
    return [_figures(best, papers, base) for best, papers in found]


def _row(best: Prediction, papers: Prediction | None, base: float, *, gpipe: bool) -> Row:
    setting, m, n = best.setting, best.setting.chunks, best.setting.n
    cells = (
        *(setting.name, str(setting.batch), cell(setting.throughput, 1)),
        *(cell(best.throughput, 1), cell(setting.speed_up, 2), cell(best.throughput / base, 2)),
        cell(papers.throughput / base if papers else None, 2),
        *(f"{best.simulation.bubble:.0%}", f"{(n - 1) / (m + n - 1):.0%}"),
        cell(max(best.peaks) / GIB, 1),
        *((cell(setting.gpipe, 2),) if gpipe else ()),
    )
    return Row(cells)


def _figures(best: Prediction, papers: Prediction | None, base: float) -> dict[str, Any]:
    return {
        "paper": asdict(best.setting),
        "throughput": best.throughput,
        "speed_up": best.throughput / base,
        "bubble": best.simulation.bubble,
        "balance": best.balance,
        "peaks": best.peaks,
        "speed_up_with_paper_balance": papers and papers.throughput / base,
    }


def assumptions(arguments: argparse.Namespace, speed: float) -> str:
    """Describes the assumptions of the predictions."""
    clock = (
        f"Devices are {speed:.1f} times as fast as this one at scale {arguments.scale:g}, so that "
        "the first row is the paper's."
        if arguments.clock == "paper"
        else "Devices are as fast as this one."
    )
    return (
        f"{clock} Links: {arguments.bandwidth:g} GB/s each way, {arguments.latency:g} us a copy.\n"
        "Copies and memory are of the paper's sizes; each sample takes the same time, whatever the "
        "size of the micro-batch."
    )


def write(arguments: argparse.Namespace, **figures: object) -> None:
    """Writes the figures if ``--json`` was given."""
    if arguments.json is None:
        return
    given = {name: str(value) for name, value in vars(arguments).items()}
    about = {"versions": header(), "hardware": hardware(arguments.devices[0]), "options": given}
    arguments.json.write_text(json.dumps({**about, **figures}, indent=1), encoding="utf-8")


def run(
    experiment: Experiment, description: str | None, argv: Sequence[str] | None = None
) -> int:
    """Prints both tables: predicted for the paper's devices, and measured on the local ones."""
    arguments = parse(options(description), argv)
    found = predicted(experiment, arguments)
    pairs = [(experiment.model, setting) for setting in experiment.settings]
    given = (arguments.devices, arguments.scale, arguments.steps)
    steps = measured(experiment.title, pairs, *given)
    write(arguments, predicted=found, measured=steps)
    return 0
