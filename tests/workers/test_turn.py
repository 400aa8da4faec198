"""Tests turns: which tasks ask for one, how long it is kept, and that none depends on one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.workers import turn as turn_module
from pipert.workers.turn import Turn

WAIT = 10.0  # s; what should happen at once is given up after it

SHORT = turn_module._SHORT / 4
LONG = turn_module._LONG * 4
BETWEEN = turn_module._SHORT * 1.5


class Clock:
    """A clock that a test advances."""

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
    """Runs a task whose layers compute for ``seconds``."""
    turn.take()
    turn.executed(0.0, seconds)


def settle(turn: Turn) -> None:
    """Three tasks that are short, as the layers are from now on."""
    for _ in range(3):
        turn.executed(0.0, SHORT)


def held(turn: Turn) -> bool:
    return "not held" not in repr(turn)


def test_the_first_task_does_not_ask_for_a_turn(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    turn.take()
    assert not held(turn)


def test_threads_that_all_execute_python_take_no_turns(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_module, "ONE_THREAD_AT_A_TIME", False)
    turn = Turn(threading.Lock())
    settle(turn)
    turn.take()
    assert not held(turn)


def test_a_task_after_three_short_ones_takes_a_turn(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    turn.take()
    assert held(turn)


def test_a_task_after_a_long_one_does_not_ask_for_a_turn(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    do(turn, LONG)
    turn.take()
    assert not held(turn)


def test_a_turn_is_kept_for_the_next_short_task(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    do(turn, SHORT)
    assert held(turn)


def test_a_turn_is_given_up_after_a_long_task(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    do(turn, LONG)
    assert not held(turn)


def test_a_time_that_may_be_due_to_others_does_not_count_at_once(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    do(turn, BETWEEN)
    assert held(turn)


def test_a_time_that_may_be_due_to_others_counts_when_it_stays(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    for _ in range(100):
        do(turn, BETWEEN)
    assert not held(turn)


def test_a_time_that_may_be_due_to_others_is_not_believed_for_ever(clock: Clock) -> None:
    """Eight workers in each other's way would look long for as long as they are."""
    turn = Turn(threading.Lock())
    for _ in range(100):
        turn.take()
        if held(turn):
            return
        turn.executed(0.0, BETWEEN)
    raise AssertionError("it never asked for a turn")


