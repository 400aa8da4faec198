"""All mutants."""

from __future__ import annotations

from tests.mutants import of_check, of_recording, of_stages, of_streams, of_workers

__all__ = ["MUTANTS"]

MUTANTS = [
    *of_streams.MUTANTS,
    *of_stages.MUTANTS,
    *of_recording.MUTANTS,
    *of_workers.MUTANTS,
    *of_check.MUTANTS,
]
