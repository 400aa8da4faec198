"""Reads the options of the paper's experiments, and writes JSON.

Each experiment prints the paper's measurements, and measures pipert and torchgpipe where there are
enough devices, at ``--scale`` times the paper's width and image size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from _measure import header, one_thread_everywhere

__all__ = ["GIB", "options", "parse", "write"]

SCALES = {"paper": 1.0, "laptop": 0.25, "tiny": 0.0625}
GIB = 2**30


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
    add("--steps", type=_positive, default=3, help="how often to measure steps")
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


def write(arguments: argparse.Namespace, **figures: object) -> None:
    """Writes the figures if ``--json`` was given."""
    if arguments.json is None:
        return
    given = {name: str(value) for name, value in vars(arguments).items()}
    about = {"versions": header(), "hardware": hardware(arguments.devices[0]), "options": given}
    arguments.json.write_text(json.dumps({**about, **figures}, indent=1), encoding="utf-8")
