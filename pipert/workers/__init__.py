"""Runs tasks on threads, under the caller's context, and ends the threads. Knows no pipelines."""

from __future__ import annotations

__all__: list[str] = []
