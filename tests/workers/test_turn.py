"""Turns: who asks for one, how long one is kept, and that nobody ever depends on one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.workers import turn as turn_module
from pipert.workers.turn import Turn, Turns

WAIT = 10.0  # s; what should happen at once is given up after it

SHORT = turn_module._SHORT / 4
LONG = turn_module._LONG * 4
BETWEEN = turn_module._SHORT * 1.5


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turn_module, "perf_counter", clock)
    return clock


def do(turn: Turn, seconds: float) -> None:
    """A task whose layers compute for ``seconds``."""
    turn.take(True)
    turn.layers_took(seconds)


def held(turn: Turn) -> bool:
    return "not held" not in repr(turn)


def test_the_first_task_does_not_ask_for_a_turn(clock: Clock) -> None:
    turn = Turn(Turns())
    turn.take(True)
    assert not held(turn)


def test_threads_that_all_execute_python_take_no_turns(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_module, "ONE_THREAD_AT_A_TIME", False)
    turn = Turn(Turns())
    do(turn, SHORT)
    turn.take(True)
    assert not held(turn)


def test_a_task_after_a_short_one_takes_a_turn(clock: Clock) -> None:
    turn = Turn(Turns())
    do(turn, SHORT)
    turn.take(True)
    assert held(turn)


def test_a_task_after_a_long_one_does_not_ask_for_a_turn(clock: Clock) -> None:
    turn = Turn(Turns())
    do(turn, SHORT)
    do(turn, LONG)
    turn.take(True)
    assert not held(turn)


def test_a_turn_is_kept_for_the_next_short_task(clock: Clock) -> None:
    turn = Turn(Turns())
    do(turn, SHORT)
    do(turn, SHORT)
    assert held(turn)


def test_a_turn_is_given_up_after_a_long_task(clock: Clock) -> None:
    turn = Turn(Turns())
    do(turn, SHORT)
    do(turn, LONG)
    assert not held(turn)


def test_a_time_that_may_be_due_to_others_does_not_count_at_once(clock: Clock) -> None:
    turn = Turn(Turns())
    do(turn, SHORT)
    do(turn, BETWEEN)
    assert held(turn)


def test_a_time_that_may_be_due_to_others_counts_when_it_stays(clock: Clock) -> None:
    turn = Turn(Turns())
    do(turn, SHORT)
    for _ in range(100):
        do(turn, BETWEEN)
    assert not held(turn)


def test_a_turn_is_given_up_for_an_instant_after_it_was_held_for_long(clock: Clock) -> None:
    releases = []

    class Lock:
        """Counts, for the instant itself cannot be seen."""

        def acquire(self, timeout: float) -> bool:
            return True

        def release(self) -> None:
            releases.append(clock.now)

    turns = Turns()
    turns.lock = Lock()  # type: ignore[assignment]
    turn = Turn(turns)
    do(turn, SHORT)
    do(turn, SHORT)
    clock.now += turn_module._HOLD * 2
    turn.take(True)
    assert len(releases) == 1


def test_giving_up_lets_others_take_a_turn(clock: Clock) -> None:
    turns = Turns()
    turn = Turn(turns)
    do(turn, SHORT)
    turn.take(True)
    turn.give_up()
    assert not turns.lock.locked()


def test_giving_up_what_is_not_held_leaves_the_turn_of_another_alone(clock: Clock) -> None:
    turns = Turns()
    one, another = Turn(turns), Turn(turns)
    do(one, SHORT)
    one.take(True)
    another.give_up()
    assert turns.lock.locked()


def test_a_worker_that_waited_in_vain_goes_on() -> None:
    turns = Turns()
    turns.lock.acquire()
    turn = Turn(turns)
    do(turn, SHORT)
    turn.take(True)
    assert not held(turn)


def test_a_worker_that_waited_in_vain_does_not_ask_for_a_while(clock: Clock) -> None:
    turns = Turns()
    turns.lock.acquire()
    turn = Turn(turns)
    do(turn, SHORT)
    do(turn, SHORT)
    turns.lock.release()
    turn.take(True)
    assert not held(turn)


def test_a_worker_that_waited_in_vain_asks_again_later(clock: Clock) -> None:
    turns = Turns()
    turns.lock.acquire()
    turn = Turn(turns)
    do(turn, SHORT)
    do(turn, SHORT)
    turns.lock.release()
    clock.now += turn_module._BACK_OFF * turn_module._PATIENCE
    turn.take(True)
    assert held(turn)


# Long tasks that fight for the interpreter --------------------------------------------------------


class Waits:
    """How often the thread has waited: as often in each task as a test says."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(turn_module, "waits", waits)
    return waits


def do_long(
    turn: Turn, waits: Waits, *, fights: bool, times: int, gains: float = 0.5
) -> list[bool]:
    """Long tasks that wait often or hardly ever; whether each had a turn.

    ``gains`` is what they take with a turn, of the time that they take without.
    """
    had = []
    for _ in range(times):
        turn.take(True)
        had.append(held(turn))
        waits.now += int(turn_module._FIGHT * LONG * (3 if fights and not had[-1] else 0.3))
        turn.layers_took(LONG * gains if had[-1] else LONG)
    return had


FIRST = turn_module._LOOK  # as many tasks as it takes until one was looked at
ALL = turn_module._LOOK_AGAIN


def test_long_tasks_that_fight_for_the_interpreter_take_turns(clock: Clock, waits: Waits) -> None:
    turn = Turn(Turns())
    assert not any(do_long(turn, waits, fights=True, times=FIRST))
    turn.take(True)
    assert held(turn)


