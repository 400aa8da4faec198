"""Measures samples per second of ``amoebanet``, ``unet`` or ``resnet`` on one to eight devices.

These are the paper's sections 4.2.1 and 4.2.3; its speed-ups of AmoebaNet-D are over two devices
with one micro-batch. It has no figures for ResNet-101, so those settings are our own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _experiments import options, parse, write
from _measure import Row, cell, report
from _models import AMOEBANET, RESNET, UNET
from _paper import AMOEBANET_SPEED, RESNET_SPEED, UNET_SPEED
from _steps import measured

__all__ = ["main"]

EXPERIMENTS = {
    "amoebanet": ("AmoebaNet-D (18, 256), speed", AMOEBANET, AMOEBANET_SPEED),
    "resnet": ("ResNet-101, speed", RESNET, RESNET_SPEED),
    "unet": ("U-Net (5, 64), speed", UNET, UNET_SPEED),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the paper measured, and what the local devices take."""
    parser = options(__doc__)
    parser.add_argument("model", choices=EXPERIMENTS)
    arguments = parse(parser, argv)
    title, model, settings = EXPERIMENTS[arguments.model]
    papers = [
        Row((each.name, str(each.batch), cell(each.throughput, 1), cell(each.speed_up, 2),
             cell(each.gpipe, 2)))
        for each in settings
    ]  # fmt: skip
    columns = ("setting", "batch", "samples/s", "speed-up", "GPipe's on TPUs")
    report(f"{title}: the paper's", columns, papers)
    given = (arguments.devices, arguments.scale, arguments.steps)
    write(arguments, measured=measured(title, [(model, each) for each in settings], *given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
