"""Tests that the comparison with torch's tracer sees what is equal, and what is not."""

from __future__ import annotations

from typing import Any

import over_ranks
import pytest


def wrong(rank: int, *given: Any) -> Any:
    loss, gradients = over_ranks.by_pipert(rank, *given)
    return loss, {name: grad * 2 for name, grad in gradients.items()}


@pytest.mark.sweep  # it starts processes for a quarter of a minute
@pytest.mark.timeout(200)
def test_equal_steps_and_others() -> None:
    assert over_ranks.outcome("U-Net", over_ranks.by_pipert) == "equal"
    assert "another gradient" in over_ranks.outcome("U-Net", wrong)
