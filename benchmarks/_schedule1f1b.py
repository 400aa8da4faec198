"""A peer with processes instead of threads: ``Schedule1F1B`` of ``torch.distributed.pipelining``.

    python _schedule1f1b.py RANK STORE

is one of its processes: it holds one stage of the model. For each line it reads it takes a step
and writes the step's seconds and the loss, which the last stage knows. Between steps
it waits, so as not to disturb the other runtimes. :func:`processes` starts them. They communicate
over gloo, and find each other through the file STORE.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

__all__ = ["BALANCE", "CHUNKS", "batch", "convolutions", "processes"]

LAYERS, CHANNELS, SIDE, ROWS, CHUNKS = 9, 32, 64, 32, 8
BALANCE = [5, 4]  # the first layer has no gradient of its input to compute


def convolutions() -> nn.Sequential:
    """Nine layers, of which a core takes milliseconds for each micro-batch."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    """A mini-batch and its target."""
    torch.manual_seed(1)
    x, target = torch.randn(2, ROWS, CHANNELS, SIDE, SIDE)
    return x, target


@contextlib.contextmanager
def processes() -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield what takes a step in all of them, and returns its seconds and its loss."""
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        started = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(len(BALANCE))
        ]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)

        def step() -> tuple[float, float]:
            for process in started:
                assert process.stdin is not None
                process.stdin.write("step\n")
                process.stdin.flush()
            answers = [list(map(float, _line(process).split())) for process in started]
            return max(seconds for seconds, _ in answers), answers[-1][1]

        yield step


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process of Schedule1F1B has ended")
    return line


def main(rank: int, store: str) -> None:
    """Take a step for each line."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(BALANCE)
    )
    start = sum(BALANCE[:rank])
    part = convolutions()[start : start + BALANCE[rank]]
    stage = PipelineStage(part, rank, len(BALANCE), torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=CHUNKS, loss_fn=functional.mse_loss)
    x, target = batch()
    for _ in sys.stdin:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": losses} if rank else {}
        part.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        schedule.step(*([] if rank else [x]), **given)
        seconds = time.perf_counter() - begin
        print(seconds, torch.stack(losses).mean().item() if rank else 0.0, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), sys.argv[2])
