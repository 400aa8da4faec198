"""Tests which rounds of a measurement count: those in which no two threads shared a core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("torchgpipe", reason="the benchmarks run torchgpipe beside pipert")

import _cores  # noqa: E402
import _measure  # noqa: E402
from _measure import take_turns, verdict  # noqa: E402


def turns(monkeypatch: pytest.MonkeyPatch, shared: list[bool], repeats: int) -> list[int]:
    """Takes turns while cores are ``shared`` as told; returns the numbers of rounds that count."""
    answers, number = iter(shared), 0

    @contextmanager
    def watched() -> Iterator[Callable[[], bool]]:
        yield lambda: next(answers)

    def measure(_: str) -> int:
        nonlocal number
        number += 1
        return (number - 1) // 2

    monkeypatch.setattr(_measure, "watched_cores", watched)
    found = take_turns(measure, ("pipert", "torchgpipe"), repeats=repeats, warm_up=0)
    assert found["pipert"] == found["torchgpipe"]
    return found["pipert"]


@pytest.mark.parametrize(
    ("shared", "counting"),
    [
        ([False] * 4, [0, 1, 2]),
        ([True, *[False] * 4], [1, 2, 3]),  # before the first round
        ([False, False, True, *[False] * 3], [0, 3, 4]),  # after the second
        ([*[False] * 3, *[True] * 4], [0, 1, 2, 3, 4, 5]),  # too often
    ],
)
def test_rounds_with_a_core_for_each_thread_count(
    shared: list[bool], counting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turns(monkeypatch, shared, repeats=3) == counting


def test_the_verdict_counts_rounds_with_a_shared_core(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns(monkeypatch, [True, *[False] * 4], repeats=3)
    verdict([], check=True)
    assert capsys.readouterr().out == (
        "Threads shared a core in 1 of 4 rounds; 1 of these were left out.\nEvery bar held.\n"
    )


@pytest.mark.parametrize("factor", [1.1, 1.3])
def test_threads_share_a_core_if_both_take_longer_at_once(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([1.0, 1.0, 1.0, 1.0, factor, factor])
    monkeypatch.setattr(_cores, "_multiply", lambda _: next(taken))
    with _cores.watched_cores() as are_shared:
        assert are_shared() == (factor == 1.3)
