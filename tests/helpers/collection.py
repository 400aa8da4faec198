"""Lets a free-threaded build of CPython delete what nothing refers to any more.

Other builds delete an object with its last reference, and tests insist on that. Without a GIL a
thread that drops another thread's object leaves its deletion to that thread, which may wait for a
lock meanwhile, and functions, classes and modules are deleted by the collector.
"""

from __future__ import annotations

import gc
import sysconfig

__all__ = ["settle"]

_IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def settle() -> None:
    """Collects garbage on free-threaded builds; does nothing on others."""
    if _IS_FREE_THREADED:
        for _ in range(3):  # a finalizer may drop the last references to other objects
            gc.collect()
