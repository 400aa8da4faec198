"""Measures samples per second of AmoebaNet-D (18, 256), n in {2, 4, 8}, m in {1, 4, 32}.

This is section 4.2.1 of the paper. Speed-ups are over two devices with one micro-batch, as there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _experiments import Experiment, run
from _models import AMOEBANET
from _paper import AMOEBANET_SPEED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    title = "AmoebaNet-D (18, 256), speed"
    experiment = Experiment(title, AMOEBANET, AMOEBANET_SPEED)
    return run(experiment, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
