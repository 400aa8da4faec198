"""Runs steps in several processes: torch's ``Schedule1F1B``, and ``pipert.distributed`` over it.

:func:`processes` starts the processes, each with

    python _schedule1f1b.py CASE RANK STORE

They communicate over gloo, and find each other through the file STORE. Each process holds one stage
of the model for each runtime. For each line that it reads, it takes a step with the
runtime of that name, and writes the step's seconds and the loss, or 0 if it does not know the loss.
Between steps it waits, so as not to disturb the other runtimes.
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

import pipert.distributed

__all__ = [
    "ANY", "BALANCE", "CHUNKS", "OURS", "TORCHS", "batch", "convolutions", "linears", "processes",
]  # fmt: skip

TORCHS, OURS, ANY = "Schedule1F1B", "distributed.Pipe", "distributed.pipeline"

LAYERS, CHANNELS, SIDE, ROWS, CHUNKS = 9, 32, 64, 32, 8
BALANCE = [5, 4]  # the first layer computes no gradient of its input


def convolutions() -> nn.Sequential:
    """Builds nine layers, each of which takes milliseconds of a core for each micro-batch."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    """Makes a mini-batch and its target for :func:`convolutions`."""
    torch.manual_seed(1)
    x, target = torch.randn(2, ROWS, CHANNELS, SIDE, SIDE)
    return x, target


def linears() -> nn.Sequential:
    """Builds as many layers with hardly any computation."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])


def rows() -> tuple[Tensor, Tensor]:
    """Makes a mini-batch and its target for :func:`linears`."""
    torch.manual_seed(1)
    x, target = torch.randn(2, ROWS, 4)
    return x, target


CASES = {"convolutions": (convolutions, batch), "linears": (linears, rows)}

Step = Callable[[], float]
"""Takes a step in one process; returns the loss, or 0 if this process does not know it."""


@contextlib.contextmanager
def processes(case: str = "convolutions") -> Iterator[Callable[[str], tuple[float, float]]]:
    """Starts the processes; yields a function that takes a step with the runtime of a given name.

    The function returns the step's seconds and its loss.
    """
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        started = [
            subprocess.Popen(
                [sys.executable, __file__, case, str(rank), str(store)],
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

        def step(runtime: str) -> tuple[float, float]:
            for process in started:
                assert process.stdin is not None
                process.stdin.write(f"{runtime}\n")
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


def by_torch(rank: int, model: nn.Sequential, x: Tensor, target: Tensor) -> Step:
    """Makes a step with torch's schedule, written as in its documentation."""
    start = sum(BALANCE[:rank])
    part = model[start : start + BALANCE[rank]]
    stage = PipelineStage(part, rank, len(BALANCE), torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=CHUNKS, loss_fn=functional.mse_loss)

    def step() -> float:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": target, "losses": losses} if rank else {}
        part.zero_grad()
        schedule.step(*([] if rank else [x]), **given)
        return torch.stack(losses).mean().item() if rank else 0.0

    return step


def by_pipert(is_any: bool, model: nn.Sequential, x: Tensor, target: Tensor) -> Step:
    """Makes a step with ``pipert.distributed.Pipe``, or with ``pipert.distributed.pipeline``."""
    pipe: Any
    if is_any:
        cuts = [str(BALANCE[0])]
        pipe = pipert.distributed.pipeline(model, cuts, example=x, chunks=CHUNKS, schedule="1f1b")
    else:
        pipe = pipert.distributed.Pipe(model, BALANCE, chunks=CHUNKS, schedule="1f1b")

    def step() -> float:
        pipe.zero_grad()
        loss: Tensor = pipe.forward_backward(x, target=target, loss_fn=functional.mse_loss)
        return loss.item()

    return step


def main(case: str, rank: int, store: str) -> None:
    """Takes a step for each line of the standard input."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(BALANCE)
    )
    model, data = CASES[case]
    steps = {
        TORCHS: by_torch(rank, model(), *data()),
        OURS: by_pipert(False, model(), *data()),
        ANY: by_pipert(True, model(), *data()),
    }
    for line in sys.stdin:
        dist.barrier()
        begin = time.perf_counter()
        loss = steps[line.strip()]()
        print(time.perf_counter() - begin, loss, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
