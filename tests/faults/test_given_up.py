"""Tests that nothing is left of a call given up, interrupted, or left by a forked child."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from pipert import Observer, Pipe, PipelineTimeout, ReentrantCallError, TaskInfo
from pipert.observe.counters import Counters
from pipert.schedules.plan import plan_call
from tests.activations import until
from tests.faults.stuck import SHORT, WAIT, Stuck
from tests.layers import Apply


def test_the_input_is_dropped_with_the_error(no_gc: None) -> None:
    with Stuck() as stuck:
        x = stuck.x.clone()
        gone = weakref.ref(x)
        with pytest.raises(PipelineTimeout) as caught:
            stuck.pipe(x, timeout=SHORT)
        del x, caught
        stuck.until_back()
        assert until(lambda: gone() is None)


@pytest.mark.parametrize("whole", [False, True], ids=["call", "step"])
def test_an_output_that_comes_late_is_not_kept_while_another_worker_is_stuck(
    whole: bool, no_gc: None
) -> None:
    gate, other_gate = threading.Event(), threading.Event()
    entered, other_entered = threading.Event(), threading.Event()
    outputs: list[weakref.ref[Tensor]] = []

    def first(x: Tensor) -> Tensor:
        if x[0].item() == 1:
            entered.set()
            assert gate.wait(WAIT)
        return x * 2

    def second(x: Tensor) -> Tensor:
        other_entered.set()
        assert other_gate.wait(WAIT)
        y = x * 3
        outputs.append(weakref.ref(y))
        return y

    layers = nn.Sequential(Apply(first), Apply(second))
    with Pipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:

        def call() -> None:
            x = torch.arange(2.0).requires_grad_()
            with pytest.raises(PipelineTimeout):
                if whole:
                    pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), timeout=SHORT)
                else:
                    pipe(x, timeout=SHORT)

        call()
        # The machine may have been too slow for the layers to have begun.
        if entered.wait(0.0) and other_entered.wait(0.0):
            other_gate.set()
            assert until(lambda: len(outputs) == 1)
            assert until(lambda: outputs[0]() is None)
        gate.set()
        other_gate.set()


def test_a_with_statement_does_not_wait_for_the_layer_of_a_call_that_timed_out() -> None:
    stuck = Stuck()  # without a limit of its own
    with pytest.raises(PipelineTimeout):
        with stuck.pipe:
            stuck.times_out()
            raise PipelineTimeout
    assert not stuck.layer.go_on.is_set()
    threads = list(stuck.pipe._runtime.pool._threads)
    stuck.let_go()
    assert until(lambda: not any(thread.is_alive() for thread in threads))


def test_an_observer_that_calls_the_pipe_in_a_task_is_refused_and_dropped() -> None:
    refused: list[BaseException] = []

    class Calls(Observer):
        def task_started(self, task: TaskInfo) -> None:
            try:
                pipe(torch.ones(2, 1))
            except ReentrantCallError as error:
                refused.append(error)
                raise

    with Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"]) as pipe:
        pipe.add_observer(Calls())
        pipe(torch.ones(2, 1))
        pipe(torch.ones(2, 1))
    assert len(refused) == 1


def test_an_observer_may_close_the_pipe_from_a_task() -> None:
    class Closes(Observer):
        def task_finished(self, task: TaskInfo, seconds: float) -> None:
            pipe.close()

    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"])
    pipe.add_observer(Closes())
    assert pipe(torch.ones(2, 1)).shape == (2, 1)
    pipe.close()


def test_a_run_that_is_lost_in_an_interrupt_is_not_in_flight_for_ever() -> None:
    counters = Counters()
    begun = counters.begin(plan_call(1, 1, [0]))
    assert counters.read()["in_flight"] == 1
    del begun  # as when an interrupt comes before anybody holds it
    assert counters.read()["in_flight"] == 0 and counters.read()["cancellations"] == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_in_a_call_may_ask_for_statistics_and_exit() -> None:
    entered, gate = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        entered.set()
        assert gate.wait(WAIT)
        return x

    children: list[int] = []

    def fork(*_: object) -> None:
        pid = os.fork()
        if pid == 0:
            pipe.statistics()
            sys.exit(7)  # by way of the call that was interrupted
        children.append(pid)
        gate.set()

    def send() -> None:
        assert entered.wait(WAIT)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    old = signal.signal(signal.SIGUSR2, fork)
    try:
        with Pipe(nn.Sequential(Apply(slow)), [1], devices=["cpu"]) as pipe:
            sender = threading.Thread(target=send)
            sender.start()
            try:
                pipe(torch.ones(2, 1))
            except SystemExit as end:  # the child: not through pytest
                os._exit(7 if end.code == 7 else 1)
            sender.join()
    finally:
        signal.signal(signal.SIGUSR2, old)
    (child,) = children
    status: list[int] = []

    def ended() -> bool:
        pid, how = os.waitpid(child, os.WNOHANG)
        if pid:
            status.append(os.waitstatus_to_exitcode(how))
        return bool(pid)

    if not until(ended):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == [7]
