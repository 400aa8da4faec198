"""Splits a model into partitions and places them on devices."""

from __future__ import annotations

__all__: list[str] = []
