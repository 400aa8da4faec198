"""Defines actions: what one partition does with one micro-batch, and what must be done before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["Action", "Rule", "RULES"]

FORWARD, RECOMPUTE, BACKWARD = "F", "R", "B"

_TEXT = re.compile(r"([A-Z])\[(\d+),(\d+)\]")


class Action(NamedTuple):
    """One task of a run.

    >>> print(Action("F", 3, 1))
    F[3,1]
    """

    kind: str
    """``'F'``, ``'R'`` or ``'B'``: forward, recomputation, backward."""
    i: int
    """The micro-batch."""
    j: int
    """The partition."""

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form that ``str`` returns.

        Raises:
            ValueError: ``text`` is not an action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"an action reads like F[3,1], got {text!r}")
        return cls(match[1], int(match[2]), int(match[3]))

    @property
    def phase(self) -> str:
        """The name that users read: ``'forward'``, ``'recomputation'`` or ``'backward'``."""
        return RULES[self.kind].phase

    def __str__(self) -> str:
        return f"{self.kind}[{self.i},{self.j}]"


class Size(NamedTuple):
    """The size of a run."""

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
}
"""One row per kind of action. A row of ``stage.actions.ACTIONS`` says how it is carried out."""
