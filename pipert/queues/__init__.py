"""Primitives that pipert's threads wait on. Nothing here knows torch or pipelines."""

from __future__ import annotations

__all__: list[str] = []
