"""Moves activations to host memory, beside recomputing, in the virtual time of simulated GPUs.

::

    python benchmarks/simulated_offload.py

Sixteen transformer blocks of width 64 in four partitions take steps of eight micro-batches under
1F1B. Every other block moves what it saves to pinned memory, on a stream of its own, and gets it
back while the block behind goes backward. *save_on_cpu* is torch's, which copies when a tensor is
saved and when it is used. *first recomputed* is ``checkpoint=["always", "never", "never",
"never"]``. Links to the host carry 25 GB/s in each direction; memory and launches cost nothing.

How much there is to compute for each byte grows with the width. So blocks of width 64 in float32 on
a device of 1 TFLOP/s wait for their copies like blocks of width 4096 in bfloat16 on one of 128
TFLOP/s: 64 times the work for each element, and elements of half the size.

pipert itself runs; only the devices' clocks are simulated, so nothing here was measured on a GPU.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / each) for each in ("benchmarks", "", "examples")]

from tests import simulated_gpus  # noqa: E402

GPUS = simulated_gpus.start()

# isort: split
import torch  # noqa: E402
from _measure import Row, header, report, verdict  # noqa: E402
from models.gpt import Block, ModelConfig  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402

from pipert import Pipe  # noqa: E402

__all__ = ["main"]

LAYERS, WIDTH, CONTEXT, ROWS, DEVICES, CHUNKS = 16, 64, 32, 64, 4, 8
TFLOPS = (0.25, 0.5, 1, 2, 4)
FIRST = ["always"] + ["never"] * (DEVICES - 1)
WAYS: dict[str, tuple[str | None, Any]] = {
    "never": (None, "never"),
    "offloaded": ("offloaded", "never"),
    "save_on_cpu": ("save_on_cpu", "never"),
    "first recomputed": (None, FIRST),
    "all recomputed": (None, "always"),
}


class Saved:
    """What one call has saved, on the host."""

    def __init__(self, there: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self.there, self.back = there, back
        self.host: list[tuple[Tensor, Any]] = []
        self.fetched: list[tuple[Tensor, Any]] = []

    def pack(self, tensor: Tensor) -> Any:
        """Begins to copy a tensor to the host; weights stay."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        self.there.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.there):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor.detach(), non_blocking=True)
            self.host.append((copy, self.there.record_event()))
        tensor.record_stream(self.there)
        return len(self.host) - 1

    def fetch(self) -> None:
        """Begins to copy all tensors back, once."""
        with torch.cuda.stream(self.back):
            for copy, event in self.host:
                self.back.wait_event(event)
                tensor = torch.empty(copy.shape, dtype=copy.dtype, device=self.back.device)
                tensor.copy_(copy, non_blocking=True)
                self.fetched.append((tensor, self.back.record_event()))
        self.host = []

    def unpack(self, packed: Any) -> Tensor:
        """Returns a tensor that the backward needs."""
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        tensor: Tensor
        tensor, event = self.fetched[packed]
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
        return tensor


class Layer(nn.Module):
    """A block; if it is ``offloaded``, its ``saved`` calls, the oldest first."""

    def __init__(self, offloaded: str | None, before: Layer | None) -> None:
        super().__init__()
        self.block = Block(ModelConfig(context=CONTEXT, width=WIDTH, layers=LAYERS, heads=4))
        self.offloaded, self.saved = offloaded, deque[Saved]()
        self.saved_before = deque[Saved]() if before is None else before.saved
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block."""
        if self.offloaded == "save_on_cpu":
            with save_on_cpu(pin_memory=True):
                y: Tensor = self.block(x)
            return y
        if self.offloaded is None:
            y = self.block(x)
            self._on_backward(y, self._fetch_before)
            return y
        make: Any = torch.cuda.Stream
        self.streams = self.streams or [make(x.device), make(x.device)]
        saved = Saved(*self.streams)
        self.saved.append(saved)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            y = self.block(x)
        self._on_backward(y, self.saved.popleft)
        return y

    @staticmethod
    def _on_backward(y: Any, act: Callable[[], object]) -> None:
        def hook(_: Tensor) -> None:
            act()

        y.register_hook(hook)

    def _fetch_before(self) -> None:
        if self.saved_before:
            self.saved_before[0].fetch()


def measure(way: str) -> tuple[float, int]:
    """Takes two steps; returns microseconds and peak of the second on the first device."""
    offloaded, checkpoint = WAYS[way]
    layers: list[Layer] = []
    for k in range(LAYERS):
        before = layers[-1] if k % 2 else None
        layers.append(Layer(None if k % 2 else offloaded, before))
    devices = [f"cuda:{k}" for k in range(DEVICES)]
    x = torch.randn(ROWS, CONTEXT, WIDTH, device=devices[0])
    with Pipe(
        nn.Sequential(*layers), [LAYERS // DEVICES] * DEVICES, devices=devices, chunks=CHUNKS,
        checkpoint=checkpoint,
    ) as pipe:  # fmt: skip
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(0)
            before_step = GPUS.live_bytes(0)
            GPUS.reset_time()
            pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean())
        return GPUS.makespan(), GPUS.peak_bytes(0) - before_step


def main(_: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a wait was missing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(), "Simulated GPUs: nothing here was measured on one.", sep="\n", end="\n\n")
    table = []
    for tflops in TFLOPS:
        GPUS.rates(launch_us=0, memory_gbps=1e6, link_gbps=25, tflops=tflops)
        (microseconds, size), *others = [measure(way) for way in WAYS]
        times = [f"{took / microseconds:.2f}" for took, _ in others]
        peaks = [f"{peak / size:.2f}" for _, peak in others]
        cells = [f"{a} ({b})" for a, b in zip(times, peaks, strict=True)]
        table.append(Row((f"{tflops:g} TFLOP/s", f"{microseconds:.0f}", *cells)))
    columns = ("device", "never, us", *[way for way in WAYS if way != "never"])
    report("simulated, time (and peak of the first device) of never's", columns, table)
    return verdict([], check=False, reports=GPUS.reports())


if __name__ == "__main__":
    sys.exit(main())
