"""Orders actions as GPipe does, and as schedules do that bound the number of micro-batches kept.

GPipe's are the clock-cycle of ``pipe(x)``, and fill and drain for a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipert.schedules.action import FORWARD, Action, Size, Ticks, in_turns, lay_out


def clock_cycle(m: int, n: int, placement: tuple[int, ...]) -> Iterator[list[Action]]:
    """Make the deterministic clock-cycle (section 3.2.1 of the paper), diagonal by diagonal.

    Clock *k* has all ``F[i,j]`` with ``i + j == k``. The backward is autograd's. A worker that
    serves several partitions does its actions of one diagonal in consecutive ticks.
    """
    for k in range(m + n - 1):
        tick: list[Action] = []
        for j in range(max(0, k - m + 1), min(n, k + 1)):
            if any(placement[other.j] == placement[j] for other in tick):
                yield tick
                tick = []
            tick.append(Action(FORWARD, k - j, j))
        yield tick


def gpipe(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Fill and drain: all forwards, then all backwards, the last micro-batch first.

    The order of ``pipe(x)`` and ``loss.backward()`` (section 2.1 of the paper). Every partition
    keeps all micro-batches.

    >>> print(plan(gpipe, 2, 2))
    tick  0       1       2       3       4       5
    w=0   F[0,0]  F[1,0]                  B[1,0]  B[0,0]
    w=1           F[0,1]  F[1,1]  B[1,1]  B[0,1]
    """
    tasks = [[(i, j) for i in range(m)] for j in range(n)]
    sequences = [in_turns(pairs, pairs[::-1], m) for pairs in tasks]
    return lay_out(sequences, placement, [Size(m, n, m)] * n)


def one_f_one_b(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward: a partition does a backward as soon as it can.

    Partition *j* keeps at most ``min(m, n - j)`` micro-batches.

    >>> print(plan(one_f_one_b, 3, 2))
    tick  0       1       2       3       4       5       6       7
    w=0   F[0,0]  F[1,0]          B[0,0]  F[2,0]  B[1,0]          B[2,0]
    w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]  F[2,1]  B[2,1]
    """
    return _keeping(m, [n - j for j in range(n)], placement)


def eager_one_f_one_b(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward, with one more micro-batch in transit over each link.

    Under :func:`one_f_one_b` a partition sends a gradient back, does one forward and one backward,
    and then needs the input that the previous partition makes once it has that gradient. So every
    turn waits for both directions of the link. Here a partition has two forwards and two backwards
    to do in that time, and waits for nothing as long as both directions together take no longer
    than a forward and a backward (*eager 1F1B* in arXiv:2211.05322).

    Partition *j* keeps at most ``min(m, 2 * (n - j) - 1)`` micro-batches.

    >>> print(plan(eager_one_f_one_b, 3, 2))
    tick  0       1       2       3       4       5       6       7
    w=0   F[0,0]  F[1,0]  F[2,0]  B[0,0]          B[1,0]          B[2,0]
    w=1           F[0,1]  B[0,1]  F[1,1]  B[1,1]  F[2,1]  B[2,1]
    """
    return _keeping(m, [2 * (n - j) - 1 for j in range(n)], placement)


def _keeping(m: int, most: Sequence[int], placement: tuple[int, ...]) -> Ticks:
    """Alternate forwards and backwards, after ``most[j]`` forwards in partition ``j``."""
    tasks = [[(i, j) for i in range(m)] for j in range(len(most))]
    sequences = [in_turns(pairs, pairs, ahead) for pairs, ahead in zip(tasks, most, strict=True)]
    return lay_out(sequences, placement, [Size(m, len(most), m)] * len(most))


def interleaved(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """One forward, one backward, on *d* workers that serve the partitions in turns.

    With ``1f1b`` a device waits for the length of ``d - 1`` tasks while the pipeline fills, and
    again while it drains. If the layers are cut into ``v * d`` partitions, and device *r* has the
    partitions ``r``, ``r + d`` and so on, then a task is ``v`` times shorter, and so is the wait:
    the fraction ``(d - 1) / (v * m + d - 1)`` of the time of *m* micro-batches is lost. The price
    is ``v`` times as many copies, and memory (Narayanan et al., section 2.2 of arXiv:2104.04473).

    A worker does a group of micro-batches in its first partition, the same group in its second, and
    so on; then the next group. Backward it does the same, from its last partition to its first. A
    group has at least *d* micro-batches, so that its first is back from the other workers when its
    last is done here; with a shorter group the worker would have to wait.

    With ``v`` partitions per worker and *m* a multiple of *d*, worker *r* keeps at most ``(v - 1) *
    d + 2 * (d - r) - 1`` micro-batches, each of one partition. Otherwise it may keep a few more.

    >>> print(plan(interleaved, 1, 4, placement=[0, 1, 0, 1]))
    tick  0       1       2       3       4       5       6       7
    w=0   F[0,0]          F[0,2]                  B[0,2]          B[0,0]
    w=1           F[0,1]          F[0,3]  B[0,3]          B[0,1]

    Raises:
        ValueError: the workers do not serve the partitions in turns.
    """
    d = len(set(placement))
    if list(placement) != [placement[j % d] for j in range(n)]:
        raise ValueError(
            "'interleaved' is for devices that take the partitions in turns, as in devices="
            f"['cuda:0', 'cuda:1', 'cuda:0', 'cuda:1']; the workers of the partitions are "
            f"{list(placement)}"
        )
    if n == d:
        return one_f_one_b(m, n, placement)
    groups = _groups(m, d)
    sequences = [
        # In a last round, some workers may have no partition, and nothing to do.
        [action for action in _sequence(r, groups, -(-n // d), d) if action.j < n]
        for r in range(d)
    ]
    return lay_out(sequences, placement[:d], [Size(m, n, m)] * n)


def _groups(m: int, d: int) -> list[range]:
    """Divide the micro-batches evenly into groups of ``d`` or a little more."""
    count = max(1, m // d)
    return [range(m * g // count, m * (g + 1) // count) for g in range(count)]


def _sequence(r: int, groups: Sequence[range], v: int, d: int) -> list[Action]:
    """Order the actions of worker ``r``, if each has ``v`` partitions."""
    partitions = range(r, v * d, d)
    forwards = [(i, j) for group in groups for j in partitions for i in group]
    backwards = [(i, j) for group in groups for j in reversed(partitions) for i in group]
    # As many as the worker has time for between its first input and its first gradient.
    ahead = (v - 1) * max(d, *map(len, groups)) + 2 * (d - r) - 1
    return in_turns(forwards, backwards, ahead)
