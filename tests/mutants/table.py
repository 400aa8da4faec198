"""Joins the lists of mutants into two tables: of waits, and of other guarantees."""

from __future__ import annotations

from tests.mutants import of_any_model, of_guarantees, of_stages, of_streams, of_workers

__all__ = ["BREAKAGES", "MUTANTS"]

MUTANTS = [
    *of_streams.MUTANTS,
    *of_any_model.MUTANTS,
    *of_stages.MUTANTS,
    *of_workers.MUTANTS,
]
"""Mutants of the uses of streams, events and devices, which simulated GPUs show."""

BREAKAGES = of_guarantees.BREAKAGES
"""Breakages of other guarantees, which the CPU shows."""
