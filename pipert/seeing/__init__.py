"""Who is told what a pipe does: counters, observers, recordings, profilers."""

from __future__ import annotations

__all__: list[str] = []
