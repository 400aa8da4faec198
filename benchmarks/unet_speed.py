"""Measures samples per second of U-Net (5, 64) on one to eight devices (the paper's 4.2.3)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _experiments import Experiment, run
from _models import UNET
from _paper import UNET_SPEED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    experiment = Experiment("U-Net (5, 64), speed", UNET, UNET_SPEED)
    return run(experiment, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