def test_a_time_that_was_long_with_a_turn_is_believed_for_a_while(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    turn.take()
    assert held(turn)
    for _ in range(20):
        do(turn, BETWEEN)
    for _ in range(30):
        do(turn, BETWEEN)
        assert not held(turn)


def test_a_worker_whose_layers_are_short_from_now_on_takes_turns_again(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    do(turn, LONG)
    settle(turn)
    turn.take()
    assert held(turn)


def test_a_few_short_times_among_long_ones_make_no_turns(clock: Clock) -> None:
    """Layers of most micro-batches overlap, which turns would keep them from."""
    turn, turns = Turn(threading.Lock()), 0
    for k in range(800):
        turn.take()
        turns += held(turn)
        turn.executed(0.0, turn_module._LONG / 2 if k % 8 else SHORT)
    assert turns < 200


def test_waits_in_vain_do_not_make_long_layers_short(clock: Clock) -> None:
    lock = threading.Lock()
    turn, turns = Turn(lock), 0
    settle(turn)
    lock.acquire()
    turn.take()
    for _ in range(1000):
        do(turn, BETWEEN)
    lock.release()
    clock.now += turn_module._BACK_OFF
    for _ in range(100):
        turn.take()
        turns += held(turn)
        turn.executed(0.0, BETWEEN)
    assert 0 < turns < 50


def test_a_long_backward_ends_the_turn_and_asks_for_none_for_a_while(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    turn.take()
    long = turn_module._LONG * 2
    turn.executed(long, None)
    turn.take()
    assert not held(turn)
    clock.now += 8 * long
    turn.take()
    assert held(turn)


def test_a_short_task_keeps_the_turn(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    settle(turn)
    turn.take()
    turn.executed(turn_module._HOLD / 2, None)
    assert held(turn)


def test_a_turn_is_given_up_for_an_instant_after_it_was_held_for_long(clock: Clock) -> None:
    releases = []

    class Lock:
        """Counts, for the instant itself cannot be seen."""

        def acquire(self, timeout: float) -> bool:
            return True

        def release(self) -> None:
            releases.append(clock.now)

    turn = Turn(Lock())  # type: ignore[arg-type]
    settle(turn)
    do(turn, SHORT)
    clock.now += turn_module._HOLD * 2
    turn.take()
    assert len(releases) == 1


def test_giving_up_lets_others_take_a_turn(clock: Clock) -> None:
    lock = threading.Lock()
    turn = Turn(lock)
    settle(turn)
    turn.take()
    turn.give_up()
    assert not lock.locked()


def test_giving_up_without_a_turn_leaves_the_turn_of_another_alone(clock: Clock) -> None:
    lock = threading.Lock()
    one, another = Turn(lock), Turn(lock)
    settle(one)
    one.take()
    another.give_up()
    assert lock.locked()


def test_a_worker_that_ends_between_taking_a_turn_and_noting_it_gives_it_up() -> None:
    """An exception that is thrown into a thread which waits for a lock is raised when it has it."""
    lock = threading.RLock()

    class Interrupted:
        release = lock.release

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            lock.acquire(blocking, timeout)
            raise KeyboardInterrupt

    def work() -> None:
        turn = Turn(Interrupted())
        settle(turn)
        with pytest.raises(KeyboardInterrupt):
            turn.take()
        turn.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert lock.acquire(timeout=0.0)


def test_a_worker_that_ends_leaves_the_turn_of_another_alone() -> None:
    lock = threading.RLock()
    mine = Turn(lock)
    settle(mine)
    mine.take()
    thread = threading.Thread(target=Turn(lock).end, daemon=True)
    thread.start()
    thread.join(WAIT)
    mine.give_up()  # which raises if nobody has it
    with pytest.raises(RuntimeError):
        lock.release()


def test_a_worker_that_waited_in_vain_goes_on() -> None:
    lock = threading.Lock()
    lock.acquire()
    turn = Turn(lock)
    settle(turn)
    turn.take()
    assert not held(turn)


def test_a_worker_that_waited_in_vain_does_not_ask_for_a_while(clock: Clock) -> None:
    lock = threading.Lock()
    lock.acquire()
    turn = Turn(lock)
    settle(turn)
    do(turn, SHORT)
    lock.release()
    turn.take()
    assert not held(turn)


def test_a_worker_that_waited_in_vain_asks_again_later(clock: Clock) -> None:
    lock = threading.Lock()
    lock.acquire()
    turn = Turn(lock)
    settle(turn)
    do(turn, SHORT)
    lock.release()
    clock.now += turn_module._BACK_OFF
    turn.take()
    assert held(turn)


def test_a_turn_passes_from_one_thread_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_module, "_HOLD", WAIT)
    monkeypatch.setattr(turn_module, "_PATIENCE", WAIT)
    lock = threading.Lock()
    mine, other = Turn(lock), Turn(lock)
    for turn in (mine, other):
        settle(turn)
    mine.take()
    order: list[str] = []

    def work() -> None:
        other.take()
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


# Layers of many small operations ------------------------------------------------------------------

NODES = 100
SMALL = NODES * turn_module._SMALL / 4
LARGE = NODES * turn_module._SMALL * 4


def forward(turn: Turn, seconds: float) -> bool:
    """Runs a forward of ``NODES`` operations; returns whether it had a turn."""
    turn.take(may_be_long=True)
    had_turn = held(turn)
    turn.executed(seconds, seconds, NODES)
    return had_turn


def test_layers_of_small_operations_take_a_turn_for_one_task_and_a_backward_takes_none(
    clock: Clock,
) -> None:
    turn = Turn(threading.Lock())
    assert not forward(turn, SMALL)  # nothing is known yet
    for _ in range(3):
        assert forward(turn, SMALL)
        assert not held(turn)
        turn.take()  # a backward
        assert not held(turn)
        turn.executed(SMALL, None)


def test_layers_of_large_operations_take_no_turns(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    assert [forward(turn, LARGE) for _ in range(20)] == [False] * 20


@pytest.mark.parametrize("nodes", [0, turn_module._MANY - 1])
def test_layers_without_a_graph_or_with_few_operations_take_no_turns(
    clock: Clock, nodes: int
) -> None:
    turn = Turn(threading.Lock())
    for _ in range(3):
        turn.take(may_be_long=True)
        assert not held(turn)
        turn.executed(SMALL, BETWEEN, nodes)


def test_operations_that_become_large_are_noticed_and_tried_again_later(clock: Clock) -> None:
    turn = Turn(threading.Lock())
    forward(turn, SMALL)
    forward(turn, SMALL)
    had = [forward(turn, 100 * SMALL) for _ in range(200)]
    assert sum(had[:10]) <= 5
    assert 1 <= sum(had[10:]) <= 20


def test_operations_that_only_waited_for_the_interpreter_are_found_to_be_small(
    clock: Clock,
) -> None:
    turn = Turn(threading.Lock())
    for _ in range(40):
        if forward(turn, LARGE):
            break
    else:
        pytest.fail("their worker never took a turn to measure them")
    turn.executed(SMALL, SMALL, NODES)
    assert forward(turn, SMALL)


def test_a_forward_does_not_wait_for_ever_for_its_turn(clock: Clock) -> None:
    lock = threading.Lock()
    turn = Turn(lock)
    forward(turn, SMALL)
    with lock:
        assert not forward(turn, SMALL)
    assert not forward(turn, SMALL)  # it does not ask for a while
    clock.now += 2 * turn_module._BACK_OFF
    assert forward(turn, SMALL)
