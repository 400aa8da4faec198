"""Tells counters, observers, recordings and profilers what a pipe does."""

from __future__ import annotations

__all__: list[str] = []
