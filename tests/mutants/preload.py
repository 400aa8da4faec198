"""Preloads every trial on simulated GPUs: starts the simulation, then imports torch."""

from __future__ import annotations

from tests import simulated_gpus

simulated_gpus.start()

from tests.mutants import preload_torch  # noqa: E402, F401

__all__: list[str] = []
