"""Adds the Python side of torch's CUDA: the functions that a build without CUDA lacks."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch._utils
import torch.backends.cudnn
import torch.cuda
import torch.cuda.graphs
import torch.cuda.streams
import torch.storage

from tests.simulated_gpus.simulation import Simulation

__all__ = ["pretend"]

C: Any = torch._C
MEMORY = 80 << 30


class _Properties:  # hashable, because torch.compile uses the properties as a key
    name = "simulated GPU"
    major, minor = 9, 0
    total_memory = MEMORY
    multi_processor_count = 132


def pretend(simulation: Simulation) -> None:
    """Makes ``torch.cuda`` work with the simulated devices."""
    _classes(simulation)
    _functions(simulation)
    _module(simulation)
    _storages(simulation)


def _classes(simulation: Simulation) -> None:
    kind = int(C._autograd.DeviceType.CUDA)

    class StreamBase(torch.Stream):
        def __new__(
            cls: Any,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int = 0,
            device_type: int = kind,
            stream_ptr: int | None = None,
        ) -> Any:
            if stream_id is not None:
                return torch.Stream.__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type
                )
            current = torch.device("cuda", simulation.c.sim_current_device())
            return torch.Stream.__new__(cls, device=current, priority=priority)

        cuda_stream = property(lambda self: self.stream_id)
        priority = property(lambda self: -1 if self.stream_id > 32 else 0)

    class EventBase(torch.Event):
        def __new__(
            cls: Any,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return torch.Event.__new__(
                cls, device=torch.device("cuda"), enable_timing=enable_timing
            )

        cuda_event = property(lambda self: self.event_id)

        def elapsed_time(self, other: Any) -> float:  # torch.Event's refuses a subclass
            return simulation.elapsed_ms(self.event_id, other.event_id)

    C._CudaStreamBase, C._CudaEventBase = StreamBase, EventBase
    importlib.reload(torch.cuda.streams)
    for name in ("Stream", "Event", "ExternalStream"):
        setattr(torch.cuda, name, getattr(torch.cuda.streams, name))


def _functions(simulation: Simulation) -> None:
    c = simulation.c
    kind = int(C._autograd.DeviceType.CUDA)

    def current(device: int | None) -> tuple[int, int, int]:
        index = c.sim_current_device() if device is None or device < 0 else device
        stream = torch.accelerator.current_stream(index)
        return stream.stream_id, stream.device_index, kind

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        stream: Any = torch.Stream
        torch.accelerator.set_stream(
            stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )
        torch.accelerator.set_device_index(device_index)

    def stats(device: int) -> dict[str, Any]:
        m = simulation.memory(device)
        bytes_ = {"current": m["live"], "peak": m["peak"], "allocated": m["live"], "freed": 0}
        blocks = {"current": m["blocks"], "peak": m["blocks"], "allocated": m["allocations"],
                  "freed": m["allocations"] - m["blocks"]}  # fmt: skip
        nothing = dict.fromkeys(bytes_, 0)

        def in_pools(values: dict[str, int]) -> dict[str, dict[str, int]]:
            return {"all": values, "large_pool": values, "small_pool": nothing}

        used = ("allocated", "reserved", "active", "requested")
        found: dict[str, Any] = {f"{name}_bytes": in_pools(bytes_) for name in used}
        found |= {name: in_pools(blocks) for name in ("allocation", "segment", "active")}
        found |= {name: in_pools(nothing) for name in ("inactive_split", "inactive_split_bytes")}
        found |= {name: nothing for name in ("oversize_allocations", "oversize_segments")}
        return found | {"num_ooms": m["refusals"], "num_alloc_retries": 0}

    # Python functions instead of ctypes functions, because torch.compile hashes them.
    functions: dict[str, Any] = dict(
        _cuda_getDeviceCount=lambda: simulation.devices,
        _cuda_init=lambda: None,
        _cuda_setDevice=torch.accelerator.set_device_index,
        _cuda_getDevice=lambda: c.sim_current_device(),
        _cuda_synchronize=lambda: torch.accelerator.synchronize(c.sim_current_device()),
        _cuda_getCurrentStream=current,
        _cuda_getDefaultStream=lambda i: (0, i, kind),
        _cuda_setStream=set_stream,
        _cuda_sleep=lambda cycles: c.sim_sleep(cycles / 2000.0),
        _cuda_emptyCache=lambda: None,
        _cuda_memoryStats=stats,
        _cuda_resetPeakMemoryStats=lambda device: c.sim_reset_peak(device),
        _cuda_resetAccumulatedMemoryStats=lambda device: None,
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_getCompiledVersion=lambda: 12000,
        _cuda_canDeviceAccessPeer=lambda a, b: True,
        _cuda_getCurrentRawStream=lambda i: current(i)[0],
        _cuda_isInBadFork=lambda: False,
    )
    for name, function in functions.items():
        setattr(C, name, function)
    # torch._dynamo.reset() imports what CUDA graphs need if CUDA seems to be available.
    C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    C._has_cuda = True


def _module(simulation: Simulation) -> None:
    c, cuda = simulation.c, torch.cuda

    def exchange(device: int) -> int:
        before = int(c.sim_current_device())
        if device >= 0:
            torch.accelerator.set_device_index(device)
        return before

    def free(device: Any = None) -> tuple[int, int]:
        m = simulation.memory(torch.cuda._utils._get_device_index(device, optional=True))
        return m["limit"] - m["live"], m["limit"]

    properties = _Properties()
    replaced: dict[str, Any] = dict(
        _exchange_device=exchange,
        _maybe_exchange_device=lambda device: exchange(device),  # for dynamo, another function
        _lazy_init=lambda: None,
        _initialized=True,
        _is_in_bad_fork=lambda: False,
        is_available=lambda: True,
        device_count=lambda: simulation.devices,
        is_bf16_supported=lambda *args, **kwargs: True,
        mem_get_info=free,
        get_device_properties=lambda device=None: properties,
        get_device_name=lambda device=None: properties.name,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
        is_current_stream_capturing=lambda: False,
    )
    for name, value in replaced.items():
        setattr(cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args: None)
    setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # noqa: B010
    setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)  # noqa: B010
    c.sim_hand_out_default_generators(1)
    generators = [torch.Generator(device=f"cuda:{i}") for i in range(simulation.devices)]
    setattr(cuda, "default_generators", tuple(generators))  # noqa: B010
    c.sim_hand_out_default_generators(0)
    for device in range(simulation.devices):
        simulation.limit_memory(device, MEMORY)


def _storages(simulation: Simulation) -> None:
    """Adds storages on CUDA, which a build without CUDA cannot make by ``torch.UntypedStorage``."""

    def storage(size: int, device: Any) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def clone(self: torch.UntypedStorage) -> Any:
        if self.device.type == "cuda":
            return storage(self.nbytes(), self.device).copy_(self)
        return plain_clone(self)

    plain_clone: Any = torch.UntypedStorage.clone
    plain: Any = torch._utils._to

    def to(self: Any, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == "cuda" and self.device.type != "cuda":
            return storage(self.nbytes(), device).copy_(self)
        return plain(self, device, non_blocking)

    plain_resize: Any = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        simulation.resize_storage(self._cdata, size)
        return self

    setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
    setattr(torch.UntypedStorage, "clone", clone)  # noqa: B010
    setattr(torch._utils, "_to", to)  # noqa: B010
    setattr(torch.storage, "_to", to)  # noqa: B010
