"""Trains pipes under DistributedDataParallel in two processes; started by test_ddp.py.

    python -m tests.embedding._ddp_worker FOLDER [CASE ...]

The processes meet in FOLDER, where each writes its results at the end: JSON with an entry for every
case except those named, either an empty string or the failure in this process. Starting a process
takes seconds and a case a tenth of a second, so all cases share two processes, which are forks of
one that has imported everything. Each case has its own process group, so that a failure in the
middle of a reduction does not confuse the next case.

The reference is computed in each process, from the batches of both, by the plain module.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pipert import Pipe, pipeline
from pipert.workers.worker import WorkerThread

WORLD = 2
TIMEOUT = timedelta(seconds=10)  # of a reduction to which the other process does not come
ENOUGH = 90.0  # seconds after which no further case is begun: too many have failed by timeout
MODES = ("always", "except_last", "never")
ROWS = ((5, 4), (2, 7), (3, 1))  # of each process, in three steps; chunks=3 makes all ragged

Case = Callable[[int], None]
CASES: dict[str, Case] = {}

same = torch.testing.assert_close


def for_each_mode(function: Callable[..., None]) -> Callable[..., None]:
    """Adds a case for each checkpoint mode."""
    for mode in MODES:
        CASES[f"{function.__name__}-{mode}"] = partial(function, checkpoint=mode)
    return function


def for_each_schedule(function: Callable[..., None]) -> Callable[..., None]:
    """Adds a case for each schedule of a step."""
    for schedule in ("gpipe", "1f1b"):
        CASES[f"{function.__name__}-{schedule}"] = partial(function, schedule=schedule)
    return function


# --- models ---------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def five_layers() -> nn.Sequential:
    return nn.Sequential(
        linear(3, 4), nn.Tanh(), linear(4, 4), nn.ReLU(inplace=True), linear(4, 2)
    )  # fmt: skip


class OneOf(nn.Module):
    """A layer that calls the inner layer whose name is ``choose()``, and never the one named 9."""

    def __init__(self, choose: Callable[[], int]) -> None:
        super().__init__()
        self.choose = choose
        self.layers = nn.ModuleDict({str(number): linear(4, 4) for number in (0, 1, 9)})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers[str(self.choose())](x)
        return output


# --- what the cases share -------------------------------------------------------------------------


def group() -> Any:
    return dist.new_group(timeout=TIMEOUT)


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wraps a pipe in DDP as users do, with buckets of only one or two parameters."""
    small: Any = 1e-5
    return DistributedDataParallel(module, bucket_cap_mb=small, process_group=group(), **options)


def piped(module: nn.Sequential, checkpoint: str = "except_last", chunks: int = 3) -> Pipe:
    layers = len(module)
    balance = [2, layers - 2]
    return Pipe(
        module, balance, devices=["cpu", "cpu"], chunks=chunks, checkpoint=checkpoint,
        deferred_batch_norm=False,
    )  # fmt: skip


def batches(*rows: int) -> list[Tensor]:
    """Makes a batch for each process; every process makes all of them."""
    return [torch.randn(number, 3, dtype=torch.float64) for number in rows]


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def whole_batch_gradients(plain: nn.Module, xs: list[Tensor]) -> None:
    """Computes the gradients that DDP should have: those of the processes' mean loss."""
    (loss_of(plain(torch.cat(xs))) / WORLD).backward()  # type: ignore[no-untyped-call]


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def same_in_both(tensors: list[Tensor]) -> None:
    """Asserts that tensors are equal bit for bit in both processes."""
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(others, tensor.detach().contiguous())
        assert torch.equal(others[0], others[1])


