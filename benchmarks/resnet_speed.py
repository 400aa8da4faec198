"""Measures samples per second of ResNet-101, 370 layers, on one to eight devices.

The paper has no figures for it, so the settings are our own. The simulated device is again the
paper's P40: it does as many operations per second as in the first row of the U-Net's table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _experiments import Experiment, run
from _models import RESNET
from _paper import RESNET_SPEED

__all__ = ["main"]

# 10^9 operations per sample, forward and backward, at the paper's sizes, as counted by
# torch.utils.flop_counter, for U-Net (5, 64) and ResNet-101.
UNET_WORK, RESNET_WORK = 293.8, 46.6


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    baseline = 28.5 * UNET_WORK / RESNET_WORK
    return run(Experiment("ResNet-101, speed", RESNET, RESNET_SPEED, baseline), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
