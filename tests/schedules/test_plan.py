"""Schedules of a step are data: three rules, each refused by name; grids; two that come with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from pipert.schedules import Action, Plan, gpipe, plan

named = pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])


def actions(text: str) -> list[Action]:
    """``'F00 B10'`` as actions."""
    return [Action(word[0], int(word[1]), int(word[2])) for word in text.split()]


def ticks(*texts: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(actions(text)) for text in texts)


def schedule(*texts: str, m: int = 1, n: int = 2, recomputed: int = 0) -> Plan:
    return Plan(m, n, tuple(range(n)), (recomputed,) * n, ticks(*texts))


def grid(*rows: str) -> str:
    """Rows of a grid, whose columns are as wide as its longest cell and two spaces apart."""
    return "\n".join(row.rstrip() for row in rows)


# The rules.


def test_rule_1_an_action_that_is_twice_in_two_ticks_is_named() -> None:
    with pytest.raises(ValueError, match=r"each action once, but F\[0,0\] is in it twice"):
        schedule("F00", "F00", "F01", "B01", "B00")


@pytest.mark.parametrize(
    ("left_out", "rest"),
    [("F[1,0]", "F00 F01 B01 B00"), ("B[0,0]", "F00 F01 B01 F10 F11 B11")],
)
def test_rule_1_an_action_that_is_missing_is_named(left_out: str, rest: str) -> None:
    with pytest.raises(ValueError) as caught:
        schedule(*rest.split(), m=2)
    assert str(caught.value) == f"a schedule has each action once, but {left_out} is not in it"


@pytest.mark.parametrize("stranger", ["F10", "F02", "R00", "B10", "X00"])
def test_an_action_that_the_step_does_not_have_is_named(stranger: str) -> None:
    with pytest.raises(ValueError) as caught:
        schedule("F00", stranger, "F01", "B01", "B00")
    assert f"{actions(stranger)[0]} in tick 1 is no action of 1 micro-batches" in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "texts", "recomputed"),
    [
        ("F[0,1] is in tick 0 and needs F[0,0]", "F01 F00 B01 B00", 0),
        ("B[0,1] is in tick 1 and needs F[0,1]", "F00 B01 F01 B00", 0),
        ("B[0,0] is in tick 2 and needs B[0,1]", "F00 F01 B00 B01", 0),
        ("R[0,0] is in tick 0 and needs F[0,0]", "R00 F00 F01 R01 B01 B00", 1),
        ("B[0,1] is in tick 2 and needs R[0,1]", "F00 F01 B01 R01 R00 B00", 1),
    ],
)
def test_rule_2_an_action_before_one_it_needs_is_named(
    broken: str, texts: str, recomputed: int
) -> None:
    with pytest.raises(ValueError) as caught:
        schedule(*texts.split(), recomputed=recomputed)
    assert str(caught.value) == f"{broken} before it"


def test_rule_3_two_actions_of_one_worker_in_a_tick_are_named() -> None:
    with pytest.raises(ValueError) as caught:
        schedule("F00 F10", "F01", "F11", "B01", "B11 B00", "B10", m=2)
    expected = "a worker does one action in a tick; tick 0 has F[0,0], F[1,0]"
    assert str(caught.value) == expected


@pytest.mark.parametrize("kind", ["F", "B"])
def test_rule_4_neighbours_that_differ_in_the_order_of_micro_batches_are_named(kind: str) -> None:
    there, back = ["F00", "F10", "F01", "F11"], ["B01", "B11", "B00", "B10"]
    if kind == "F":
        there[2:] = reversed(there[2:])
    else:
        back[2:] = reversed(back[2:])
    with pytest.raises(ValueError, match=rf"all partitions do {kind} .* in the same order"):
        schedule(*there, *back, m=2)


# The order, and what a schedule is asked for.


def test_a_plan_is_prepared_for_runs_when_it_is_made() -> None:
    # Nothing is left to a lock that a forked child may find held.
    assert {"order", "positions", "occurring_kinds"} <= vars(plan("gpipe", 2, 2)).keys()


# Those that come with it, as text.


def test_one_f_one_b_as_a_grid() -> None:
    assert str(plan("1f1b", 3, 2)) == grid(
        "tick  0       1       2       3       4       5       6       7",
        "w=0   F[0,0]  F[1,0]          B[0,0]  F[2,0]  B[1,0]          B[2,0]",
        "w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]  F[2,1]  B[2,1]",
    )


def test_gpipe_as_a_grid() -> None:
    assert str(plan("gpipe", 2, 2)) == grid(
        "tick  0       1       2       3       4       5",
        "w=0   F[0,0]  F[1,0]                  B[1,0]  B[0,0]",
        "w=1           F[0,1]  F[1,1]  B[1,1]  B[0,1]",
    )


def test_recomputations_in_the_grid_of_one_f_one_b() -> None:
    assert str(plan("1f1b", 2, 2, recomputed=2)) == grid(
        "tick  0       1       2       3       4       5       6       7",
        "w=0   F[0,0]  F[1,0]  R[0,0]          B[0,0]  R[1,0]          B[1,0]",
        "w=1           F[0,1]  R[0,1]  B[0,1]  F[1,1]  R[1,1]  B[1,1]",
    )


def test_eager_one_f_one_b_as_a_grid() -> None:
    assert str(plan("eager-1f1b", 4, 2)) == grid(
        "tick  0       1       2       3       4       5       6       7       8       9",
        "w=0   F[0,0]  F[1,0]  F[2,0]  B[0,0]  F[3,0]  B[1,0]          B[2,0]          B[3,0]",
        "w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]  F[2,1]  B[2,1]  F[3,1]  B[3,1]",
    )


def test_two_partitions_of_one_worker_share_its_row() -> None:
    assert str(plan("1f1b", 1, 3, (0, 0, 1))) == grid(
        "tick  0       1       2       3       4       5",
        "w=0   F[0,0]  F[0,1]                  B[0,1]  B[0,0]",
        "w=1                   F[0,2]  B[0,2]",
    )


# Whatever the placement.


@named
@pytest.mark.parametrize("recomputed", range(5))
def test_the_first_micro_batches_are_those_that_are_recomputed(name: str, recomputed: int) -> None:
    one = plan(name, 4, 2, recomputed=recomputed)
    assert sorted(a for a in one if a.kind == "R") == [
        Action("R", i, j) for i in range(recomputed) for j in range(2)
    ]


# Schedules of one's own.


def one_by_one(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
    """Each micro-batch all the way there and back before the next: the plain loop."""
    for i in range(m):
        yield from ([Action("F", i, j)] for j in range(n))
        for j in reversed(range(n)):
            yield [Action("R", i, j)]
            yield [Action("B", i, j)]


def test_a_schedule_may_be_made_by_a_function() -> None:
    assert str(plan(one_by_one, 2, 2)) == grid(
        "tick  0       1       2       3       4       5       6       7",
        "w=0   F[0,0]                  B[0,0]  F[1,0]                  B[1,0]",
        "w=1           F[0,1]  B[0,1]                  F[1,1]  B[1,1]",
    )


def test_a_schedule_of_ones_own_is_checked_before_recomputations_are_left_out() -> None:
    def without(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
        yield [Action("F", 0, 0)]
        yield [Action("B", 0, 0)]

    with pytest.raises(ValueError, match=r"B\[0,0\] is in tick 1 and needs R\[0,0\] before it"):
        plan(without, 1, 1)


class Trainer:
    def schedule(self, m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
        return one_by_one(m, n, placement)


def test_no_cache_holds_a_function_or_its_object() -> None:
    trainer = Trainer()
    there = weakref.ref(trainer)
    plan(trainer.schedule, 3, 2)
    del trainer
    assert there() is None


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "Eager-1F1B", "Interleaved"])
def test_a_name_may_be_in_any_case(name: str) -> None:
    assert plan(name, 4, 2, (0, 0)) is plan(name.lower(), 4, 2, (0, 0))


# Refusals.


@pytest.mark.parametrize("given", [3, None, ["1f1b"], {}])
def test_a_schedule_that_is_neither_a_name_nor_a_function_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="schedule must be a name or a function that makes one"):
        plan(given, 2, 2)


def test_plain_tuples_are_made_actions() -> None:
    def plain(m: int, n: int, placement: tuple[int, ...]) -> Any:
        return [[tuple(action) for action in tick] for tick in gpipe(m, n, placement)]

    for recomputed in (0, 3):
        assert all(type(action) is Action for action in plan(plain, 3, 2, recomputed=recomputed))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'eager-1f1b', 'interleaved', .*got 'dualpipe'"):
        plan("dualpipe", 2, 2)


@pytest.mark.parametrize(("m", "n"), [(0, 1), (1, 0), (-1, 2)])
def test_bad_sizes_are_refused(m: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"must be positive, got m={m}, n={n}"):
        plan("1f1b", m, n)


@pytest.mark.parametrize("recomputed", [3, -1, (0, 3), (-1, 0)])
def test_a_bad_number_of_recomputed_micro_batches_is_refused(recomputed: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to m=2 micro-batches are recomputed, got"):
        plan("1f1b", 2, 2, recomputed=recomputed)


def test_an_action_prints_as_in_the_paper_and_its_phase_for_users() -> None:
    assert str(Action("F", 2, 1)) == "F[2,1]"
    phases = [Action(kind, 0, 0).phase for kind in "FRB"]
    assert phases == ["forward", "recomputation", "backward"]
