"""Pipes: what ``Pipe`` and ``ModulePipe`` share, and the script runner that traces them."""

from __future__ import annotations

__all__: list[str] = []
