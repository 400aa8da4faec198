"""Gives tests and benchmarks access to the simulation, by ctypes: reports, time and memory."""

from __future__ import annotations

import atexit
import ctypes
import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Operation", "Report", "Simulation"]


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
    """Two accesses to the same memory that nothing orders."""

    kind: str
    """``RACE``, ``ALLOC-RACE``, ``USE-AFTER-FREE`` or ``HOST-RACE``."""
    how: str
    device: int
    """-1 for pinned memory of the host."""
    size: int
    """The bytes of the allocation."""
    era: int
    """The era in which the memory was allocated (``begin_era``)."""
    now: Operation
    before: Operation
    memory: Operation
    """The operation that allocated the memory, or freed it."""

    def __str__(self) -> str:
        where = "pinned memory" if self.device < 0 else f"cuda:{self.device}"
        return (
            f"{self.kind} on {where} ({self.size} bytes): {self.how}"
            f"\n    now:    {self.now}\n    before: {self.before}\n    memory: {self.memory}"
        )


class Simulation:
    """The simulated devices of this process."""

    def __init__(self, library: Path, devices: int) -> None:
        self.c = c = ctypes.CDLL(str(library))
        size, number = ctypes.c_size_t, ctypes.c_double
        for function in (c.sim_reports, c.sim_elapsed_ms, c.sim_resize_storage):
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

    def detect(self, on: bool = True, *, stacks: bool = False) -> None:
        """Sets whether to look for races, and whether to keep Python stacks."""
        self.c.sim_detect(int(on), int(stacks))

    def reports(self) -> list[Report]:
        """Returns the reports since the last ``clear``; without ``stacks`` each kind of pair once.
        """
        return [
            Report(
                r["kind"], r["how"], r["device"], r["size"],
                r["era"],
                _operation(r["now"]), _operation(r["before"]), _operation(r["memory"]),
            )
            for r in self._read(self.c.sim_reports)
        ]  # fmt: skip

    def clear(self) -> None:
        """Drops the reports."""
        self.c.sim_clear()

    def begin_era(self) -> int:
        """Waits for all devices, so that nothing races across it; returns the new era's number."""
        return int(self.c.sim_begin_era())

    def counts(self) -> dict[str, int]:
        """Returns the numbers of operations, allocations, waits, reports and the like so far."""
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
        """Sets the rates of every device. An operation takes the longest of the times it needs.

        Args:
            launch_us: extra time of each operation, beside its bytes and floating-point operations.
            memory_gbps: rate of an operation's reads and writes, in 1e9 bytes per second.
            link_gbps: rate of copies between two devices, or a device and the host, in 1e9 bytes
                per second. Each device sends one copy at a time, and receives one at a time.
            tflops: rate of matrix products and convolutions, in 1e12 operations per second.
            host_us: time of the host to launch an operation, on one clock for all threads, since
                they share the interpreter's lock. An operation begins after its launch.
        """
        self.c.sim_rates(launch_us, memory_gbps, link_gbps, tflops, host_us)

    def reset_time(self) -> None:
        """Waits for all devices, and resets their clocks to zero."""
        self.c.sim_reset_time()

    def time(self, device: int) -> float:
        """Returns when the last operation of ``device`` ends, in virtual microseconds."""
        return float(self.c.sim_time(device))

    def host_time(self) -> float:
        """Returns the time of the host's clock, in virtual microseconds."""
        return float(self.c.sim_host_time())

    def makespan(self) -> float:
        """Returns when the last operation of any device ends, in virtual microseconds."""
        return max(self.time(device) for device in range(self.devices))

    def elapsed_ms(self, start: int, end: int) -> float:
        """Returns the virtual milliseconds between two events, given by their addresses."""
        elapsed = ctypes.c_double()
        message = self._text(self.c.sim_elapsed_ms(start, end, ctypes.byref(elapsed)))
        if message is not None:
            raise (RuntimeError if message.startswith("CUDA error") else ValueError)(message)
        return elapsed.value

    # Memory ---------------------------------------------------------------------------------------

    def limit_memory(self, device: int, bytes: int) -> None:
        """Makes allocations beyond so many live bytes raise ``OutOfMemoryError``; 0 for never."""
        self.c.sim_limit(device, bytes)

    def fail_allocation(self, device: int, number: int) -> None:
        """Makes one allocation raise ``OutOfMemoryError``, counted from now on; 0 for none."""
        self.c.sim_fail_allocation(device, number)

    def allocations(self, device: int) -> int:
        """Counts the non-empty allocations since ``fail_allocation``."""
        return int(self.c.sim_allocations(device))

    def live_bytes(self, device: int) -> int:
        """Returns the bytes that are allocated now."""
        return self.memory(device)["live"]

    def peak_bytes(self, device: int) -> int:
        """Returns the most live bytes since ``torch.cuda.reset_peak_memory_stats``."""
        return self.memory(device)["peak"]

    def memory(self, device: int) -> dict[str, int]:
        """Returns a device's bytes, and its numbers of allocations, live blocks and refusals."""
        names = ("live", "peak", "limit", "allocations", "blocks", "refusals")
        values = (ctypes.c_size_t * len(names))()
        self.c.sim_memory(device, values)
        return dict(zip(names, values, strict=True))

    def resize_storage(self, storage: int, size: int) -> None:
        """Resizes a ``torch.UntypedStorage``, given by its address."""
        message = self._text(self.c.sim_resize_storage(storage, size))
        if message is not None:
            raise RuntimeError(message)

    def _read(self, function: Any) -> Any:
        return json.loads(self._text(function()) or "")

    def _text(self, address: int | None) -> str | None:
        """Reads and frees a text that a function of the library returned."""
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
