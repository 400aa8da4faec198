"""Posts runs, waits for them, and gives them up."""

from __future__ import annotations

__all__: list[str] = []
