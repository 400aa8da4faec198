"""The simulation's API for tests and benchmarks, through ctypes: reports, time and memory."""

from __future__ import annotations

import atexit
import ctypes
import json
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
    """``RACE``, ``ALLOC-RACE``, ``USE-AFTER-FREE`` or ``HOST-RACE``."""
    how: str
    device: int
    """-1 for pinned memory of the host."""
    size: int
    """Bytes of the allocation."""
    era: int
    """In which the memory was allocated (``begin_era``)."""
    now: Operation
    before: Operation
    memory: Operation
    """What allocated the memory, or freed it."""

    def __str__(self) -> str:
        where = "pinned memory" if self.device < 0 else f"cuda:{self.device}"
        return (
            f"{self.kind} on {where} ({self.size} bytes): {self.how}"
            f"\n    now:    {self.now}\n    before: {self.before}\n    memory: {self.memory}"
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
        self.c = c = ctypes.CDLL(str(library))
        size, number = ctypes.c_size_t, ctypes.c_double
        for function in (c.sim_reports, c.sim_trace, c.sim_elapsed_ms, c.sim_resize_storage):
            function.restype = ctypes.c_void_p
        for function in (c.sim_time, c.sim_host_time):
            function.restype = number
        for function in (c.sim_count, c.sim_allocations):
            function.restype = size
        c.sim_elapsed_ms.argtypes = [size, size, ctypes.POINTER(number)]
        c.sim_resize_storage.argtypes = [size, size]
        c.sim_fail_allocation.argtypes = [ctypes.c_int, size]
        c.sim_limit.argtypes = [ctypes.c_int, size]
        c.sim_memory.argtypes = [ctypes.c_int, ctypes.POINTER(size)]
        c.sim_sleep.argtypes = [number]
        c.sim_rates.argtypes = [number] * 5
        c.sim_start(devices)
        self.devices = devices
        atexit.register(c.sim_shutdown)

    # Order ----------------------------------------------------------------------------------------

    def detect(self, on: bool = True, *, stacks: bool = False, trace: bool = False) -> None:
        """Choose whether to look for races, keep Python stacks, keep the trace of operations."""
        self.c.sim_detect(int(on), int(stacks), int(trace))

    def reports(self) -> list[Report]:
        """What was found since the last ``clear``; without ``stacks`` each kind of pair once."""
        return [
            Report(
                r["kind"], r["how"], r["device"], r["size"],
                r["era"],
                _operation(r["now"]), _operation(r["before"]), _operation(r["memory"]),
            )
            for r in self._read(self.c.sim_reports)
        ]  # fmt: skip

    def clear(self) -> None:
        """Forget the reports."""
        self.c.sim_clear()

    def begin_era(self) -> int:
        """Wait for all devices, so that what follows cannot race with what was; number the era."""
        return int(self.c.sim_begin_era())

    def counts(self) -> dict[str, int]:
        """How many operations, allocations, synchronisations, waits, reports and streams."""
        names = ("operations", "allocations", "synchronisations", "waits", "reports", "streams")
        return {name: self.c.sim_count(k) for k, name in enumerate(names)}

    # Virtual time ---------------------------------------------------------------------------------

    def rates(
        self,
        *,
        launch_us: float,
        memory_gbps: float,
        link_gbps: float,
        tflops: float,
        host_us: float = 0.0,
    ) -> None:
        """Say how fast every device is: an operation takes the longest of what it needs.

        Args:
            launch_us: what each operation takes beside its bytes and floating-point operations.
            memory_gbps: bytes that an operation reads and writes, in 1e9 a second.
            link_gbps: bytes from one device to another, or between a device and the host, in 1e9 a
                second. The way out of a device carries one copy after the other, and so does the
                way into it.
            tflops: floating-point operations of matrix products and convolutions, in 1e12 a second.
            host_us: what it costs the host to launch an operation, on one clock for all threads,
                since they share the interpreter's lock. An operation begins after its launch.
        """
        self.c.sim_rates(launch_us, memory_gbps, link_gbps, tflops, host_us)

    def reset_time(self) -> None:
        """Wait for all devices, and begin at zero."""
        self.c.sim_reset_time()

    def time(self, device: int) -> float:
        """When the last operation of ``device`` ends, in microseconds of virtual time."""
        return float(self.c.sim_time(device))

    def host_time(self) -> float:
        """What the host's clock shows, in microseconds of virtual time."""
        return float(self.c.sim_host_time())

    def makespan(self) -> float:
        """When the last operation of any device ends, in microseconds of virtual time."""
        return max(self.time(device) for device in range(self.devices))

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds of virtual time from one event to another, given by their addresses."""
        elapsed = ctypes.c_double()
        message = self._text(self.c.sim_elapsed_ms(start, end, ctypes.byref(elapsed)))
        if message is not None:
            raise (RuntimeError if message.startswith("CUDA error") else ValueError)(message)
        return elapsed.value

    def trace(self) -> list[Span]:
        """Each operation since ``reset_time``, if ``detect(trace=True)``."""
        return [Span(*span) for span in self._read(self.c.sim_trace)]

    # Memory ---------------------------------------------------------------------------------------

    def limit_memory(self, device: int, bytes: int) -> None:
        """Let allocations beyond so many live bytes raise ``torch.OutOfMemoryError``; 0: never."""
        self.c.sim_limit(device, bytes)

    def fail_allocation(self, device: int, number: int) -> None:
        """Let one allocation raise ``torch.OutOfMemoryError``, counted from now on; 0: none."""
        self.c.sim_fail_allocation(device, number)

    def allocations(self, device: int) -> int:
        """How many there have been since ``fail_allocation``; those of no bytes do not count."""
        return int(self.c.sim_allocations(device))

    def live_bytes(self, device: int) -> int:
        """The bytes that are allocated now."""
        return self.memory(device)["live"]

    def peak_bytes(self, device: int) -> int:
        """The most there have been since ``torch.cuda.reset_peak_memory_stats``."""
        return self.memory(device)["peak"]

    def memory(self, device: int) -> dict[str, int]:
        """The account of a device: bytes, and numbers of allocations, live blocks and refusals."""
        names = ("live", "peak", "limit", "allocations", "blocks", "refusals")
        values = (ctypes.c_size_t * len(names))()
        self.c.sim_memory(device, values)
        return dict(zip(names, values, strict=True))

    def resize_storage(self, storage: int, size: int) -> None:
        """Give a ``torch.UntypedStorage``, by its address, memory of another size."""
        message = self._text(self.c.sim_resize_storage(storage, size))
        if message is not None:
            raise RuntimeError(message)

    def _read(self, function: Any) -> Any:
        return json.loads(self._text(function()) or "")

    def _text(self, address: int | None) -> str | None:
        """The text that a function of the library gives away."""
        if address is None:
            return None
        try:
            return ctypes.string_at(address).decode("utf8", "replace")
        finally:
            self.c.sim_free_text(ctypes.c_void_p(address))

    def __repr__(self) -> str:
        return f"<Simulation of {self.devices} GPUs>"


def _operation(o: dict[str, Any]) -> Operation:
    return Operation(o["op"], o["stream"], o["node"], o["thread"], tuple(o["stack"]))
