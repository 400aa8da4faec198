"""Measures whole steps of the plain module, torchgpipe and pipert in virtual time.

Importing this creates eight simulated CUDA devices (``tests/simulated_gpus``), so it must be
imported before torch. The runtimes are real, with one autograd thread per device. Each stream has a
clock: an operation takes ``max(bytes / memory rate, FLOPs / rate)`` of the device's time, a copy
``bytes / link rate``, and waits between streams are waits of the clocks. So order and waits
determine a step's duration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import simulated_gpus  # noqa: E402

GPUS = simulated_gpus.start()

# isort: split
import torch  # noqa: E402
import torchgpipe.pipeline  # noqa: E402
from _ablation import ALL, Components, only  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchgpipe import GPipe  # noqa: E402

from pipert import Pipe  # noqa: E402

__all__ = [
    "GPUS", "MODES", "PLAIN", "Case", "Machine", "Steps", "Way", "by_autograd", "ideal", "measure",
    "prepared",
]  # fmt: skip

MODES = ("never", "except_last", "always")

Step = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """The rates of every simulated device.

    Args:
        tflops: rate of matrix products and convolutions.
        link_gbps: rate of a copy between devices, or between the host and a device.
        memory_gbps: rate of an operation's reads and writes.
        launch_us: extra time of the device for every operation.
        host_us: time of the host for every launch; all threads share one host.
    """

    tflops: float
    link_gbps: float
    memory_gbps: float = 1000.0
    launch_us: float = 0.0
    host_us: float = 0.0

    def rates(self) -> dict[str, float]:
        """Returns the rates as arguments of the simulation."""
        return {
            "launch_us": self.launch_us,
            "memory_gbps": self.memory_gbps,
            "link_gbps": self.link_gbps,
            "tflops": self.tflops,
            "host_us": self.host_us,
        }

    def __str__(self) -> str:
        return (
            f"{1e3 * self.tflops:.3g} GFLOP/s, memory {self.memory_gbps:.4g} GB/s, "
            f"links {self.link_gbps:.3g} GB/s"
        )


@dataclass(frozen=True)
class Case:
    """A model in ``len(balance)`` partitions and a mini-batch in ``m`` micro-batches.

    Args:
        build: makes the model, each time with the same weights.
        batch: makes the mini-batch, on the CPU.
        balance: the number of layers in each partition.
        for_peer: converts the model's skips to torchgpipe's, if it has skips.
    """

    build: Callable[[], nn.Sequential]
    batch: Callable[[], Tensor]
    balance: Sequence[int]
    m: int
    for_peer: Callable[[nn.Sequential], nn.Sequential] = lambda module: module

    @property
    def n(self) -> int:
        """The number of partitions, each on a device of its own."""
        return len(self.balance)


@dataclass(frozen=True)
class Way:
    """The runtime that takes a step, and its settings.

    Args:
        runtime: ``'plain'``, ``'torchgpipe'`` or ``'pipert'``.
        mode: the checkpoint mode.
        schedule: ``'autograd'`` for ``loss.backward()``, or a schedule of ``forward_backward``.
        components: the parts that are switched on; torchgpipe always has direct skips.
    """

    runtime: str
    mode: str = "never"
    schedule: str = "autograd"
    components: Components = ALL

    def __str__(self) -> str:
        if self.runtime == "plain":
            return "plain"
        how = "" if self.schedule == "autograd" else f" {self.schedule}"
        return f"{self.runtime}{how}, {self.mode}"


PLAIN = Way("plain")


@dataclass(frozen=True)
class Steps:
    """Virtual milliseconds of some steps, and the number of launches in one of them."""

    each: tuple[float, ...]
    launches: int

    @property
    def median(self) -> float:
        """The median duration."""
        return median(self.each)

    @property
    def spread(self) -> float:
        """The ratio of the longest duration to the shortest, minus one."""
        return max(self.each) / min(self.each) - 1


def ideal(m: int, n: int) -> float:
    """Returns the speed-up of a pipeline of equal tasks without any other cost."""
    return m * n / (m + n - 1)


def mean_square(y: Tensor, _: object = None) -> Tensor:
    """Computes the loss of every case."""
    return y.square().mean()


@contextmanager
def prepared(case: Case, way: Way) -> Iterator[Step]:
    """Yields a function that takes a training step, without an optimizer."""
    x = case.batch().to("cuda:0")
    module = case.build()
    devices = [torch.device("cuda", j) for j in range(case.n)]
    if way.runtime == "pipert":
        pipe = Pipe(
            module, case.balance, devices=devices, chunks=case.m, checkpoint=way.mode,
            deferred_batch_norm=False,
        )  # fmt: skip
        with pipe, only(pipe, way.components):

            def whole() -> object:
                pipe.zero_grad()
                return pipe.forward_backward(x, loss_fn=mean_square, schedule=way.schedule)

            yield whole if way.schedule != "autograd" else lambda: by_autograd(pipe, x)
        return
    if way.runtime == "plain":
        plain = module.to("cuda:0")
        yield lambda: by_autograd(plain, x)
        return
    peer = GPipe(
        *(case.for_peer(module), list(case.balance)),
        devices=devices, chunks=case.m, checkpoint=way.mode,
    )  # fmt: skip
    if not way.components.copy_streams:
        compute_streams = [torch.cuda.default_stream(device) for device in devices]
        peer._copy_streams = [[stream] * case.m for stream in compute_streams]
    with _dependencies(way.components.fork_join):
        yield lambda: by_autograd(peer, x)


@contextmanager
def _dependencies(fork_join: bool) -> Iterator[None]:
    """Switches torchgpipe's fork and join between micro-batches on or off."""
    depend = torchgpipe.pipeline.depend
    if not fork_join:
        torchgpipe.pipeline.depend = lambda *_: None
    try:
        yield
    finally:
        torchgpipe.pipeline.depend = depend


def by_autograd(model: nn.Module, x: Tensor) -> None:
    """Takes a step with ``backward()``."""
    model.zero_grad()
    mean_square(model(x)).backward()  # type: ignore[no-untyped-call]


def measure(case: Case, way: Way, machine: Machine, repeats: int = 3) -> Steps:
    """Takes steps, and measures them in virtual time, in which nothing has to warm up."""
    GPUS.rates(**machine.rates())
    with prepared(case, way) as step:
        each = []
        for _ in range(repeats):
            GPUS.reset_time()
            before = GPUS.counts()["operations"]
            step()
            launches = GPUS.counts()["operations"] - before
            each.append(1e-3 * GPUS.makespan())
    return Steps(tuple(each), launches)
