"""Defines the steps of the soak: anything a service may do with a pipe, in any order.

A good step compares the pipe with the plain module. A bad step provokes an error (see ``Demand``),
which must be raised, and ends with a good step. The main thread draws all random choices, so a seed
gives the same steps; thread timing may still differ.
"""

from __future__ import annotations

import ctypes
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from _soak_training import Training
from _soaked import STATIONS, WIDTH, Late, Soaked
from _usage import collect
from torch import Tensor, nn

from pipert import (
    Observer,
    Pipe,
    PipeClosedError,
    PipelineTimeout,
    WorkerBusyError,
    WorkerDiedError,
)

__all__ = ["PATIENCE", "Soak"]

PATIENCE = 60.0  # seconds until an expected event is given up
MODES = ("always", "except_last", "never")
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Fault(Exception):
    """Raised by a layer on demand."""


class Fatal(BaseException):
    """A fault that is no Exception, like KeyboardInterrupt; also thrown into threads."""


@dataclass(frozen=True)
class Case:
    """One call, and the use of its result."""

    rows: int
    context: str
    autocast: bool
    how: str  # "backward", "grad", "twice" or "drop"
    seed: int


class Soak:
    """The pipes under test and the steps, each a method with its weight in ``KINDS``."""

    def __init__(self, devices: Sequence[str], seed: int) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.soaked = Soaked(devices)
        self.device = torch.device(devices[0]).type
        self.training = Training(devices, self.random)
        self.optimizer = torch.optim.AdamW(self.soaked.pipe.parameters(), lr=1e-3)
        self.done: Counter[str] = Counter()
        self._interrupt_due = threading.Event()
        self._interrupted = threading.Event()
        signal.signal(signal.SIGUSR1, self._on_signal)

    def warm_up(self) -> None:
        """Takes a step of each kind."""
        for kind in KINDS:
            self.do(kind)

    def step(self) -> None:
        """Takes a step of a random kind."""
        self.do(self.random.choices(list(KINDS), list(KINDS.values()))[0])

    def do(self, kind: str) -> None:
        self.done[kind] += 1
        try:
            getattr(self, kind.replace(" ", "_"))()
        except BaseException as error:
            error.add_note(f"in step {self.done.total()}, {kind!r}")
            raise

    # Good steps

    def case(self, **fixed: Any) -> Case:
        r = self.random
        how = r.choices(("backward", "grad", "twice", "drop"), (6, 4, 1, 1))[0]
        context = r.choices(tuple(CONTEXTS), (8, 1, 1))[0]
        case = Case(r.randint(1, 17), context, r.random() < 0.15, how, r.randrange(1 << 30))
        return replace(case, **fixed)

    def settings(self) -> None:
        """Changes the settings of the pipe that all its callers share."""
        pipe = self.soaked.pipe
        pipe.chunks, pipe.checkpoint = self.random.randint(1, 6), self.random.choice(MODES)
        training = self.random.random() < 0.8
        pipe.train(training)
        self.soaked.plain.train(training)

    def call(self) -> None:
        self.settings()
        self.check(self.case())

    def check(self, case: Case) -> None:
        """Compares the pipe with the plain module."""
        theirs = self.run(self.soaked.plain, case)
        ours = self.run(self.soaked.pipe, case, timeout=PATIENCE)
        rough = 0.05 if case.autocast else 1e-4
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=rough, check_device=False)

    def run(self, module: nn.Module, case: Case, **kwargs: Any) -> list[Tensor | None]:
        """Runs a case; returns the output and the gradients of the input and the parameters."""
        x = rows(case.rows, case.seed).requires_grad_()
        leaves = [x, *module.parameters()]
        with ExitStack() as stack:
            stack.enter_context(CONTEXTS[case.context]())
            if case.autocast:
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            y = module(x, **kwargs)
        assert y.requires_grad == (case.context == "grad")
        if not y.requires_grad or case.how == "drop":
            return [y.detach().float()]
        loss = y.float().square().sum()
        if case.how == "backward":
            for leaf in leaves:
                leaf.grad = None
            loss.backward()
            return [y.detach().float(), *(leaf.grad for leaf in leaves)]
        if case.how == "twice":
            torch.autograd.grad(loss, leaves, retain_graph=True)
        return [y.detach().float(), *torch.autograd.grad(loss, leaves)]

    def learn(self) -> None:
        """Takes a step of the optimizer and copies the result to the plain modules."""
        self.check(self.case(context="grad", how="backward", autocast=False))
        self.optimizer.step()
        self.soaked.learn()

    def step_of_training(self) -> None:
        self.training.step()

    def resume(self) -> None:
        self.training.resume()

    def running_statistics(self) -> None:
        """Checks deferred batch norm, which normalises each micro-batch by itself."""
        norm, plain = self.soaked.norm, self.soaked.plain_norm
        norm.chunks, norm.checkpoint = self.random.randint(1, 4), self.random.choice(MODES)
        parts = [rows(self.random.randint(2, 5), self.random.randrange(1 << 30))]
        parts *= norm.chunks  # of equal sizes, so that each part becomes a micro-batch
        y = norm(torch.cat(parts), timeout=PATIENCE)
        expected = torch.cat([plain(part) for part in parts])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4, check_device=False)
        y.sum().backward()
        expected.sum().backward()  # type: ignore[no-untyped-call]
        self.soaked.forget_gradients()

    def callers(self) -> None:
        """Runs several callers at once, one of which may meet a fault."""
        self.settings()
        fault = Fault() if self.random.random() < 0.3 else None
        if fault is not None:
            self.soaked.demand.make(self.random.randrange(STATIONS), partial(throw, fault))
        outcomes = self.at_once()
        assert self.soaked.demand.withdraw() is False or fault is None
        assert [o for o in outcomes if o is not None] == ([fault] if fault else []), outcomes

    def at_once(self, meanwhile: Callable[[], None] = lambda: None) -> list[BaseException | None]:
        """Runs three checks at the same time, and returns what each raised.

        They change no ``.grad``.
        """
        hows = [self.random.choice(("grad", "drop")) for _ in range(3)]
        outcomes: list[BaseException | None] = []

        def check(case: Case) -> None:
            try:
                self.check(case)
                outcomes.append(None)
            except BaseException as error:  # noqa: B036  returned to the caller
                outcomes.append(error)

        threads = [threading.Thread(target=check, args=[self.case(how=how)]) for how in hows]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert len(outcomes) == 3, "a caller hangs"
        return outcomes

    def observe(self) -> None:
        """Calls the pipe with an observer, which may raise and then be dropped."""
        pipe, observer = self.soaked.pipe, self.random.choice((Observer, Grumpy))()
        pipe.add_observer(observer)
        self.call()
        pipe.remove_observer(observer)

    # Bad steps, each followed by a good one

    def fault(self) -> None:
        """Lets a layer raise in the forward."""
        self.settings()
        case = self.case()
        m = min(case.rows, self.soaked.pipe.chunks)
        error = self.random.choice((Fault, Fatal, SystemExit, KeyboardInterrupt))("on demand")
        station = self.random.randrange(STATIONS)
        self.soaked.demand.make(station, partial(throw, error), after=self.random.randrange(m))
        assert self.raised(case) is error
        self.call()

    def fault_in_recomputation(self) -> None:
        """Lets a layer raise in the backward.

        The step runs on a thread of its own, because a backward that raises leaves tasks, and with
        them tensors, in a per-thread queue that torch empties only gradually, with or without
        pipert.
        """
        self.settings()
        self.soaked.pipe.checkpoint = "always"
        case = self.case(context="grad", how=self.random.choice(("backward", "grad")))
        error = self.random.choice((Fault, Fatal, SystemExit))("on demand")
        station = self.random.randrange(STATIONS)
        self.soaked.demand.make(station, partial(throw, error), recomputing=True)
        raised: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: raised.append(self.raised(case)))
        thread.start()
        thread.join(2 * PATIENCE)
        assert raised == [error], raised
        self.call()

    def raised(self, case: Case, timeout: float = PATIENCE) -> BaseException | None:
        """Runs a case on the pipe; returns the exception that it raises, if any."""
        try:
            self.run(self.soaked.pipe, case, timeout=timeout)
        except BaseException as error:  # noqa: B036  returned to the caller
            return error
        return None

    def late(self) -> None:
        """Lets a layer outlast the time limit of its call and return later."""
        late, case = Late(), self.case()
        self.soaked.demand.make(self.random.randrange(STATIONS), late)
        limit = self.random.choice((0.001, 0.02))
        assert isinstance(self.raised(case, limit), PipelineTimeout)
        if not self.soaked.demand.withdraw():
            assert late.entered.wait(PATIENCE)
            assert isinstance(self.raised(case), WorkerBusyError)
        late.let_go()
        deadline = time.monotonic() + PATIENCE
        while error := self.raised(self.case()):
            assert isinstance(error, WorkerBusyError) and time.monotonic() < deadline, error
            time.sleep(1e-3)
        self.call()

    def interrupt(self) -> None:
        """Interrupts the caller with a signal while a layer is executing."""
        self.soaked.demand.make(self.random.randrange(STATIONS), self._send)
        error = self.raised(self.case())
        assert isinstance(error, Fatal) and not self._interrupt_due.is_set(), error
        self.call()

    def _send(self) -> None:
        # It is sent repeatedly, because CPython misses a signal that comes just before it blocks.
        self._interrupted.clear()
        self._interrupt_due.set()
        main = threading.main_thread().ident
        assert main is not None
        while not self._interrupted.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    def _on_signal(self, *_: object) -> None:
        if self._interrupt_due.is_set():
            self._interrupt_due.clear()
            self._interrupted.set()
            raise Fatal("interrupted")

    def death(self) -> None:
        """Kills an idle worker from outside."""
        self.end_a_worker()
        self.recover()

    def death_at_work(self) -> None:
        """Kills a worker from outside while several callers are in the pipe."""
        self.settings()
        for error in self.at_once(self.end_a_worker):
            assert error is None or isinstance(error, (Fatal, WorkerDiedError)), error
        self.recover()

    def end_a_worker(self) -> None:
        workers = sorted(self.soaked.workers(), key=lambda thread: thread.name)
        ident = self.random.choice(workers).ident
        assert ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Fatal))

    def recover(self) -> None:
        """Calls each pipe until it has replaced a killed worker; before that, calls may raise."""
        deadline = time.monotonic() + PATIENCE
        for pipe in self.pipes():
            good = 0
            while good < 2:
                assert time.monotonic() < deadline, "the pipe does not recover"
                try:
                    pipe(rows(2 * pipe.chunks, 0), timeout=PATIENCE)
                    good += 1
                except (Fatal, WorkerDiedError):
                    good = 0
        self.call()

    def make_again(self) -> None:
        """Closes or just drops the pipe, and makes it again with another balance."""
        if self.random.random() < 0.5:
            self.soaked.pipe.close(timeout=PATIENCE)
            assert isinstance(self.raised(self.case()), PipeClosedError)
        self.soaked.make_again(self.random.randrange(9))
        self.call()

    def close_at_work(self) -> None:
        """Lets another thread close the pipe during a call."""
        late, pipe = Late(), self.soaked.pipe

        def close() -> None:
            late.entered.wait(PATIENCE)
            closer = threading.Thread(target=pipe.close)
            closer.start()
            late.let_go()
            closer.join(PATIENCE)

        thread = threading.Thread(target=close)
        thread.start()
        self.soaked.demand.make(self.random.randrange(STATIONS), late)
        error = self.raised(self.case())
        assert error is None or isinstance(error, PipeClosedError), error
        thread.join(PATIENCE)
        self.soaked.make_again(self.random.randrange(9))
        self.call()

    # At rest

    def pipes(self) -> list[Pipe]:
        return [*self.soaked.pipes(), self.training.pipe]

    def close(self) -> None:
        self.soaked.close()
        self.training.pipe.close(timeout=PATIENCE)

    def rest(self) -> None:
        """Waits until all threads of the pipes are there, no others are, and none has work."""
        self.soaked.forget_gradients()
        collect()  # an error and the frames that refer to it are cycles, which keep pipes alive
        pipes = self.pipes()
        for pipe in pipes:  # a pipe starts its threads at its first call
            pipe(rows(2 * pipe.chunks, 0))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            workers = [worker for pipe in pipes for worker in pipe.statistics().workers]
            busy = any(worker.doing or worker.queue_depth for worker in workers)
            clocks = len(pipes)
            if not busy and len(self.soaked.workers()) == len(workers) + clocks:
                break
            time.sleep(1e-3)
        assert not busy, workers
        assert all(pipe.statistics().in_flight == 0 for pipe in pipes)


# The weight with which each kind is drawn.
KINDS = {
    "call": 50,
    "learn": 6,
    "step of training": 20,
    "resume": 4,
    "running statistics": 8,
    "callers": 6,
    "observe": 3,
    "fault": 10,
    "fault in recomputation": 6,
    "late": 2,
    "interrupt": 2,
    "death": 1,
    "death at work": 1,
    "make again": 3,
    "close at work": 2,
}


class Grumpy(Observer):
    """An observer that raises at its first task and is dropped."""

    def task_started(self, task: object) -> None:
        raise Fault("an observer raises")


def throw(error: BaseException) -> None:
    raise error


def rows(n: int, seed: int) -> Tensor:
    """Draws rows of normal numbers, on the CPU."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))
