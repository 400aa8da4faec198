"""Tests that the page about tried models shows the results of a run."""

from __future__ import annotations

import pytest

from tests.any_model.all_families import ZOO
from tests.any_model.family import Family
from tests.any_model.table import PAGE, line, row_of

LINES = PAGE.read_text().splitlines()
remedy = "python -m tests.any_model.table"


def test_each_family_has_its_row() -> None:
    rows = [row.split(" | ")[0].removeprefix("| ") for row in LINES if row.startswith("| ")]
    names = [name for name in rows if name not in ("family", "---")]
    assert names == [family.name for family in ZOO], f"{remedy} writes the page"


@pytest.mark.sweep
@pytest.mark.parametrize("family", ZOO, ids=[family.name for family in ZOO])
def test_each_row_shows_the_results_of_a_run(family: Family) -> None:
    assert line(row_of(family)) in LINES, f"{remedy} writes the page"