def test_long_tasks_that_hardly_ever_wait_take_no_turns(clock: Clock, waits: Waits) -> None:
    turn = Turn(Turns())
    assert not any(do_long(turn, waits, fights=False, times=2 * ALL))


def test_a_turn_of_a_long_task_ends_with_it(clock: Clock, waits: Waits) -> None:
    turn = Turn(Turns())
    had = do_long(turn, waits, fights=True, times=FIRST + 1)
    assert had[-1] and not held(turn)


def test_a_long_task_that_calls_no_layers_takes_no_turn(clock: Clock, waits: Waits) -> None:
    turn = Turn(Turns())
    do_long(turn, waits, fights=True, times=FIRST)
    turn.take(False)
    assert not held(turn)


def test_a_task_now_and_then_goes_without_a_turn_and_the_others_go_on_with_one(
    clock: Clock, waits: Waits
) -> None:
    turn = Turn(Turns())
    do_long(turn, waits, fights=True, times=FIRST)
    had = do_long(turn, waits, fights=True, times=3 * ALL)
    assert had.count(False) == 3


def test_turns_end_when_a_task_without_one_does_not_fight_any_more(
    clock: Clock, waits: Waits
) -> None:
    turn = Turn(Turns())
    do_long(turn, waits, fights=True, times=FIRST)
    had = do_long(turn, waits, fights=False, times=3 * ALL)
    assert had[0] and not any(had[ALL:])


def test_tasks_that_wait_for_something_else_take_a_few_turns_and_then_none_for_long(
    clock: Clock, waits: Waits
) -> None:
    turn = Turn(Turns())
    do_long(turn, waits, fights=True, times=FIRST)
    had = do_long(turn, waits, fights=True, times=turn_module._LOOK_LATER, gains=1.0)
    assert had.count(True) == turn_module._IN_VAIN
    had = do_long(turn, waits, fights=True, times=2 * turn_module._IN_VAIN)
    assert had.count(True) == turn_module._IN_VAIN


def test_one_task_that_is_no_shorter_with_a_turn_ends_nothing(clock: Clock, waits: Waits) -> None:
    turn = Turn(Turns())
    do_long(turn, waits, fights=True, times=FIRST)
    for _ in range(2):
        do_long(turn, waits, fights=True, times=turn_module._IN_VAIN - 1, gains=1.0)
        do_long(turn, waits, fights=True, times=1)
    turn.take(True)
    assert held(turn)


def test_what_a_task_waits_that_failed_is_not_counted(clock: Clock, waits: Waits) -> None:
    turn = Turn(Turns())
    do_long(turn, waits, fights=False, times=FIRST - 1)
    turn.take(True)  # looked at; its layers raise, so nobody says how long they took
    waits.now += 1_000_000
    do_long(turn, waits, fights=False, times=1)
    turn.take(True)
    assert not held(turn)


def test_who_waits_for_a_turn_of_a_long_task_gets_it_before_the_one_who_had_it() -> None:
    turns = Turns()
    assert turns.acquire_in_line(WAIT)
    order: list[str] = []
    thread = threading.Thread(target=_take_in_line, args=(turns, "other", order), daemon=True)
    thread.start()
    while not turns._first_in_line.locked():  # until the other waits
        thread.join(0.001)
    turns.lock.release()
    _take_in_line(turns, "mine", order)
    thread.join(WAIT)
    assert order == ["other", "mine"]


def _take_in_line(turns: Turns, name: str, order: list[str]) -> None:
    assert turns.acquire_in_line(WAIT)
    order.append(name)
    turns.lock.release()


def test_waiting_in_line_in_vain_ends_and_lets_others_wait() -> None:
    turns = Turns()
    turns.lock.acquire()
    assert not turns.acquire_in_line(0.01)
    assert not turns._first_in_line.locked()
    assert turns._first_in_line.acquire()
    assert not turns.acquire_in_line(0.01)


# Threads ------------------------------------------------------------------------------------------


def test_a_turn_passes_from_one_thread_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_module, "_HOLD", WAIT)
    monkeypatch.setattr(turn_module, "_PATIENCE", WAIT)
    turns = Turns()
    mine, other = Turn(turns), Turn(turns)
    for turn in (mine, other):
        do(turn, SHORT)
    mine.take(True)
    order: list[str] = []

    def work() -> None:
        other.take(True)
        order.append("other")
        other.give_up()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    order.append("mine")
    mine.give_up()
    thread.join(WAIT)
    assert order == ["mine", "other"]


def test_tasks_that_wait_for_each_other_both_go_on_although_one_has_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tasks count as short; then ``F[1,0]`` and ``F[0,1]`` have to meet."""
    monkeypatch.setattr(turn_module, "_SHORT", WAIT)
    monkeypatch.setattr(turn_module, "_LONG", WAIT)
    together = threading.Barrier(2)

    class Meet(nn.Module):
        def __init__(self, micro_batch: int) -> None:
            super().__init__()
            self.micro_batch = micro_batch

        def forward(self, x: Tensor) -> Tensor:
            if x.item() == self.micro_batch:
                together.wait(WAIT)
            return x

    layers = nn.Sequential(Meet(1), Meet(0))
    with Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=8, checkpoint="never") as pipe:
        pipe(torch.full((8, 1), 9.0))
        assert torch.equal(pipe(torch.arange(8.0).reshape(8, 1)).flatten(), torch.arange(8.0))
