"""Models whose own code draws, and by that drops layers, skips cuts and chooses what to draw."""

from __future__ import annotations

import pytest

from tests.any_model.drawing import Model, outcomes
from tests.helpers.ways import CALL, MODES, Way, same

SCHEDULES = [CALL, "gpipe", "1f1b", "eager-1f1b", "zb-h1"]


@pytest.mark.filterwarnings("ignore:no partition begins at layer")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(seed, marks=pytest.mark.sweep) for seed in range(3, 20)]]
)
def test_runs_of_one_seed_are_equal_whatever_is_drawn_and_skipped(
    seed: int, schedule: str, mode: str
) -> None:
    model = Model(seed)
    found = outcomes(model, Way(schedule, mode))
    same(found[1::2], found[::2], rtol=0, atol=0)
    assert all(model.draws.in_turn)
