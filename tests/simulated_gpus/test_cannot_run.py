"""The list of tests that cannot run on simulated GPUs is accurate. These tests run last."""

from __future__ import annotations

import pytest

from tests.simulated_gpus.selection import NAME, Selection

pytestmark = pytest.mark.cuda


@pytest.fixture
def selection(request: pytest.FixtureRequest) -> Selection:
    found = request.config.pluginmanager.get_plugin(NAME)
    if found is None:
        pytest.skip("is about the simulation: python -m pytest --simulated-gpus")
    assert isinstance(found, Selection)
    return found


def test_each_entry_of_the_list_matches_a_test(selection: Selection) -> None:
    assert selection.unmatched == set()


def test_no_other_test_has_been_skipped(selection: Selection) -> None:
    assert selection.skipped == []
