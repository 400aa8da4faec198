"""Injects a fault at one place of a run, and checks what must hold afterwards.

The first column of a mini-batch holds its row numbers, and each micro-batch has two rows, so all
code that sees data can tell its micro-batch. The worker of partition ``j`` is ``pipert-cpu-<j>``.
Values may be wrapped in a :class:`Box`, a dataclass registered as a pytree. Its flatten and
unflatten functions, which run wherever pipert looks into a value, can raise as well.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipert import Pipe, is_recomputing
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.layers.intercepted import current_thread
from pipert.skip import Skippable, pop, skippable, stash
from pipert.workers.worker import WorkerThread
from tests.helpers.activations import Activations, until

ROWS = 2  # in a micro-batch

Forward = Generator[Any, Any, Any]


class Custom(BaseException):
    """An error of a user's signal handler or framework that is no ``Exception``."""


class Failure(Exception):
    """An error raised by a layer."""


class RankPlace:
    """The places at which a run fails, each armed with the error to raise there."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, int, int], BaseException] = {}
        self.seen = Activations()
        self.stashes_on = 0  # the thread that runs the stashing layer

    @property
    def first(self) -> BaseException | None:
        """The first error armed; if there are several, the run must raise this one."""
        return next(iter(self._errors.values()), None)

    def arm(self, phase: str, i: int, j: int, error: BaseException) -> None:
        self._errors[phase, i, j] = error

    def disarm(self) -> None:
        """Stops failing, and drops the errors, whose tracebacks keep tensors alive."""
        self._errors.clear()

    def strike(self, phase: str, i: int, j: int) -> None:
        """Raises the error armed for this place, if any."""
        if (phase, i, j) in self._errors:
            raise self._errors[phase, i, j]


def partition_here() -> int:
    """Returns the partition whose worker, or micro-batch thread, this thread is; else -1."""
    if isinstance(current_thread.interceptor, MicroBatchForward):
        return current_thread.interceptor.j
    name = threading.current_thread().name
    return int(name.rpartition("-")[2]) if name.startswith("pipert-cpu-") else -1


def micro_batch_of(data: Any) -> int:
    """Returns the micro-batch that ``data`` belongs to; -1 if it holds no rows."""
    has_rows = isinstance(data, Tensor) and data.dim() == 2 and data.numel() > 0
    return int(data.detach()[0, 0].item()) // ROWS if has_rows else -1


@dataclass(frozen=True)  # so that a tensor in it is replaced by flattening it
class Box:
    """A pytree with a tensor; ``at`` is the partition that made it, -1 for the caller."""

    data: Tensor
    at: int
    site: RankPlace


@dataclass
class SkipBox:
    """A pytree with a stashed tensor."""

    data: Tensor
    site: RankPlace


def _flatten_box(box: Box) -> tuple[list[Any], Any]:
    i, j = micro_batch_of(box.data), partition_here()
    if not is_recomputing():
        if j < 0:
            box.site.strike("gather", i, box.at)
        elif j == box.at:
            box.site.strike("leave", i, j)
        else:
            box.site.strike("arrive", i, j)
    return [box.data], (box.at, box.site)


def _unflatten_box(children: Any, context: Any) -> Box:
    (data,) = children
    at, site = context
    if at == partition_here() == -1 and not is_recomputing():
        site.strike("scatter", micro_batch_of(data), 0)
    return Box(data, at, site)


def _flatten_skip(box: SkipBox) -> tuple[list[Any], Any]:
    # The popping partition flattens it, too, as one of its inputs.
    if box.site.stashes_on == threading.get_ident():
        phase = "stash in recomputation" if is_recomputing() else "stash"
        box.site.strike(phase, micro_batch_of(box.data), 0)
    return [box.data], box.site


def _unflatten_skip(children: Any, site: Any) -> SkipBox:
    (data,) = children
    if is_recomputing():
        site.strike("pop in recomputation", micro_batch_of(data), -1)
    else:
        site.strike("pop", micro_batch_of(data), partition_here())
    return SkipBox(data, site)


pytree.register_pytree_node(Box, _flatten_box, _unflatten_box)
pytree.register_pytree_node(SkipBox, _flatten_skip, _unflatten_skip)


class _StrikeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, site: RankPlace, i: int, j: int) -> Tensor:
        ctx.at = site, i, j
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        site, i, j = ctx.at
        site.strike("backward", i, j)
        return grads[0], None, None, None


class Layer(nn.Module):
    """The layer of partition ``j`` in which a run may fail."""

    def __init__(self, site: RankPlace, j: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5 + 0.1 * j, -0.7, 0.9]))
        self.site = site
        self.j = j

    def forward(self, value: Any) -> Any:
        x: Tensor = value.data if isinstance(value, Box) else value
        i = micro_batch_of(x)
        y = self.site.seen.add(torch.tanh(x[:, 1:] * self.weight))
        self.site.strike("recomputation" if is_recomputing() else "forward", i, self.j)
        y = _StrikeInBackward.apply(y, self.site, i, self.j)  # type: ignore[no-untyped-call]
        y = self.site.seen.add(torch.cat([x[:, :1], y], 1))
        return Box(y, self.j, self.site) if isinstance(value, Box) else y


@skippable(stash=["skip"])
class Stash(Skippable):
    def __init__(self, site: RankPlace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.1, 0.3, 0.4]))
        self.site = site

    def forward(self, value: Any) -> Forward:
        x: Tensor = value.data if isinstance(value, Box) else value
        skip = self.site.seen.add(torch.cat([x[:, :1], x[:, 1:] * self.weight], 1))
        self.site.stashes_on = threading.get_ident()
        try:
            yield stash("skip", SkipBox(skip, self.site))
        finally:
            self.site.stashes_on = 0
        return value


@skippable(pop=["skip"])
class Pop(Skippable):
    def __init__(self, site: RankPlace) -> None:
        super().__init__()
        self.site = site

    def forward(self, value: Any) -> Forward:
        skip = yield pop("skip")
        x: Tensor = value.data if isinstance(value, Box) else value
        y = self.site.seen.add(torch.cat([x[:, :1], x[:, 1:] * skip.data[:, 1:]], 1))
        return Box(y, value.at, self.site) if isinstance(value, Box) else y


class Setting:
    """A pipe of ``n`` partitions on ``n`` CPU workers, whose runs fail at armed places of its site.

    Args:
        n: the number of partitions.
        m: the number of micro-batches of a mini-batch.
        checkpoint: the argument of ``Pipe``.
        skips: whether the first partition stashes a skip for the last one.
        boxed: whether values are boxes.
    """

    def __init__(
        self, n: int, m: int, checkpoint: str, skips: bool = False, boxed: bool = False
    ) -> None:
        self.site = RankPlace()
        self.n, self.m = n, m
        self._boxed = boxed
        layers: list[nn.Module] = [Layer(self.site, j) for j in range(n)]
        balance = [1] * n
        if skips:
            layers = [Stash(self.site), *layers, Pop(self.site)]
            balance[0] += 1
            balance[-1] += 1
        self._threads = set(threading.enumerate())
        self.pipe = Pipe(
            nn.Sequential(*layers), balance, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint
        )
        numbers = torch.arange(float(ROWS * m)).unsqueeze(1)
        self.x = torch.cat([numbers, torch.rand(ROWS * m, 3)], 1)

    def forward(self, model: nn.Module) -> Any:
        """Returns the output of ``model`` for the mini-batch, as a tensor."""
        output = model(Box(self.x, -1, self.site) if self._boxed else self.x)
        return output.data if self._boxed else output

    def step(self) -> None:
        """Runs a forward and a backward through the pipe."""
        self.forward(self.pipe)[:, 1:].square().sum().backward()

    def threads(self) -> set[threading.Thread]:
        """Returns the threads started since the pipe was made, except those of micro-batches."""
        new = set(threading.enumerate()) - self._threads
        return {thread for thread in new if not thread.name.startswith("pipert-microbatch")}

    def wrongs_afterwards(self) -> Iterator[str]:
        """Yields what is wrong after a failed run whose error was dropped."""
        threads = self.threads()
        if threads and len([t for t in threads if isinstance(t, WorkerThread)]) != self.n + 1:
            yield f"after the failure there are the threads {threads}"
        # The engine keeps nodes that did not run in this thread's queue until its next backward.
        torch.autograd.backward(torch.ones((), requires_grad=True))
        # A fault in the scatter ends the run before any layer has made a tensor.
        if not until(lambda: not self.site.seen.now()):
            yield f"{self.site.seen.now()} tensors of the failed run are alive"
        self.pipe.zero_grad()
        y = self.forward(self.pipe)
        y[:, 1:].square().sum().backward()
        plain = nn.Sequential(*self.pipe)
        parameters = list(plain.parameters())
        expected = self.forward(plain)
        if not torch.allclose(y, expected):
            yield f"the next output is wrong by {(y - expected).abs().max()}"
        grads = torch.autograd.grad(expected[:, 1:].square().sum(), parameters)
        for k, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if parameter.grad is None or not torch.allclose(parameter.grad, grad, atol=1e-6):
                yield f"the next gradient of parameter {k} is {parameter.grad}, not {grad}"
        if not threads <= self.threads() or len(self.threads()) != self.n + 1:
            yield f"the threads were {threads} and are {self.threads()}"


def wrongs_of(
    setting: Setting,
    run: Callable[[], None],
    note: str | None = None,
    raised_in: str = "strike",
) -> list[str]:
    """Calls ``run``, which must fail; returns what is wrong with its error and afterwards.

    Args:
        setting: a pipe whose site is armed.
        run: a function that must raise the site's error.
        note: the beginning of the error's only note; with ``None``, notes are not checked.
        raised_in: the name of the function in which the traceback must end.
    """
    wrongs = []
    try:
        run()
        wrongs.append("nothing was raised")
    except BaseException as error:  # noqa: B036  examined
        if error is not setting.site.first:
            wrongs.append(f"raised {error!r}, not the {setting.site.first!r} of the layer")
        if (last := traceback.extract_tb(error.__traceback__)[-1].name) != raised_in:
            wrongs.append(f"the traceback ends in {last}, not in {raised_in}")
        notes = getattr(error, "__notes__", [])
        if note is not None and not (len(notes) == 1 and notes[0].startswith(note)):
            wrongs.append(f"the notes are {notes}, not {note!r}")
    setting.site.disarm()
    wrongs += setting.wrongs_afterwards()
    return wrongs


@contextlib.contextmanager
def surroundings(name: str) -> Iterator[None]:
    """Enters a context that workers have to adopt from the caller and leave again."""
    if name == "autocast":
        with torch.autocast("cpu"):
            yield
    elif name == "saved-tensor hooks":
        # An output that a hook keeps undetached makes a cycle with its graph, even without pipert.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            yield
    elif name == "default device":
        with torch.device("cpu"):
            yield
    else:
        yield
