"""The Sequential: split into partitions, placed on devices."""

from __future__ import annotations

__all__: list[str] = []
