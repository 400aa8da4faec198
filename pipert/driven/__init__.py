"""Any model: its own ``forward`` runs on a driver thread, partition by partition."""

from __future__ import annotations

__all__: list[str] = []
