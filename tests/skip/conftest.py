"""What the tests of skips share."""

from __future__ import annotations

import pytest

from pipert.skip.store import current_store


@pytest.fixture(autouse=True)
def _nothing_stashed() -> None:
    """What a failed forward has left in the store of this thread is no business of other tests."""
    current_store().clear()
