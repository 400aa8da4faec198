"""Tests objects that torch hands on to the threads of a backward, on each version of torch."""

from __future__ import annotations

import sys

from pipert.autograd.engine import (
    get_thread_local,
    remove_thread_local,
    set_thread_local,
)

KEY = "pipert_test"


def test_an_object_is_there_until_it_is_removed() -> None:
    assert get_thread_local(KEY) is None
    set_thread_local(KEY, "mine")
    assert get_thread_local(KEY) == "mine"
    remove_thread_local(KEY)
    assert get_thread_local(KEY) is None


def test_setting_an_object_a_thousand_times_leaves_its_references_as_they_were() -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(1000):
        set_thread_local(KEY, value)
        assert get_thread_local(KEY) is value
        remove_thread_local(KEY)
    assert sys.getrefcount(value) == before


def test_None_keeps_its_references() -> None:
    """Torch 2.11 would drop one each time, and Python 3.11 counts them."""
    before = sys.getrefcount(None)
    for _ in range(1000):
        set_thread_local(KEY, None)
        remove_thread_local(KEY)
    assert abs(sys.getrefcount(None) - before) < 100
