"""Runs each test on a thread of its own.

So skips that a failed forward leaves in its thread's store cannot reach other tests.
"""

from __future__ import annotations

from tests.helpers.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
