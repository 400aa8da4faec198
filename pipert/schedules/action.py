"""Defines actions: what one partition does with one micro-batch, and what must be done before.

Sequences of actions are laid out in ticks, as if all actions took the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

FORWARD, RECOMPUTE, BACKWARD, WEIGHT = "F", "R", "B", "W"


class Action(NamedTuple):
    """One task of a run.

    >>> print(Action("F", 3, 1))
    F[3,1]
    """

    kind: str
    """``'F'``, ``'R'``, ``'B'`` or ``'W'``: forward, recomputation, backward, and the gradients of
    weights that the backward has put off."""
    i: int
    """The micro-batch."""
    j: int
    """The partition."""

    @property
    def phase(self) -> str:
        """The name that users read: ``'forward'``, ``'recomputation'``, ``'backward'`` or
        ``'weight gradient'``."""
        return RULES[self.kind].phase

    def __str__(self) -> str:
        return f"{self.kind}[{self.i},{self.j}]"


class Size(NamedTuple):
    """The size of a run, in one partition."""

    m: int
    """The number of micro-batches."""
    n: int
    """The number of partitions."""
    recomputed: int
    """The number of micro-batches, from the first, that are recomputed."""


class Rule(NamedTuple):
    """The rule for all actions of one kind."""

    phase: str
    """The name of the kind that users read."""
    count: Callable[[Size], int]
    """The number of micro-batches, from the first, that have this action in each partition."""
    needs: Callable[[Action, Size], Iterable[Action]]
    """Returns the actions that must be done before an action."""


def _backward_needs(action: Action, size: Size) -> Iterable[Action]:
    _, i, j = action
    needed = [Action(FORWARD, i, j)]
    if i < size.recomputed:
        needed.append(Action(RECOMPUTE, i, j))
    if j < size.n - 1:
        needed.append(Action(BACKWARD, i, j + 1))
    return needed


RULES: dict[str, Rule] = {
    FORWARD: Rule(
        "forward", lambda size: size.m,
        lambda a, _: [Action(FORWARD, a.i, a.j - 1)] if a.j > 0 else [],
    ),
    RECOMPUTE: Rule(
        "recomputation", lambda size: size.recomputed, lambda a, _: [Action(FORWARD, a.i, a.j)]
    ),
    BACKWARD: Rule("backward", lambda size: size.m, _backward_needs),
    WEIGHT: Rule("weight gradient", lambda size: size.m, lambda a, _: [Action(BACKWARD, a.i, a.j)]),
}
"""One row per kind of action. A row of ``stage.actions.ACTIONS`` says how it is carried out."""

Ticks = Iterable[Iterable[Action]]


def lay_out(
    sequences: Sequence[list[Action]], workers: Sequence[int], sizes: Sequence[Size]
) -> Ticks:
    """Put each action into the earliest possible tick, each sequence in its order.

    ``workers`` names the worker of each sequence, ``sizes`` has the size in each partition. If
    several of its actions are ready, a worker prefers a backward, which frees memory. Sequences
    that wait for each other are refused.
    """
    done, at = set[Action](), [0] * len(sequences)
    while any(at[s] < len(sequence) for s, sequence in enumerate(sequences)):
        tick: dict[int, tuple[Action, int]] = {}
        for s, sequence in enumerate(sequences):
            if at[s] < len(sequence) and _is_ready(sequence[at[s]], done, sizes):
                other = tick.get(workers[s])
                if other is None or _before(sequence[at[s]], other[0]):
                    tick[workers[s]] = sequence[at[s]], s
        if not tick:
            waiting = [sequence[at[s]] for s, sequence in enumerate(sequences) if sequence[at[s]:]]
            raise ValueError(f"the sequences wait for each other: {', '.join(map(str, waiting))}")
        for action, s in tick.values():
            at[s] += 1
            done.add(action)
        yield sorted((action for action, _ in tick.values()), key=lambda action: action.j)


def _is_ready(action: Action, done: set[Action], sizes: Sequence[Size]) -> bool:
    needs = RULES[action.kind].needs(action, sizes[action.j])
    return all(needed in done for needed in needs)


def _before(one: Action, other: Action) -> bool:
    return (one.kind == FORWARD, one.i) < (other.kind == FORWARD, other.i)


def in_turns(
    forwards: Iterable[tuple[int, int]], backwards: Iterable[tuple[int, int]], ahead: int
) -> list[Action]:
    """Do ``ahead`` forwards, then backwards and forwards in turns; each is given as ``(i, j)``.

    A recomputation comes right before its backward.
    """
    left = [Action(FORWARD, i, j) for i, j in forwards]
    sequence = left[:ahead]
    for k, (i, j) in enumerate(backwards, start=ahead):
        sequence += [Action(RECOMPUTE, i, j), Action(BACKWARD, i, j), *left[k : k + 1]]
    return sequence
