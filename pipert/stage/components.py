"""The parts of the runtime that the paper adds one by one (section 4.1), as switches.

All are on, always, but in ``benchmarks/unet_ablation.py`` and ``benchmarks/simulated_gpus.py``,
which show what each is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Components:
    """Which parts are there. What is computed is the same with and without."""

    fork_join: bool = True
    """Micro-batches must go back in reverse order; else they do since autograd takes them so."""
    copy_streams: bool = True
    """Copies have streams of their own; else those of the computation."""
    direct_skips: bool = True
    """Skips go straight to who pops them; else through every partition in between."""


ALL = Components()
