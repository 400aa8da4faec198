"""Threads: what runs tasks, under whose context, and how it ends. Knows no pipelines."""

from __future__ import annotations

__all__: list[str] = []
