"""Lays out sequences of actions in ticks, as if all actions took the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, RULES, Action, Size

__all__: list[str] = []

Ticks = Iterable[Iterable[Action]]


def lay_out(sequences: Sequence[list[Action]], workers: Sequence[int], size: Size) -> Ticks:
    """Put each action into the earliest possible tick, each sequence in its order.

    ``workers`` names the worker of each sequence. If several of its actions are ready, a worker
    prefers a backward, which frees memory. Sequences that wait for each other are refused.
    """
    done, at = set[Action](), [0] * len(sequences)
    while any(at[s] < len(sequence) for s, sequence in enumerate(sequences)):
        tick: dict[int, tuple[Action, int]] = {}
        for s, sequence in enumerate(sequences):
            if at[s] < len(sequence) and _is_ready(sequence[at[s]], done, size):
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


def _is_ready(action: Action, done: set[Action], size: Size) -> bool:
    return all(needed in done for needed in RULES[action.kind].needs(action, size))


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
