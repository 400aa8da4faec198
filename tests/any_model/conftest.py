"""Ignores a warning that some families raise."""

from __future__ import annotations

import pytest

__all__ = ["pytest_collection_modifyitems"]

_KEPT = {"funnel": "pooling_mult", "recurrentgemma": "recurrent_states"}  # which is harmless


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores the warning about attributes that a forward sets and no later partition reads."""
    for item in items:
        for family, name in _KEPT.items():
            if family in item.name:
                message = f"forward (sets|leaves) '[a-z0-9_.]*{name}'"
                warning = f"ignore:{message}:pipert.SharedStateWarning"
                item.add_marker(pytest.mark.filterwarnings(warning))
