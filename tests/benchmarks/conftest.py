"""Disables tqdm's monitor, as for the examples."""

from __future__ import annotations

from tests.examples.conftest import no_thread_of_tqdm

__all__ = ["no_thread_of_tqdm"]
