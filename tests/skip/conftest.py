"""Each test runs on a thread of its own.

So what a failed forward has left in the store of skips of its thread is no business of other tests.
"""

from __future__ import annotations

from tests.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
