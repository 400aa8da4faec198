"""Performs a user's actions in a step, the same for a pipe and for the plain module.

Nothing here makes the host wait for a device before all steps are done; that would hide the races
that the user provokes. So tensors are made beforehand, copied on their devices, and compared
afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipert import Replicate
from tests.fuzz.case import Case, Step

__all__ = [
    "Batch", "Found", "allocate", "batches", "chunks_of", "circumstances", "clear_up", "count_of",
    "keep", "loss_of", "parts_of", "take",
]  # fmt: skip

GPUS = min(4, torch.cuda.device_count())
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "own order")


@dataclass
class Batch:
    """The arguments of one step."""

    x: Tensor
    """A leaf."""
    scale: Tensor
    ids: Tensor
    target: Tensor
    loss_scale: Tensor | None
    always: Tensor
    """A leaf that every loss depends on, so that there is always a graph to go backward through."""

    def arguments(self, case: Case, step: Step, rows: slice | None = None) -> Any:
        """Returns positional and keyword arguments: all rows for a pipe, some for the plain module.
        """
        x = self.x.sigmoid() if step.wants == "graph" else self.x
        scale: Any = Replicate(self.scale) if rows is None else self.scale
        ids = self.ids if rows is None else self.ids[rows]
        x = x if rows is None else x[rows]
        if not case.several:
            return (x,), {}
        return (x, scale), {"more": {"ids": ids, "others": (None, "name")}}

    def overwrite(self, target: bool = True) -> None:
        """Overwrites the inputs, as a user does who reads the next rows into the same buffers."""
        with torch.no_grad():
            for tensor in (self.x, self.scale, *([self.target, self.loss_scale] if target else [])):
                if tensor is not None:
                    tensor.fill_(float("nan"))
            self.ids.fill_(0)


@dataclass
class Found:
    """Copies of the values that a user sees in the steps, on their devices."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)
    """The module's buffers after each step that failed."""


def keep(found: Found, name: str, value: Any) -> None:
    """Keeps copies of a tensor or of the tensors in a dictionary, or any other value itself."""
    if isinstance(value, dict):
        for key, one in value.items():
            keep(found, f"{name} {key}", one)
        return
    found.values.append((name, value))
    if isinstance(value, Tensor):
        with torch.no_grad():
            found.values[-1] = name, value.clone()
        found.values.append((f"{name} wants a gradient", value.requires_grad))
        found.values.append((f"{name} is of inference mode", value.is_inference()))


def batches(case: Case, last: str | None) -> list[Batch]:
    """Makes the batch of each step, on the step's devices; if ``last`` is ``None``, on the CPU.

    Args:
        last: the device of the last partition.
    """
    generator = torch.Generator().manual_seed(case.seed)
    made = []
    for step in case.steps:
        rows = rows_of(case, step)
        dtype = torch.float32 if case.autocast else torch.float64
        x, target = (torch.rand(rows, 3, dtype=dtype, generator=generator) * 2 - 1 for _ in "xt")
        ids = torch.randint(5, (rows,), generator=generator)
        scale = torch.rand(3, dtype=dtype, generator=generator) + 0.5
        x_on, target_on = (step.x_on, step.target_on) if last else ("cpu", "cpu")
        always = torch.ones((), dtype=dtype, device=last or "cpu", requires_grad=True)
        x = x.to(x_on).requires_grad_(step.wants != "nothing")
        loss_scale = None
        if step.scale_on is not None:
            loss_scale = torch.tensor(2.0, dtype=dtype).to(step.scale_on if last else "cpu")
        scale, ids, target = scale.to(x_on), ids.to(x_on), target.to(target_on)
        made.append(Batch(x, scale, ids, target, loss_scale, always))
    return made


def rows_of(case: Case, step: Step) -> int:
    """Returns the number of rows of a step; BatchNorm needs two."""
    return max(step.rows, 2) if "batch norm" in case.units else step.rows


def parts_of(case: Case, step: Step) -> list[slice]:
    """Returns the rows of each micro-batch that is ready: of different sizes, but for BatchNorm."""
    rows = rows_of(case, step)
    if "batch norm" not in case.units:
        return [slice(0, 1), slice(1, rows)][: min(2, rows)]
    split = torch.arange(rows).tensor_split(chunks_of(case, step))
    return [slice(int(part[0]), int(part[-1]) + 1) for part in split]


def chunks_of(case: Case, step: Step) -> int:
    """Returns the ``chunks`` of a step; with BatchNorm each micro-batch has two rows or more."""
    limit = rows_of(case, step) // (2 if "batch norm" in case.units else 1)
    return min(step.chunks, limit)


