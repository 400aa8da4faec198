"""Measures the memory of U-Nets as large as one to eight devices can hold.

This is section 4.2.2 of the paper. The first table has the paper's figures, and the parameters of
our models. The second has real steps; on CPU at half of ``--scale`` and with fewer samples. With
``--devices cuda:0,cuda:0`` two partitions share a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from _experiments import options, parse, write
from _measure import Row, report
from _models import unet_model
from _paper import UNET_MEMORY
from _steps import measured

__all__ = ["main"]


def at_paper_sizes() -> None:
    """Prints the paper's figures, and the parameters of models as large."""
    table = []
    for setting in UNET_MEMORY:
        with torch.device("meta"):
            module = unet_model(*setting.model).at_width(1.0)
        parameters = sum(p.numel() for p in module.parameters())
        assert setting.parameters and setting.memory
        cells = (setting.name, str(setting.model), f"{setting.parameters / 1e9:.2f}")
        table.append(Row((*cells, f"{parameters / 1e9:.2f}", f"{setting.memory:.1f}")))
    columns = ("setting", "(B, C)", "paper, 10^9 parameters", "ours", "paper, GiB")
    report("U-Net, memory: the paper's", columns, table)


def here(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one step of each setting."""
    on_cpu = arguments.devices[0].type == "cpu"
    most, scale = (1, arguments.scale / 2) if on_cpu else (len(arguments.devices), arguments.scale)
    pairs = [
        (unet_model(*setting.model), setting) for setting in UNET_MEMORY if setting.n <= most
    ]
    return measured("U-Net, memory", pairs, arguments.devices[:most], scale, steps=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    arguments = parse(options(__doc__), argv)
    at_paper_sizes()
    write(arguments, measured=here(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
