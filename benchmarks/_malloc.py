"""Reads the bytes in use on the CPU from the C library.

``mallinfo2`` of glibc 2.33 and later counts the bytes that ``malloc`` and its kin have allocated
and not freed, over all threads' arenas and including large, separately mapped blocks. PyTorch
allocates CPU tensors there, so every tensor counts to the byte, whoever holds it. With other
allocators (musl, macOS, a preloaded jemalloc) the counter is missing or constant;
``check_counter`` detects that.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_in_use", "check_counter"]

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def bytes_in_use() -> int:
    """Returns the bytes allocated and not freed. AttributeError without ``mallinfo2``."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def check_counter(size: int) -> str:
    """Returns why ``bytes_in_use`` is unreliable; empty if it sees tensors of ``size`` bytes."""
    allocated = 10 * size
    try:
        before = bytes_in_use()
        tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(10)]
        seen = bytes_in_use() - before
        del tensors
        left = bytes_in_use() - before
    except AttributeError:
        return "the C library has no mallinfo2 (glibc 2.33 and later have it)"
    if abs(seen - allocated) > 0.02 * allocated or abs(left) > 0.02 * allocated:
        return f"of {allocated} bytes, malloc's counter saw {seen}, and {left} after their end"
    return ""
