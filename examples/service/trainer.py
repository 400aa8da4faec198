"""Takes training steps, and holds everything the next step depends on.

A step is done once or not at all. Until its gradients are complete, it has changed only the
gradients and the random state. So if it runs out of memory, the gradients are dropped, the random
state is restored, and the step is retried with more micro-batches. The optimizer runs after that
and is not retried: an error there ends the process, and the next process resumes from the last
saved state. (A model whose forward changes buffers would need those restored, too.)

The number of micro-batches decides which random numbers a layer draws and in which order gradients
are added up. So it is part of the state, and once raised it stays raised.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from ranks import AnyPipe, clip, load_whole_state, whole_state
from service.corpus import Corpus
from service.log_lines import log_event
from service.random_state import get_random_state, set_random_state
from torch import Tensor
from train_gpt import loss_with_gradients

from pipert.distributed import RankError

__all__ = ["Trainer"]

_log = logging.getLogger("service.trainer")


class Trainer:
    """A pipe, its optimizer and scheduler, and the position in the text.

    Args:
        pipe: a pipe in one process or over several, each of which then has a trainer in the same
            state. Its ``chunks`` may rise, up to one per row of a batch.
        corpus: the source of the batches.
        batch: rows per batch.
        lr: the peak learning rate, reached after ``warmup`` steps. After that the rate falls with
            the square root of the step, since a service does not know its last step.
        warmup: the number of steps until the learning rate peaks.
        schedule: the order of forward and backward, as in ``train_gpt``.
    """

    def __init__(
        self,
        pipe: AnyPipe,
        corpus: Corpus,
        batch: int,
        lr: float,
        warmup: int,
        schedule: str = "autograd",
    ) -> None:
        self.pipe, self.corpus, self.batch = pipe, corpus, batch
        self.steps = 0  # completed
        self.retries = 0
        self._schedule = schedule
        self._asked = pipe.chunks
        self._optimizer = torch.optim.AdamW(pipe.parameters(), lr=lr, betas=(0.9, 0.95))
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
        )

    def step(self) -> float:
        """Trains on the next batch; returns its loss.

        Raises:
            RuntimeError: the gradients are not finite. The parameters are unchanged.
            torch.OutOfMemoryError, MemoryError: one row per micro-batch needs too much memory.
        """
        windows = self.corpus.next_batch(self.batch)
        loss = self._with_gradients(windows)
        while loss is None:
            loss = self._with_gradients(windows)
        clip(self.pipe, error_if_nonfinite=True)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return loss

    def _with_gradients(self, windows: Tensor) -> float | None:
        """Computes the gradients; if memory runs out, raises ``chunks`` and returns ``None``."""
        before = get_random_state()
        try:
            return loss_with_gradients(self.pipe, windows, self._schedule).item()
        except (torch.OutOfMemoryError, MemoryError, RankError) as error:
            # If another process ran out of memory, this one's RankError quotes its error.
            if self.pipe.chunks >= self.batch or "MemoryError" not in f"{type(error)} {error}":
                raise
            self.pipe.chunks = min(2 * self.pipe.chunks, self.batch)
            log_event(
                _log,
                logging.WARNING,
                "out of memory",
                step=self.steps + 1,
                chunks=self.pipe.chunks,
                reason=str(error),
            )
        # Memory can be freed only here, after the error is gone: its frames hold the activations.
        self.retries += 1
        self._optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        set_random_state(before)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns only what ``torch.load(..., weights_only=True)`` accepts."""
        model, optimizer = whole_state(self.pipe, self._optimizer)
        return {
            "steps": self.steps,
            "chunks": {"asked": self._asked, "now": self.pipe.chunks},
            "model": model,  # under the plain module's names
            "optimizer": optimizer,
            "scheduler": self._scheduler.state_dict(),
            "corpus": self.corpus.state_dict(),
            "random": get_random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        The number of micro-batches is restored only if the requested number is still the same.
        """
        self.steps = state["steps"]
        if state["chunks"]["asked"] == self._asked:
            self.pipe.chunks = state["chunks"]["now"]
        load_whole_state(self.pipe, self._optimizer, state["model"], state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self.corpus.load_state_dict(state["corpus"])
        set_random_state(state["random"])

    def __repr__(self) -> str:
        return f"<Trainer after {self.steps} steps, at {self.corpus.position}>"
