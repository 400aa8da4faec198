"""Joins the lists of mutants into two tables: of waits, and of everything else."""

from __future__ import annotations

from tests.mutants import (
    of_any_model,
    of_foundations,
    of_models,
    of_ranks,
    of_recording,
    of_stages,
    of_streams,
    of_the_engine,
    of_weights,
    of_workers,
)

__all__ = ["BREAKAGES", "MUTANTS"]

MUTANTS = [
    *of_streams.MUTANTS,
    *of_any_model.MUTANTS,
    *of_stages.MUTANTS,
    *of_recording.MUTANTS,
    *of_workers.MUTANTS,
]
"""Mutants of the uses of streams, events and devices, which simulated GPUs show."""

BREAKAGES = [
    *of_foundations.BREAKAGES,
    *of_models.BREAKAGES,
    *of_the_engine.BREAKAGES,
    *of_weights.BREAKAGES,
    *of_ranks.BREAKAGES,
]
"""Breakages of pipert's other guarantees, which the CPU shows."""
