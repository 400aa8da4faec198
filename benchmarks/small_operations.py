"""Measures the host's cost per operation, in models of many small operations, beside torchgpipe.

One interpreter serves all devices of a pipe. So when operations are small, as on a GPU with small
micro-batches, the time of a step is what Python does for each operation of the layers. Everything
here runs on CPU with one intra-op thread.

**Models.** AmoebaNet-D (18, 256) and ResNet-101 have 0.03 of their width, images of 64x64, two rows
in each micro-batch, and partitions with equal numbers of modules. *Plain* is the module itself, one
micro-batch after the other. All take turns; wall-clock and CPU time of a step are measured, without
the optimizer. At each turn two steps are taken and the second is measured: in a training loop,
steps follow steps of their own kind. In one that follows a step of torchgpipe, whose threads have
just ended, Linux lets pipert's workers wait for one core while another is idle.

**One partition** has 200 custom operations on 4 numbers: a linear layer, a sum and a tanh each. CPU
time of forward and backward is measured. With ``never`` the pipe is compared with a direct call,
and with a direct call whose forward is on another thread, the least that a pipe has to do; with
``always``, with torch's reentrant checkpoint.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch
from _measure import Row, report, rows, start, take_turns, verdict
from _models import AMOEBANET, RESNET, Model, for_torchgpipe
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as reentrant
from torchgpipe import GPipe

from pipert import Pipe
from pipert.balance import balance_by_cost

__all__ = ["main"]

SCALE, SIDE, ROWS = 0.03, 64, 2
SETTINGS = (
    (AMOEBANET, 1, 1, "never"),
    (AMOEBANET, 2, 4, "never"),
    (AMOEBANET, 2, 4, "always"),
    (AMOEBANET, 2, 4, "except_last"),
    (RESNET, 1, 1, "never"),
    (RESNET, 2, 4, "never"),
    (RESNET, 2, 4, "always"),
    (RESNET, 2, 4, "except_last"),
)  # model, n, m, checkpoint mode
OF_CALL = {"never": 1.1, "always": 1.3, "except_last": 1.3}
"""The highest permitted ratio of a call's wall-clock time to torchgpipe's."""
OF_STEP = 1.3  # the highest ratio of a 1F1B step's wall-clock time
OPERATIONS = 200
BESIDE = {
    "called directly": "never",
    "forward on a thread": "never",
    "reentrant checkpoint": "always",
}
"""By rival: the pipe's checkpoint mode."""

Step = Callable[[], Any]
Seconds = tuple[float, float]
NAMES = ("plain", "torchgpipe", "pipert", "1f1b")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    arguments = start(argv, __doc__)
    check, slack = arguments.check, arguments.slack
    repeats = 5 if arguments.short else 9
    table = [
        row
        for setting in SETTINGS
        for row in rows(partial(_compare, *setting, repeats, slack), check=check)
    ]
    columns = ("model", "n", "m", "recomputed", *(f"{name}, ms" for name in NAMES))
    of_peer = ("pipert / torchgpipe", "1f1b / torchgpipe", "CPU: pipert", "CPU: 1f1b")
    missed = report("Models of small operations", (*columns, *of_peer), table)
    table = [
        row
        for beside in BESIDE
        for row in _one_partition(beside, 4 * repeats)
    ]
    columns = ("recomputed", "beside", "beside it, ms", "pipert, ms", "CPU: ratio")
    missed += report(f"One partition of {OPERATIONS} custom operations", columns, table)
    return verdict(missed, check=check)


# Models -------------------------------------------------------------------------------------------


