"""Measures samples per second of ResNet-101, 370 layers, on one to eight devices.

The paper has no figures for it, so the settings are our own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _experiments import Experiment, run
from _models import RESNET
from _paper import RESNET_SPEED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    return run(Experiment("ResNet-101, speed", RESNET, RESNET_SPEED), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
