"""Runs the service: trains, saves, looks for new text, and stops when told to."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import math
import random
import sys
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from types import FrameType

import torch
import torch.distributed as dist
from models.gpt import build_model
from ranks import call_in_first, is_first
from service.checkpoints import CheckpointError, Checkpoints
from service.corpus import Corpus
from service.endpoints import Endpoints
from service.health import Health
from service.log_lines import log_event
from service.metrics import Metrics
from service.options import kept, model_config
from service.trainer import Trainer
from torch import nn
from train_gpt import make_pipe, share_cores

from pipert import Pipe, PipelineTimeout

__all__ = ["Service", "Stop"]

_log = logging.getLogger("service")


class Stop:
    """A signal handler that only records that the service was told to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, signal: int, frame: FrameType | None = None) -> None:
        self.signal = signal


class Service:
    """A training run that lasts until ``stop`` is set or ``options.steps`` are done.

    It looks for text only just before it saves the state, every ``save_every`` steps, and uses the
    text only afterwards. So every step follows from a saved state, and a process that resumes
    from that state repeats the step exactly.
    """

    def __init__(self, options: argparse.Namespace, stop: Stop) -> None:
        self.options, self.stop = options, stop
        self._saved_at = -1

    def build_model(self) -> nn.Sequential:
        """Returns the model with its initial parameters."""
        return build_model(model_config(self.options))

    def run(self) -> None:
        """Trains from the last saved state, or from the beginning if there is none.

        Raises:
            PipelineTimeout: a forward took too long. This does not wait for the stuck worker.
        """
        try:
            self._watch()
            self._run()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        options = self.options
        with ExitStack() as folder:
            call_in_first(partial(self._open, folder))
            torch.manual_seed(options.seed)
            random.seed(options.seed)
            torch.use_deterministic_algorithms(True)
            self.pipe = make_pipe(self.build_model(), options, options.timeout)
            try:
                self._serve()
            except PipelineTimeout:
                raise  # without closing the pipe, which would wait for the stuck worker
            except BaseException:
                self._close()
                raise
            self._close()

    def _open(self, folder: ExitStack) -> None:
        checkpoints = Checkpoints(self.options.state, self.options.keep)
        self.checkpoints = folder.enter_context(checkpoints)

    def _close(self) -> None:
        if isinstance(self.pipe, Pipe):
            self.pipe.close()

    def _serve(self) -> None:
        options, pipe = self.options, self.pipe
        if isinstance(pipe, Pipe):
            share_cores(pipe.devices)
        self.corpus = Corpus(options.data, options.context, options.seed)
        self.trainer = Trainer(
            pipe, self.corpus, options.batch, options.lr, options.warmup, options.schedule
        )
        self.metrics, self.health = Metrics(pipe), Health(pipe, options.stale_after)
        with ExitStack() as serving:
            call_in_first(partial(self._answer, serving))
            self._resume_or_begin()
            self._show()
            self._train()
            self._save()
        log_event(_log, logging.INFO, "stopped", step=self.trainer.steps, signal=self.stop.signal)

    def _answer(self, serving: ExitStack) -> None:
        registry, problems = self.metrics.registry, self.health.problems
        endpoints = Endpoints(self.options.host, self.options.port, registry, problems)
        serving.enter_context(endpoints)
        log_event(_log, logging.INFO, "serving", host=endpoints.host, port=endpoints.port)

    def _resume_or_begin(self) -> None:
        state = call_in_first(lambda: self.checkpoints.load())
        if state is None:
            self._look()
            if not self.corpus.windows:
                raise ValueError(f"there is no text of {self.options.context + 1} bytes or more")
            self._save()
            log_event(_log, logging.INFO, "begun", step=0)
            return
        now = kept(self.options)
        if state["options"] != now:
            other = {name: was for name, was in state["options"].items() if now[name] != was}
            raise CheckpointError(f"the saved state belongs to a run with {other}; now it is {now}")
        self.trainer.load_state_dict(state["trainer"])
        self._saved_at = self.trainer.steps
        log_event(_log, logging.INFO, "resumed", step=self.trainer.steps)

    def _train(self) -> None:
        options, trainer = self.options, self.trainer
        logged, logged_at = trainer.steps, perf_counter()
        last = math.inf if options.steps is None else options.steps
        while self._stop_signal() is None and trainer.steps < last:
            self._watch()
            began = perf_counter()
            loss = trainer.step()
            self._count(loss, perf_counter() - began)
            if trainer.steps % options.log_every == 0:
                now = perf_counter()
                tokens = (trainer.steps - logged) * options.batch * options.context
                log_event(
                    _log,
                    logging.INFO,
                    "step",
                    step=trainer.steps,
                    loss=loss,
                    seconds=round(now - began, 6),
                    tokens_per_second=round(tokens / (now - logged_at)),
                    chunks=self.pipe.chunks,
                    position=self.corpus.position,
                )
                logged, logged_at = trainer.steps, now
            if trainer.steps % options.save_every == 0:
                self._look()
                self._save()

    def _stop_signal(self) -> int | None:
        """Returns the stop signal that any process has received, so that all stop together."""
        if not self.options.distributed:
            return self.stop.signal
        signals: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(signals, self.stop.signal)
        signal = next((signal for signal in signals if signal is not None), None)
        if signal is not None:  # one received since the gathering counts after the next step
            self.stop.signal = signal
        return signal

    def _count(self, loss: float, seconds: float) -> None:
        metrics, trainer = self.metrics, self.trainer
        metrics.steps.inc()
        metrics.tokens.inc(trainer.batch * self.options.context)
        metrics.loss.set(loss)
        metrics.step_seconds.observe(seconds)
        self._show()
        self.health.step_finished()

    def _show(self) -> None:
        metrics, trainer = self.metrics, self.trainer
        metrics.step.set(trainer.steps)
        metrics.chunks.set(self.pipe.chunks)
        metrics.windows.set(self.corpus.windows)
        metrics.retries.inc(trainer.retries)
        trainer.retries = 0

    def _look(self) -> None:
        """Finds new text, in the first process only: the text may grow between two looks."""
        found = call_in_first(self.corpus.look)
        if found:
            state = call_in_first(self.corpus.state_dict)
            if not is_first():
                self.corpus.load_state_dict(state, reread=False)
            log_event(
                _log, logging.INFO, "text found", bytes=found, windows=self.corpus.windows
            )

    def _save(self) -> None:
        """Saves the state after this step unless it is saved already. An error ends the process."""
        if self._saved_at == self.trainer.steps:
            return
        self._watch()
        began = perf_counter()
        state = {"options": kept(self.options), "trainer": self.trainer.state_dict()}
        self._saved_at = self.trainer.steps
        if not is_first():
            return
        path = self.checkpoints.save(self.trainer.steps, state)
        seconds = perf_counter() - began
        self.metrics.save_seconds.observe(seconds)
        self.metrics.saved.set_to_current_time()
        log_event(
            _log,
            logging.INFO,
            "saved",
            step=self.trainer.steps,
            path=str(path),
            seconds=round(seconds, 6),
        )

    def _watch(self) -> None:
        """Ends the process, with all stacks and code 1, if the next part takes far too long.

        ``Pipe(timeout=...)`` watches the forward and reports more. This watches the rest, such as
        the backward and the disk, and works even if no thread can run Python code.
        """
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(4 * self.options.timeout, exit=True, file=sys.__stderr__)