def trains_like_the_whole_batch(
    rank: int, make: Callable[[], nn.Sequential], checkpoint: str, chunks: int, **options: Any
) -> None:
    """Compares three steps with an optimizer to the plain module's with the batches of both."""
    module = make()
    plain = copy.deepcopy(module)
    with piped(module, checkpoint, chunks) as pipe:
        ddp = wrap(pipe, **options)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ddp, plain)]
        for rows in ROWS:
            xs = batches(*rows)
            loss_of(ddp(xs[rank])).backward()  # type: ignore[no-untyped-call]
            whole_batch_gradients(plain, xs)
            same(grads_of(module), grads_of(plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same(list(module.parameters()), list(plain.parameters()))
        same_in_both(list(module.parameters()))


# --- gradients ------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
}


def some_options(checkpoint: str, shift: int) -> list[dict[str, bool]]:
    """Chooses one or two of DDP's options for a mode, others for another ``shift``.

    The modes together have all options.
    """
    turn = MODES.index(checkpoint) + shift
    return [some for k, some in enumerate(OPTIONS.values()) if (k + turn) % len(MODES) == 0]


@for_each_mode
def ddp_trains_as_one_process_does_on_the_whole_batch(rank: int, checkpoint: str) -> None:
    for chunks in (1, 3):
        trains_like_the_whole_batch(rank, five_layers, checkpoint, chunks)


@for_each_mode
def ddp_around_a_model_in_place_has_the_gradients_of_the_whole_batch(
    rank: int, checkpoint: str
) -> None:
    module, xs = five_layers(), batches(*ROWS[0])
    plain = copy.deepcopy(module)
    options: Any = {"devices": ["cpu", "cpu"], "chunks": 3, "checkpoint": checkpoint}
    with pipeline(module, ["2"], **options) as pipe:
        ddp = wrap(module)
        loss_of(ddp(xs[rank])).backward()  # type: ignore[no-untyped-call]
        assert pipe.statistics().runs == 1
    whole_batch_gradients(plain, xs)
    same(grads_of(module), grads_of(plain))


@for_each_mode
def gradients_accumulate_without_reduction_in_no_sync(rank: int, checkpoint: str) -> None:
    for options in some_options(checkpoint, 0):
        module = five_layers()
        plain, local = copy.deepcopy(module), copy.deepcopy(module)
        with piped(module, checkpoint) as pipe:
            ddp = wrap(pipe, **options)
            loss_of(ddp(batches(2)[0])).backward()  # type: ignore[no-untyped-call]
            module.zero_grad()  # a static graph is learnt in a step of its own; torch's own rule
            for _ in range(2):
                with ddp.no_sync():
                    for rows in ROWS[:2]:
                        xs = batches(*rows)
                        loss_of(ddp(xs[rank])).backward()  # type: ignore[no-untyped-call]
                        loss_of(local(xs[rank])).backward()  # type: ignore[no-untyped-call]
                        whole_batch_gradients(plain, xs)
                same(grads_of(module), grads_of(local))
                xs = batches(*ROWS[2])
                loss_of(ddp(xs[rank])).backward()  # type: ignore[no-untyped-call]
                whole_batch_gradients(plain, xs)
                same(grads_of(module), grads_of(plain))
                for trained in (module, plain, local):
                    trained.zero_grad()


@for_each_mode
def a_parameter_of_two_partitions_is_reduced_once(rank: int, checkpoint: str) -> None:
    def make() -> nn.Sequential:
        module = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3), nn.ReLU(), linear(3, 2))
        module[2].weight = module[0].weight
        return module

    for options in some_options(checkpoint, 0):
        trains_like_the_whole_batch(rank, make, checkpoint, 3, **options)


# --- unused parameters ----------------------------------------------------------------------------


def like_ddp_of_the_plain_module(
    rank: int, make: Callable[[], nn.Sequential], checkpoint: str, **options: Any
) -> list[Tensor | None]:
    """Compares two steps with those of DDP around the plain module; returns the last gradients."""
    module = make()
    plain = copy.deepcopy(module)
    with piped(module, checkpoint) as pipe:
        ddp, reference = wrap(pipe, **options), wrap(plain, **options)
        for rows in ROWS[:2]:
            x = batches(*rows)[rank]
            for trained in (ddp, reference):
                trained.zero_grad()
                loss_of(trained(x)).backward()  # type: ignore[no-untyped-call]
            same(grads_of(module), grads_of(plain))
    return grads_of(module)


