"""Runs the user's layers: random numbers, buffers, tied weights, compilation."""

from __future__ import annotations

__all__: list[str] = []
