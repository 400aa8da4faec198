"""Checks that pipert keeps its promises on this machine's devices: ``python -m pipert check``.

``command.py`` runs the checks one after the other and prints their findings. Each check has a file:
``peers.py``, ``values.py``, ``memory.py``, ``overlap.py`` and ``speed.py``. See docs/check.md.
"""

from __future__ import annotations

__all__: list[str] = []
