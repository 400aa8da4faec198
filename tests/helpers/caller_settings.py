"""Lists the settings of a caller's thread that tasks see, as ``workers/context.py`` does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Block", "Hooks", "NoNegation", "ONE", "ROWS", "Row", "VARIABLE", "deterministic"]

Block = Callable[[], contextlib.AbstractContextManager[Any]]

ONE = torch.ones(())


class Plus41(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return result + 41 if func is torch.numel else result


class NoNegation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.neg.default:
            return args[0].clone()
        return func(*args, **kwargs or {})


VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="nobody's")


@contextlib.contextmanager
def variable() -> Iterator[None]:
    token = VARIABLE.set("the caller's")
    try:
        yield
    finally:
        VARIABLE.reset(token)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def half_autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.float16)


def autocast_without_cache() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", cache_enabled=False)


@dataclass(frozen=True)
class Row:
    """A row of the table: a block that makes a setting, and a function that reads it."""

    name: str
    block: Block
    see: Callable[[], object]
    inside: object
    """What ``see`` returns inside the block."""


ROWS = [
    Row("grad mode", torch.no_grad, torch.is_grad_enabled, False),
    Row("inference mode", torch.inference_mode, torch.is_inference_mode_enabled, True),
    Row(
        "autocast enabled",
        lambda: torch.autocast("cpu"),
        lambda: torch.is_autocast_enabled("cpu"),
        True,
    ),
    Row("autocast dtype", half_autocast, lambda: torch.get_autocast_dtype("cpu"), torch.float16),
    Row("autocast cache", autocast_without_cache, torch.is_autocast_cache_enabled, False),
    Row("device", lambda: torch.device("meta"), lambda: str(torch.empty(()).device), "meta"),
    Row("default device", default_device, lambda: str(torch.get_default_device()), "meta"),
    Row("function modes", Plus41, lambda: torch.numel(ONE), 42),
    Row("dispatch modes", NoNegation, lambda: torch.neg(ONE).item(), 1.0),
    Row("context variables", variable, VARIABLE.get, "the caller's"),
    Row("deterministic", deterministic, torch.are_deterministic_algorithms_enabled, True),
]


class Hooks:
    """Saved-tensor hooks that keep tensors in bfloat16, and note the threads that packed them."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.packed = 0
        self.unpacked = 0

    def pack(self, tensor: Tensor) -> tuple[torch.dtype, Tensor]:
        self.threads.append(threading.get_ident())
        self.packed += 1
        return tensor.dtype, tensor.detach().to(torch.bfloat16)

    def unpack(self, packed: tuple[torch.dtype, Tensor]) -> Tensor:
        self.unpacked += 1
        return packed[1].to(packed[0])

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
