"""Timelines: what the devices of a pipe did and when, and what to do about it.

``timeline`` is what the user holds, ``record`` how it comes about, ``report`` what it says,
``chrome`` and ``picture`` what it looks like.
"""

from __future__ import annotations

__all__: list[str] = []
