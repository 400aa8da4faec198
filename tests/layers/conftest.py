"""Runs each test on a thread of its own (``tests/helpers/own_thread.py`` says why)."""

from __future__ import annotations

from tests.helpers.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