def _loss_of_call(step: Step, batch: Batch, output: Any) -> Any:
    """Computes the loss on the last device, or on the target's."""
    y: Tensor = output["y"] if isinstance(output, dict) else output
    if step.loss_there:
        device = batch.target.device
        return loss_of(batch.always.to(device), y.to(device), batch.target)
    return loss_of(batch.always, y, batch.target.to(y.device))


def _two_users(
    step: Step, batch: Batch, forward: Callable[[], Any], whole: Callable[[], Any], at_once: bool
) -> None:
    """Lets one user take a whole step and another, on a new thread, call the pipe and backward."""
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with of_thread(step):
                _loss_of_call(step, batch, forward()).backward()
        except BaseException as error:  # noqa: B036  raised on the first user's thread
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    if not at_once:
        thread.join()
    try:
        whole()
    finally:
        thread.join()
    if errors:
        raise errors.pop()


def loss_of(always: Tensor, output: Any, target: Tensor) -> Tensor:
    """Computes a sum over the rows, so that the number of micro-batches does not matter."""
    y: Tensor = output["y"] if isinstance(output, dict) else output
    return (y.to(target.dtype) * target).square().sum() * always


def count_of(target: Tensor) -> Tensor:
    """Returns the loss's count, which differs between micro-batches of equal size."""
    return len(target) + (target[:, 0] > 0).sum()


@functools.cache
def own_streams() -> list[torch.cuda.Stream]:
    """Creates the user's own streams, one for each device."""
    make: Any = torch.cuda.Stream
    return [make(device) for device in range(GPUS)]


@contextlib.contextmanager
def circumstances(step: Step) -> Iterator[None]:
    """Sets the user's current device and streams, ordered with the work before and after."""
    pairs = [(own, torch.cuda.current_stream(own.device)) for own in own_streams()]
    if step.streams:
        for own, other in pairs:
            own.wait_stream(other)
    with of_thread(step):
        yield
    if step.streams:
        for own, other in pairs:
            other.wait_stream(own)


@contextlib.contextmanager
def of_thread(step: Step) -> Iterator[None]:
    """Sets the current device and streams of this thread."""
    with contextlib.ExitStack() as stack:
        for own in own_streams() if step.streams else ():
            stack.enter_context(torch.cuda.stream(own))
        if GPUS:
            stack.enter_context(torch.cuda.device(step.current))
        yield


def take(
    step: Step,
    batch: Batch,
    found: Found,
    forward: Callable[[], Tensor],
    whole: Callable[[], Tensor],
    before_backward: Callable[[], object],
    at_once: bool = False,
) -> None:
    """Takes a step: either ``forward`` and then a backward, or ``whole``, which does both."""
    if step.how in ("no_grad", "inference", "evaluation"):
        with torch.inference_mode() if step.how == "inference" else torch.no_grad():
            y = forward()
            before_backward()
            keep(found, "output without a graph", y)
        return
    if step.how in SCHEDULES:
        keep(found, "loss", whole().detach())
    elif step.how == "two threads":
        _two_users(step, batch, forward, whole, at_once)
    else:
        _by_autograd(step, batch, found, forward, before_backward)
    keep(found, "gradient of x", batch.x.grad)
    keep(found, "gradient of always", batch.always.grad)


def _by_autograd(
    step: Step,
    batch: Batch,
    found: Found,
    forward: Callable[[], Tensor],
    before_backward: Callable[[], object],
) -> None:
    outputs = [forward() for _ in range(2 if step.how == "two calls" else 1)]
    before_backward()
    losses: list[Any] = []
    while outputs:
        y = outputs.pop(0)
        keep(found, "output", y)
        losses.append(_loss_of_call(step, batch, y))
        del y
    if step.how == "twice":
        losses[0].backward(retain_graph=True)
    while losses:  # the second call's loss first
        losses.pop().backward()


def clear_up(
    step: Step, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> None:
    """Performs the user's actions after a step, in the step's order."""
    actions: dict[str, Callable[[], object]] = {
        "refill": batch.overwrite,
        "step": optimizer.step,
        "zero": functools.partial(module.zero_grad, set_to_none=False),
        "none": functools.partial(module.zero_grad, set_to_none=True),
    }
    for what in step.then:
        if what in actions:
            actions[what]()


def allocate() -> None:
    """Allocates memory on every device, which was just freed, and writes to it."""
    for device in range(GPUS):
        for size in (1, 3, 9, 12, 24):
            torch.full((size,), float("nan"), dtype=torch.float64, device=f"cuda:{device}")
