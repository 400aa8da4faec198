"""Tests that actions print as text and are parsed from it."""

from __future__ import annotations

import pytest

from pipert.schedules import Action


@pytest.mark.parametrize("action", [Action("F", 3, 1), Action("R", 0, 0), Action("B", 12, 10)])
def test_an_action_is_parsed_from_what_it_prints(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_an_action_prints_as_in_the_paper() -> None:
    assert str(Action("F", 2, 1)) == "F[2,1]"


@pytest.mark.parametrize("text", ["", "F", "F[1]", "F[1,2", "f[1,2]", "F[-1,2]", " F[1,2]"])
def test_a_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="reads like F\\[3,1\\]"):
        Action.parse(text)


def test_actions_print_their_phase_for_users() -> None:
    phases = [Action(kind, 0, 0).phase for kind in "FRB"]
    assert phases == ["forward", "recomputation", "backward"]