@for_each_mode
def a_layer_that_one_process_does_not_use_is_found(rank: int, checkpoint: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(linear(3, 4), nn.Tanh(), OneOf(lambda: rank), linear(4, 2))

    grads = like_ddp_of_the_plain_module(rank, make, checkpoint, find_unused_parameters=True)
    assert [grad is not None for grad in grads] == [True] * 6 + [False] * 2 + [True] * 2
    other = grads[2 + 2 * (1 - rank)]
    assert other is not None and other.any()  # of the layer that only the other one used


# --- buffers --------------------------------------------------------------------------------------


def normalised() -> nn.Sequential:
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    return nn.Sequential(linear(3, 4), norm, linear(4, 4), nn.ReLU(inplace=True), linear(4, 2))


def after(start: nn.Sequential, x: Tensor) -> nn.Sequential:
    """Returns a copy of ``start`` after its running statistics have seen ``x``."""
    module = copy.deepcopy(start)
    module(x)
    return module


@for_each_mode
def statistics_that_are_deferred_are_those_of_process_0(rank: int, checkpoint: str) -> None:
    """Each micro-batch is normalised by itself; a call begins with the statistics of process 0."""
    module = normalised()
    plain, of_process_0 = copy.deepcopy(module), copy.deepcopy(module)
    with Pipe(
        module, [2, 3], devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint,
        deferred_batch_norm=True,
    ) as pipe:  # fmt: skip
        ddp = wrap(pipe)
        for _ in range(3):
            xs = batches(6, 4)
            loss_of(ddp(xs[rank])).backward()  # type: ignore[no-untyped-call]
            for part in [part for x in xs for part in x.chunk(2)]:
                whole_batch_gradients(plain, [part])
            same(grads_of(module), grads_of(plain))
            expected = [after(of_process_0, x) for x in xs]
            same(list(module.buffers()), list(expected[rank].buffers()))
            of_process_0 = expected[0]


# --- whole steps, with the code of docs/ddp.md ----------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
EACH = 5  # rows of each process


def shown(name: str) -> Any:
    """Returns a function or class of the page, without the lines that use it."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "dist": dist}
    (block,) = [block for block in BLOCKS if re.search(rf"^(class|def) {name}\(", block, re.M)]
    source = re.split(r"^(?!class |def |\s|$)", block, maxsplit=1, flags=re.MULTILINE)[0]
    exec(compile(source, str(PAGE), "exec"), names)
    return names[name]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of both processes and their targets."""
    torch.manual_seed(seed)
    return torch.cat(batches(EACH, EACH)), torch.randn(2 * EACH, 2, dtype=torch.float64)


def of_rank(rank: int, *tensors: Tensor) -> list[Tensor]:
    return [tensor[rank * EACH : (rank + 1) * EACH] for tensor in tensors]


def plain_step(plain: nn.Module, x: Tensor, target: Tensor, share: float = 1.0) -> None:
    (mse_loss(plain(x), target) * share).backward()  # type: ignore[no-untyped-call]


def step_in_ddp(
    pipe: Pipe, schedule: str, **options: Any
) -> tuple[DistributedDataParallel, list[int]]:
    """Wraps the page's step in DDP; also returns a list of the sizes of the buckets it reduces."""
    sizes: list[int] = []

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().numel())
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp = DistributedDataParallel(shown("Step")(pipe, mse_loss, schedule=schedule), **options)
    ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    return ddp, sizes


@for_each_schedule
def averaged_gradients_are_those_of_the_whole_batch(rank: int, schedule: str) -> None:
    module = five_layers()
    plain = copy.deepcopy(module)
    average = shown("average")
    with piped(module) as pipe:
        for seed in range(2):  # twice: the second adds to what is there
            x, target = batch(seed)
            rows, wanted = of_rank(rank, x, target)
            pipe.zero_grad()
            pipe.forward_backward(rows, target=wanted, loss_fn=mse_loss, schedule=schedule)
            average(pipe.parameters())
            plain.zero_grad()
            plain_step(plain, x, target)
            same(grads_of(module), grads_of(plain))


@for_each_schedule
def ddp_around_a_step_reduces_once_what_the_whole_batch_gives(rank: int, schedule: str) -> None:
    module = five_layers()
    plain = copy.deepcopy(module)
    with piped(module) as pipe:
        ddp, sizes = step_in_ddp(pipe, schedule)
        for seed in range(3):
            x, target = batch(seed)
            sizes.clear()
            ddp.zero_grad()
            ddp(*of_rank(rank, x, target)).backward()
            plain.zero_grad()
            plain_step(plain, x, target)
            same(grads_of(module), grads_of(plain))
            assert sizes == [sum(p.numel() for p in module.parameters())]


@for_each_schedule
def ddp_around_a_step_accumulates_in_no_sync(rank: int, schedule: str) -> None:
    module = five_layers()
    plain = copy.deepcopy(module)
    with piped(module) as pipe:
        ddp, sizes = step_in_ddp(pipe, schedule, gradient_as_bucket_view=schedule == "gpipe")
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
                plain_step(plain, x, target, 1 / 3)
            assert len(sizes) == 1
            same(grads_of(module), grads_of(plain))


# --- the processes --------------------------------------------------------------------------------


def main(folder: Path, left_out: list[str]) -> None:
    assert threading.active_count() == 1
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            return run(rank, folder, left_out)
        children.append(pid)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))


def run(rank: int, folder: Path, left_out: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # from here on: torch's own imports do not stand it
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
        timeout=3 * TIMEOUT,
    )  # fmt: skip
    found = {}
    began = time.monotonic()
    for name, function in CASES.items():
        if name in left_out:
            continue
        if time.monotonic() - began > ENOUGH:
            found[name] = "not run: the cases before it took too long"
            continue
        torch.manual_seed(0)
        try:
            function(rank)
            left = [t.name for t in threading.enumerate() if isinstance(t, WorkerThread)]
            assert not left, f"threads are left: {left}"
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    (folder / f"results-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
