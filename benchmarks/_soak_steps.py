"""The steps of the soak: anything a service may do with a pipe, in any order.

A good step compares the pipe with the plain module. A bad one provokes an error (see ``Demand``),
which must be raised, and ends with a good one. The main thread draws all random choices,
so a seed gives the same steps; thread timing may still differ.
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

PATIENCE = 60.0  # s; what must happen soon is given up after it
MODES = ("always", "except_last", "never")
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Fault(Exception):
    """Raised by a layer on demand."""


class Fatal(BaseException):
    """The same, of the kind of KeyboardInterrupt; also thrown into threads."""


@dataclass(frozen=True)
class Case:
    """One call, and what is done with its result."""

    rows: int
    context: str
    autocast: bool
    how: str  # "backward", "grad", "twice" or "drop"
    seed: int


class Soak:
    """The steps. Each is a method, with its weight in ``KINDS``."""

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
        """A step of each kind."""
        for kind in KINDS:
            self.do(kind)

    def step(self) -> None:
        """One step of a random kind."""
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
        """Change what a pipe has for all its callers."""
        pipe = self.soaked.pipe
        pipe.chunks, pipe.checkpoint = self.random.randint(1, 6), self.random.choice(MODES)
        training = self.random.random() < 0.8
        pipe.train(training)
        self.soaked.plain.train(training)

    def call(self) -> None:
        self.settings()
        self.check(self.case())

    def check(self, case: Case) -> None:
        """Compare the pipe with the plain module."""
        theirs = self.run(self.soaked.plain, case)
        ours = self.run(self.soaked.pipe, case, timeout=PATIENCE)
        rough = 0.05 if case.autocast else 1e-4
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=rough, check_device=False)

    def run(self, module: nn.Module, case: Case, **kwargs: Any) -> list[Tensor | None]:
        """The output and the gradients of its input and of the parameters."""
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
        """A step of the optimizer; the plain modules follow."""
        self.check(self.case(context="grad", how="backward", autocast=False))
        self.optimizer.step()
        self.soaked.learn()

    def step_of_training(self) -> None:
        self.training.step()

    def resume(self) -> None:
        self.training.resume()

    def running_statistics(self) -> None:
        """A pipe whose norms are deferred: each micro-batch is normalised by itself."""
        norm, plain = self.soaked.norm, self.soaked.plain_norm
        norm.chunks, norm.checkpoint = self.random.randint(1, 4), self.random.choice(MODES)
        parts = [rows(self.random.randint(2, 5), self.random.randrange(1 << 30))]
        parts *= norm.chunks  # equal sizes, so that it is known which rows are together
        y = norm(torch.cat(parts), timeout=PATIENCE)
        expected = torch.cat([plain(part) for part in parts])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4, check_device=False)
        y.sum().backward()
        expected.sum().backward()  # type: ignore[no-untyped-call]
        self.soaked.forget_gradients()

    def callers(self) -> None:
        """Several at once, one of which may meet a fault."""
        self.settings()
        fault = Fault() if self.random.random() < 0.3 else None
        if fault is not None:
            self.soaked.demand.make(self.random.randrange(STATIONS), partial(throw, fault))
        outcomes = self.at_once()
        assert self.soaked.demand.withdraw() is False or fault is None
        assert [o for o in outcomes if o is not None] == ([fault] if fault else []), outcomes

    def at_once(self, meanwhile: Callable[[], None] = lambda: None) -> list[BaseException | None]:
        """What three checks raise that run at the same time; they change no ``.grad``."""
        hows = [self.random.choice(("grad", "drop")) for _ in range(3)]
        outcomes: list[BaseException | None] = []

        def check(case: Case) -> None:
            try:
                self.check(case)
                outcomes.append(None)
            except BaseException as error:  # noqa: B036  told to the caller
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
        """With an observer, or one that raises and is dropped for it."""
        pipe, observer = self.soaked.pipe, self.random.choice((Observer, Grumpy))()
        pipe.add_observer(observer)
        self.call()
        pipe.remove_observer(observer)

    # Bad steps, each followed by a good one

    def fault(self) -> None:
        """A layer raises in the forward."""
        self.settings()
        case = self.case()
        m = min(case.rows, self.soaked.pipe.chunks)
        error = self.random.choice((Fault, Fatal, SystemExit, KeyboardInterrupt))("on demand")
        station = self.random.randrange(STATIONS)
        self.soaked.demand.make(station, partial(throw, error), after=self.random.randrange(m))
        assert self.raised(case) is error
        self.call()

    def fault_in_recomputation(self) -> None:
        """A layer raises in the backward.

        On a thread of its own: a backward that raises leaves tasks, and with them tensors, in a
        per-thread queue that torch empties only gradually. This happens without pipert, too.
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
        """What a call of the pipe raises, if it does."""
        try:
            self.run(self.soaked.pipe, case, timeout=timeout)
        except BaseException as error:  # noqa: B036  what was raised is what is asked for
            return error
        return None

    def late(self) -> None:
        """A layer outlasts the time limit of its call and returns later."""
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
        """The caller is interrupted by a signal while a layer is executing."""
        self.soaked.demand.make(self.random.randrange(STATIONS), self._send)
        error = self.raised(self.case())
        assert isinstance(error, Fatal) and not self._interrupt_due.is_set(), error
        self.call()

    def _send(self) -> None:
        # Again and again: CPython misses a signal that comes just before it blocks.
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
        """An idle worker is ended from outside."""
        self.end_a_worker()
        self.recover()

    def death_at_work(self) -> None:
        """A worker is ended from outside while several callers are in the pipe."""
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
        """The calls that meet a dying worker say so; then the pipe has a new one."""
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
        """The pipe is closed, or just dropped, and made again with another balance."""
        if self.random.random() < 0.5:
            self.soaked.pipe.close(timeout=PATIENCE)
            assert isinstance(self.raised(self.case()), PipeClosedError)
        self.soaked.make_again(self.random.randrange(9))
        self.call()

    def close_at_work(self) -> None:
        """Another thread closes the pipe during a call."""
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
        """Until each pipe has its threads and there are no others, and nobody has work to do."""
        self.soaked.forget_gradients()
        collect()  # an error in the frame that raised it is a cycle, and has the pipe in its frames
        pipes = self.pipes()
        for pipe in pipes:  # each has its threads from its first call on
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


# How often each kind is drawn.
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
    """Is dropped at its first task."""

    def task_started(self, task: object) -> None:
        raise Fault("an observer raises")


def throw(error: BaseException) -> None:
    raise error


def rows(n: int, seed: int) -> Tensor:
    """Of normal numbers, on the CPU."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))
