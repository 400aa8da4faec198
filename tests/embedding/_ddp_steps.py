"""Defines the cases of ``_ddp_worker.py`` in which two processes take whole steps.

They run the code of docs/ddp.md as it is printed there. The reference is the plain module on the
rows of both processes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pipert import Pipe

PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)

SCHEDULES = ("gpipe", "1f1b")
ROWS = 5  # of each process: ragged over three micro-batches
CASES: dict[str, Callable[[int], None]] = {}

same = torch.testing.assert_close


def case(function: Callable[..., None]) -> Callable[..., None]:
    """Adds a case for each schedule, named by the fact that it shows."""
    for schedule in SCHEDULES:
        CASES[f"{function.__name__}-{schedule}"] = partial(function, schedule=schedule)
    return function


def shown(name: str) -> Any:
    """Returns a function or class of the page, without the lines that use it."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "dist": dist}
    (block,) = [block for block in BLOCKS if re.search(rf"^(class|def) {name}\(", block, re.M)]
    source = re.split(r"^(?!class |def |\s|$)", block, maxsplit=1, flags=re.MULTILINE)[0]
    exec(compile(source, str(PAGE), "exec"), names)
    return names[name]


def models() -> tuple[nn.Sequential, nn.Sequential]:
    """Makes a model for the pipe, and an equal one to compare with."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    module = nn.Sequential(*layers).double()
    return module, copy.deepcopy(module)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Returns the rows of both processes and their targets."""
    torch.manual_seed(seed)
    return torch.randn(2 * ROWS, 3).double(), torch.randn(2 * ROWS, 2).double()


def of_rank(rank: int, *tensors: Tensor) -> list[Tensor]:
    return [tensor[rank * ROWS : (rank + 1) * ROWS] for tensor in tensors]


def piped(module: nn.Sequential) -> Pipe:
    return Pipe(module, [2, 3], devices=["cpu", "cpu"], chunks=3)


def same_gradients(module: nn.Module, plain: nn.Module) -> None:
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)


def wrapped(pipe: Pipe, schedule: str, **options: Any) -> tuple[DistributedDataParallel, list[int]]:
    """Wraps the page's step in DDP; also returns a list of the sizes of the buckets it reduces."""
    sizes: list[int] = []

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().numel())
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp = DistributedDataParallel(shown("Step")(pipe, mse_loss, schedule=schedule), **options)
    ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    return ddp, sizes


@case
def averaged_gradients_are_those_of_the_whole_batch(rank: int, schedule: str) -> None:
    module, plain = models()
    average = shown("average")
    with piped(module) as pipe:
        for seed in range(2):  # twice: the second adds to what is there
            x, target = batch(seed)
            rows, wanted = of_rank(rank, x, target)
            pipe.zero_grad()
            pipe.forward_backward(rows, target=wanted, loss_fn=mse_loss, schedule=schedule)
            average(pipe.parameters())
            plain.zero_grad()
            mse_loss(plain(x), target).backward()  # type: ignore[no-untyped-call]
            same_gradients(module, plain)


@case
def ddp_around_a_step_reduces_once_what_the_whole_batch_gives(rank: int, schedule: str) -> None:
    module, plain = models()
    with piped(module) as pipe:
        ddp, sizes = wrapped(pipe, schedule)
        for seed in range(3):
            x, target = batch(seed)
            sizes.clear()
            ddp.zero_grad()
            ddp(*of_rank(rank, x, target)).backward()
            plain.zero_grad()
            mse_loss(plain(x), target).backward()  # type: ignore[no-untyped-call]
            same_gradients(module, plain)
            assert sizes == [sum(p.numel() for p in module.parameters())]


@case
def ddp_around_a_step_accumulates_in_no_sync(rank: int, schedule: str) -> None:
    module, plain = models()
    with piped(module) as pipe:
        ddp, sizes = wrapped(pipe, schedule, gradient_as_bucket_view=schedule == "gpipe")
        for _ in range(2):
            ddp.zero_grad()
            plain.zero_grad()
            sizes.clear()
            for seed in range(3):
                x, target = batch(seed)
                rows = of_rank(rank, x, target)
                if seed < 2:
                    with ddp.no_sync():
                        (ddp(*rows) / 3).backward()
                    assert sizes == []
                else:
                    (ddp(*rows) / 3).backward()
                (mse_loss(plain(x), target) / 3).backward()  # type: ignore[no-untyped-call]
            assert len(sizes) == 1
            same_gradients(module, plain)
