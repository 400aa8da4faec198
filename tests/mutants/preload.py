"""What every trial on simulated GPUs begins with: these, and then torch, which is to find them."""

from __future__ import annotations

from tests import simulated_gpus

simulated_gpus.start()

from tests.mutants import preload_torch  # noqa: E402, F401

__all__: list[str] = []
