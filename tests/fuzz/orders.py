"""Chooses the order of a step's actions: one of pipert's schedules, or any valid order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from pipert.schedules import Action
from tests.fuzz.case import Case, Step

__all__ = ["Order", "schedule_of"]


def schedule_of(case: Case, step: Step, workers: Sequence[int]) -> Any:
    """Returns the step's schedule; 1F1B if it has none, or needs partitions placed in turn."""
    if step.how == "own order":
        return Order(case.seed, ordered="batch norm" in case.units, puts_off=case.seed % 2 == 0)
    d = len(set(workers))
    in_turns = all(worker == workers[j % d] for j, worker in enumerate(workers))
    if step.how in ("gpipe", "zb-h1", "zb-h2") or step.how == "interleaved" and in_turns:
        return step.how
    return "1f1b"


@dataclass(frozen=True)
class Order:
    """A schedule that picks a random ready action at each tick."""

    seed: int
    ordered: bool
    """Whether each partition runs its forwards in order, which BatchNorm's results depend on."""
    puts_off: bool
    """Whether gradients of weights are computed apart."""

    def __call__(self, m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
        dice = Random(self.seed)
        forward, backward = list(range(m)), list(range(m))
        if not self.ordered:
            dice.shuffle(forward)
        dice.shuffle(backward)
        left = {
            ("F", j): [Action("F", i, j) for i in forward] for j in range(n)
        } | {("B", j): [Action(k, i, j) for i in backward for k in "RB"] for j in range(n)}
        if self.puts_off:
            left |= {("W", j): [Action("W", i, j) for i in backward] for j in range(n)}
        done: set[Action] = set()
        while any(left.values()):
            ready = [key for key, rest in left.items() if rest and _can(rest[0], n, done)]
            action = left[dice.choice(ready)].pop(0)
            done.add(action)
            yield [action]


def _can(action: Action, n: int, done: set[Action]) -> bool:
    kind, i, j = action
    if kind == "W":
        return Action("B", i, j) in done
    if kind == "F":
        return j == 0 or Action("F", i, j - 1) in done
    return Action("F", i, j) in done and (
        kind == "R" or j == n - 1 or Action("B", i, j + 1) in done
    )
