"""``python -m pipert check``: does pipert do here, on these devices, what it promises?

``command.py`` runs the checks one after the other, and prints what they find. Each file is about
one question: ``values.py``, ``repeats.py`` and ``errors.py`` about results, ``memory.py``,
``overlap.py`` and ``speed.py`` about devices. docs/check.md is its page.
"""

from __future__ import annotations

__all__: list[str] = []
