"""``python -m pipert check``: does pipert keep its promises on these devices?

``command.py`` runs the checks one after the other and prints their findings. Each file answers
one question: ``values.py``, ``repeats.py`` and ``errors.py`` about results, ``memory.py``,
``overlap.py`` and ``speed.py`` about devices. docs/check.md documents it.
"""

from __future__ import annotations

__all__: list[str] = []
