"""What all pipes have in common."""

from __future__ import annotations

__all__: list[str] = []
