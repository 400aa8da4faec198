"""What a test or a benchmark asks of the simulation, through ctypes: reports, time and memory."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Operation", "Report", "Simulation", "Span"]


class Operation(NamedTuple):
    """One operation on a device."""

    name: str
    stream: str
    """``cuda:1/stream2``; ``stream0`` is the default stream."""
    node: str
    """The autograd node that was running, with its sequence number, or empty."""
    thread: str
    stack: tuple[str, ...]
    """``file:line function``, innermost first; empty without ``stacks``."""

    def __str__(self) -> str:
        where = f", in {self.node}" if self.node else ""
        lines = [f"{self.name} on {self.stream}, thread {self.thread}{where}"]
        return "\n        ".join(lines + [frame for frame in self.stack[:12]])


class Report(NamedTuple):
    """Two accesses to one piece of memory that nothing orders."""

    kind: str
    """``RACE``, ``ALLOC-RACE`` or ``USE-AFTER-FREE``."""
    how: str
    device: int
    size: int
    """Bytes of the allocation."""
    now: Operation
    before: Operation
    third: Operation | None
    """What allocated the memory, or freed it."""

    def __str__(self) -> str:
        third = "" if self.third is None else f"\n    memory: {self.third}"
        return (
            f"{self.kind} on cuda:{self.device} ({self.size} bytes): {self.how}"
            f"\n    now:    {self.now}\n    before: {self.before}{third}"
        )


class Span(NamedTuple):
    """An operation in virtual time."""

    stream: str
    start: float
    """Microseconds."""
    end: float
    name: str


class Simulation:
    """The simulated devices of this process."""

    def __init__(self, library: Path, devices: int) -> None:
        os.environ["SIM_DEVICES"] = str(devices)
        self.c = c = ctypes.CDLL(str(library))
        for function in (c.sim_reports, c.sim_trace):
            function.restype = ctypes.c_void_p
        for function in (c.sim_live, c.sim_peak, c.sim_stat):
            function.restype = ctypes.c_size_t
        for function in (c.sim_vt, c.sim_host_vt, c.sim_elapsed):
            function.restype = ctypes.c_double
        c.sim_elapsed.argtypes = [ctypes.c_size_t] * 2
        c.sim_limit.argtypes = [ctypes.c_int, ctypes.c_size_t]
        c.sim_sleep.argtypes = [ctypes.c_double]
        c.sim_rates.argtypes = [ctypes.c_double] * 5
        self.devices = devices
        atexit.register(c.sim_shutdown)

    # Order ----------------------------------------------------------------------------------------

    def detect(self, on: bool = True, *, stacks: bool = False, trace: bool = False) -> None:
        """Choose whether to look for races, keep Python stacks, keep the trace of operations."""
        self.c.sim_set(int(stacks), int(on), int(trace))

    def reports(self) -> list[Report]:
        """What was found since the last ``clear``; without ``stacks`` each kind of pair once."""
        return [
            Report(
                r["kind"], r["how"], r["device"], r["size"],
                _operation(r["now"]), _operation(r["before"]),
                None if r["third"] is None else _operation(r["third"]),
            )
            for r in self._read(self.c.sim_reports)
        ]  # fmt: skip

    def clear(self) -> None:
        """Forget the reports."""
        self.c.sim_clear()

    def counts(self) -> dict[str, int]:
        """How many operations, allocations, synchronisations, waits, reports and streams."""
        names = ("operations", "allocations", "synchronisations", "waits", "reports", "streams")
        return {name: self.c.sim_stat(k) for k, name in enumerate(names)}

    # Virtual time ---------------------------------------------------------------------------------

    def rates(
        self, *, launch_us: float, memory_gbps: float, link_gbps: float, tflops: float,
        host_us: float = 0.0,
    ) -> None:
        """Say how fast every device is: an operation takes the longest of what it needs.

        ``host_us`` is what a launch costs the host, which is one for all threads.
        """
        self.c.sim_rates(launch_us, memory_gbps, link_gbps, tflops, host_us)

    def reset_time(self) -> None:
        """Wait for all devices, and begin at zero."""
        self.c.sim_reset_clock()

    def time(self, device: int) -> float:
        """When the last operation of ``device`` ends, in microseconds of virtual time."""
        return float(self.c.sim_vt(device))

    def makespan(self) -> float:
        """When the last operation of any device ends, in microseconds of virtual time."""
        return max(self.time(device) for device in range(self.devices))

    def trace(self) -> list[Span]:
        """Each operation since ``reset_time``, if ``detect(trace=True)``."""
        return [Span(*span) for span in self._read(self.c.sim_trace)]

    # Memory ---------------------------------------------------------------------------------------

    def limit_memory(self, device: int, bytes: int) -> None:
        """Let allocations beyond this many live bytes raise ``torch.OutOfMemoryError``; 0: never."""
        self.c.sim_limit(device, bytes)

    def live_bytes(self, device: int) -> int:
        """The bytes that are allocated now."""
        return int(self.c.sim_live(device))

    def peak_bytes(self, device: int) -> int:
        """The most there have been since ``torch.cuda.reset_peak_memory_stats``."""
        return int(self.c.sim_peak(device))

    def _read(self, function: Any) -> Any:
        text = function()
        try:
            return json.loads(ctypes.string_at(text).decode("utf8", "replace"))
        finally:
            self.c.sim_free(ctypes.c_void_p(text))

    def __repr__(self) -> str:
        return f"<Simulation of {self.devices} GPUs>"


def _operation(o: dict[str, Any]) -> Operation:
    return Operation(o["op"], o["stream"], o["node"], o["thread"], tuple(o["stack"]))
