"""Posting a run, waiting for it, giving it up."""

from __future__ import annotations

__all__: list[str] = []
