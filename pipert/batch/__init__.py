"""Splits mini-batches, joins outputs, and reaches the tensors inside any pytree."""

from __future__ import annotations

__all__: list[str] = []
