"""Computes and measures the memory of U-Nets as large as one to eight devices can hold.

This is section 4.2.2 of the paper. The first table is computed from shapes alone, at the paper's
sizes, whatever ``--scale``. Each parameter and its gradient take 8 bytes. The table excludes CUDA,
its kernels' workspaces and fragmentation, so it should stay below the paper's figures.

The second table compares real steps with the same computation for their sizes; on CPU at half of
``--scale`` and with fewer samples. With ``--devices cuda:0,cuda:0`` two partitions share a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from _experiments import GIB, options, parse, write
from _layer_costs import Times, layer_bytes
from _measure import Row, report
from _models import Model, unet_model
from _paper import UNET_MEMORY, Setting
from _predict import Link, predict
from _steps import measured
from tqdm import tqdm

__all__ = ["main"]

INSTANT = Link(float("inf"), 0.0)


def computed(model: Model, setting: Setting, fraction: float) -> tuple[int, list[float]]:
    """Computes the number of parameters, and the peak of each device in bytes."""
    with torch.device("meta"):
        module = model.at_width(fraction)
        sizes = layer_bytes(module, torch.empty(1, *model.image(fraction)))
    alike = Times([1.0] * len(module), [2.0] * len(module))  # only the order counts
    balance = setting.balance if sum(setting.balance) == len(module) else (len(module),)
    found = predict(setting, balance, alike, sizes, INSTANT)
    return sum(p.numel() for p in module.parameters()), found.peaks


def at_paper_sizes() -> list[dict[str, Any]]:
    """Prints the table at the paper's sizes; returns its figures."""
    table, found = [], []
    for setting in tqdm(UNET_MEMORY, desc="computing", unit="setting", file=sys.stderr):
        parameters, peaks = computed(unet_model(*setting.model), setting, 1.0)
        assert setting.parameters and setting.memory
        cells = (
            *(setting.name, str(setting.model), f"{setting.parameters / 1e9:.2f}"),
            *(f"{parameters / 1e9:.2f}", f"{setting.memory:.1f}", f"{sum(peaks) / GIB:.1f}"),
            *(f"{8 * parameters / GIB:.1f}", ", ".join(f"{peak / GIB:.1f}" for peak in peaks)),
        )
        table.append(Row(cells))
        found.append({"setting": setting.name, "parameters": parameters, "peaks": peaks})
    columns = (
        *("setting", "(B, C)", "paper, 10^9 parameters", "ours", "paper, GiB", "computed"),
        *("of that parameters", "each device"),
    )
    report("U-Net, memory: computed from shapes", columns, table)
    return found


def here(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one step of each setting, and prints it beside the computed memory."""
    on_cpu = arguments.devices[0].type == "cpu"
    most, scale = (1, arguments.scale / 2) if on_cpu else (len(arguments.devices), arguments.scale)
    pairs = [
        (unet_model(*setting.model), setting) for setting in UNET_MEMORY if setting.n <= most
    ]
    found = measured("U-Net, memory", pairs, arguments.devices[:most], scale, steps=1)
    table = []
    for (model, setting), figures in zip(pairs, found, strict=True):
        ran = Setting(setting.name, setting.n, figures["batch"], setting.m and figures["m"])
        _, peaks = computed(model, ran, scale)
        peak = figures["pipert"].get("peak")
        figures["computed"] = sum(peaks)
        cells = [setting.name, str(figures["batch"]), str(figures["m"])]
        cells += ["-" if peak is None else f"{peak / GIB:.3f}", f"{figures['computed'] / GIB:.3f}"]
        table.append(Row(tuple(cells)))
    columns = ("setting", "batch", "m", "measured, GiB", "computed")
    report("The same steps, computed from shapes", columns, table)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    arguments = parse(options(__doc__), argv)
    write(arguments, computed=at_paper_sizes(), measured=here(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
