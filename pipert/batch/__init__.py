"""Micro-batches: scatter and gather, and the tensors inside any pytree."""

from __future__ import annotations

__all__: list[str] = []
