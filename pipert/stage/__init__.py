"""Carries out ``F[i,j]``, ``R[i,j]`` and ``B[i,j]``: one partition's work on one micro-batch."""

from __future__ import annotations

__all__: list[str] = []
