"""What one partition does with one micro-batch: ``F[i,j]``, ``R[i,j]`` and ``B[i,j]`` run here."""

from __future__ import annotations

__all__: list[str] = []
