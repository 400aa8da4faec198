"""Finds out by trial in which runs of a pipe the workers take turns (``workers.turn``).

Layers of many small operations compute mostly in the interpreter, of which each operation lets go
for a moment. Whether two workers then get on better side by side or one after the other depends on
what a switch between threads costs, on how long operations last without the interpreter, on the
number of workers and of cores, and on what else there is to do meanwhile. No figure of one of these
decides. So a pipe does both, and does what took less time. Where both take equally long, turns are
better: two workers that call layers side by side take more CPU time for the same.

The standard way to choose between two is to measure both for a while. But one machine differs from
one second to the next by more than the two do. So one run at a time is tried the other way, and is
faster only if it took less than each of the two before it and the next one: a training loop may let
some runs follow on more than others do. When six more trials were faster than were not, the way of
the pipe changes. After one that was not, the next is tried after twice as many runs, up to
``_MOST``: a trial may take several times as long. How many runs exactly is left to chance, since a
trial that recurs with the training loop would always be compared with the same others.
"""

from __future__ import annotations

from random import Random

import torch

from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME
from pipert.schedules.plan import Plan

__all__: list[str] = []

_BEFORE = 3  # runs before the first trial; the very first ones do what later ones do not
_FIRST = 2  # runs between a comparison and the next trial at first, and after a faster one
_MOST = 48  # and the most; each time fewer than twice as many
_AHEAD = 6  # faster trials, less the others, that change the way
_DEARER = 1.1  # the factor for runs without turns, which take more CPU time for the same result


class Trial:
    """Chooses for runs of one kind. Used by the callers of a pipe, from any thread.

    It has no lock: if two runs begin or end at the same time, a comparison may be lost or wrong.
    """

    __slots__ = ("_ahead", "_before", "_between", "_chance", "_left", "_tried", "in_turn")

    def __init__(self, in_turn: bool) -> None:
        self.in_turn = in_turn
        """Whether workers take turns, in runs that are no trial."""
        self._left, self._between = _BEFORE, _FIRST  # runs until the next trial, and between two
        self._before = 0.0, 0.0  # what the last two runs took that were no trial
        self._tried: float | None = None  # what the trial took that is to be compared with the next
        self._ahead = 0  # faster trials, less the others
        self._chance = Random(0)

    def next_in_turn(self) -> bool:
        """Return whether workers take turns in the run that begins."""
        is_trial = self._left <= 0 and self._tried is None
        return self.in_turn != is_trial

    def took(self, seconds: float, in_turn: bool) -> None:
        """Note how long a run took that has succeeded, and whether its workers took turns."""
        weighted = seconds if in_turn else seconds * _DEARER
        if in_turn != self.in_turn:
            self._tried = weighted
            return
        tried, self._tried = self._tried, None
        self._left -= 1
        if tried is not None:
            self._compare(tried < min(*self._before, weighted))
        self._before = self._before[1], weighted

    def _compare(self, is_faster: bool) -> None:
        if is_faster:
            self._ahead, self._between = self._ahead + 1, _FIRST
        else:
            self._ahead, self._between = max(0, self._ahead - 1), min(2 * self._between, _MOST)
        self._left = self._between + self._chance.randrange(self._between)
        if self._ahead == _AHEAD:
            self.in_turn, self._ahead = not self.in_turn, 0

    def __repr__(self) -> str:
        return f"<Trial, {'in turn' if self.in_turn else 'side by side'}>"


class Trials:
    """The trials of one pipe, one for each kind of run."""

    __slots__ = ("_trials",)

    def __init__(self) -> None:
        self._trials: dict[tuple[object, ...], Trial] = {}

    def of(self, plan: Plan) -> Trial | None:
        """Return the trial for runs like ``plan``; ``None`` if no two workers are in each other's
        way.
        """
        if not (ONE_THREAD_AT_A_TIME and plan.m > 1 and len(set(plan.placement)) > 1):
            return None
        key = plan.m, plan.recomputed, plan.kinds, plan.goes_both_ways, torch.is_grad_enabled()
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials.setdefault(key, Trial(plan.goes_both_ways))
        return trial

    def __repr__(self) -> str:
        return f"<Trials of {len(self._trials)} kinds of run>"