def _compare(
    model: Model, n: int, m: int, checkpoint: str, repeats: int, slack: float
) -> list[Row]:
    with _steps(model, n, m, checkpoint) as steps:
        samples = take_turns(lambda name: _timed(steps[name]), NAMES, repeats=repeats)
    wall = {name: median(took for took, _ in found) for name, found in samples.items()}
    cpu = {name: median(took for _, took in found) for name, found in samples.items()}
    peer, title = "torchgpipe", f"{model.name}, n={n} m={m} {checkpoint}"
    ratios = {
        "pipert / torchgpipe": (wall["pipert"] / wall[peer], OF_CALL[checkpoint]),
        "1f1b / torchgpipe": (wall["1f1b"] / wall[peer], OF_STEP),
        "CPU: pipert": (cpu["pipert"] / cpu[peer], None),
        "CPU: 1f1b": (cpu["1f1b"] / cpu[peer], None),
    }
    missed = [
        f"{title}, {name}: {ratio:.2f}, at most {bar}"
        for name, (ratio, bar) in ratios.items()
        if bar is not None and ratio > bar * slack
    ]
    cells = [model.name, str(n), str(m), checkpoint, *(f"{wall[name] * 1e3:.0f}" for name in NAMES)]
    return [Row((*cells, *(f"{ratio:.2f}" for ratio, _ in ratios.values())), tuple(missed))]


@contextmanager
def _steps(model: Model, n: int, m: int, checkpoint: str) -> Iterator[dict[str, Step]]:
    torch.manual_seed(0)
    module = model.at_width(SCALE)
    x = torch.rand(ROWS * m, 3, SIDE, SIDE)
    balance = balance_by_cost([sum(1 for _ in layer.modules()) for layer in module], n)
    if n == 2 and isinstance(module[balance[0]], nn.ReLU):  # torchgpipe cannot begin in place
        balance = [balance[0] - 1, balance[1] + 1]
    converted, devices = for_torchgpipe(deepcopy(module)), ["cpu"] * n
    peer = GPipe(converted, list(balance), devices=devices, chunks=m, checkpoint=checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that batch norm normalises each micro-batch by itself
        pipe = Pipe(module, balance, devices=devices, chunks=m, checkpoint=checkpoint)
    with pipe:
        plain = nn.Sequential(*pipe)
        yield {
            "plain": partial(_clear, plain, partial(_by_autograd, plain, *x.chunk(m))),
            "torchgpipe": partial(_clear, peer, partial(_by_autograd, peer, x)),
            "pipert": partial(_clear, pipe, partial(_by_autograd, pipe, x)),
            "1f1b": partial(
                _clear, pipe, partial(pipe.forward_backward, x, loss_fn=_loss, schedule="1f1b")
            ),
        }


def _loss(y: Tensor, _: Any = None) -> Tensor:
    return y.square().mean()


def _by_autograd(model: Callable[[Tensor], Tensor], *xs: Tensor) -> None:
    for x in xs:
        torch.autograd.backward(_loss(model(x)))


def _clear(model: nn.Module, step: Step) -> Step:
    """Drops the gradients, outside of the timed step, and returns the step."""
    model.zero_grad()
    return step


def _timed(prepare: Callable[[], Step]) -> Seconds:
    prepare()()  # the first one after another product's
    step = prepare()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


# One partition ------------------------------------------------------------------------------------


class _Operation(nn.Module):
    """Three small operations for which there is no fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + x)


def _one_partition(beside: str, repeats: int) -> list[Row]:
    checkpoint = BESIDE[beside]
    layers = nn.Sequential(*[_Operation() for _ in range(OPERATIONS)])
    x = torch.rand(2, 4, requires_grad=True)
    pipe = Pipe(layers, [OPERATIONS], devices=["cpu"], chunks=1, checkpoint=checkpoint)
    with pipe, ThreadPoolExecutor(1) as thread:
        plain = nn.Sequential(*pipe)
        peers: dict[str, Any] = {
            "called directly": plain,
            "forward on a thread": lambda x: thread.submit(plain, x).result(),
            "reentrant checkpoint": partial(reentrant, plain, use_reentrant=True),
        }
        steps = {
            "beside": partial(_clear, plain, partial(_by_autograd, peers[beside], x)),
            "pipert": partial(_clear, pipe, partial(_by_autograd, pipe, x)),
        }
        samples = take_turns(lambda name: _timed(steps[name]), tuple(steps), repeats=repeats)
    cpu = {name: median(took for _, took in found) for name, found in samples.items()}
    ratio = cpu["pipert"] / cpu["beside"]
    cells = (checkpoint, beside, *(f"{took * 1e3:.2f}" for took in cpu.values()), f"{ratio:.2f}")
    return [Row(cells)]


if __name__ == "__main__":
    sys.exit(main())
