"""Checks the settings of a pipe and of its calls."""

from __future__ import annotations

import difflib
import inspect
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from numbers import Real
from operator import index
from typing import Any

from torch import nn

_MODES = ("always", "except_last", "never")


def check_chunks(chunks: Any) -> int:
    """Return ``chunks`` as an integer; refuse anything but a positive whole number."""
    number = whole(chunks, "chunks")
    if number < 1:
        raise ValueError(f"chunks must be a positive number of micro-batches, got {chunks!r}")
    return number


def check_checkpoint(checkpoint: Any) -> str | None:
    """Return the checkpoint mode, or ``None`` if none was chosen; refuse anything else."""
    if checkpoint is not None and str(checkpoint) not in _MODES:
        raise ValueError(f"checkpoint must be one of {_MODES}, got {checkpoint!r}")
    return None if checkpoint is None else str(checkpoint)


def check_checkpoints(checkpoint: Any, n: int) -> str | tuple[str, ...] | None:
    """Return the checkpoint mode of all ``n`` partitions, or the mode of each; else as above."""
    if not isinstance(checkpoint, (list, tuple)):
        return check_checkpoint(checkpoint)
    if len(checkpoint) != n or not {*map(str, checkpoint)}.issubset(_MODES):
        raise ValueError(
            f"checkpoint must have one of {_MODES} for each of {n} partitions, got {checkpoint!r}"
        )
    modes = tuple(map(str, checkpoint))
    return modes[0] if len(set(modes)) == 1 else modes


def whole(number: Any, what: str) -> int:
    """Return ``number`` as an int; refuse anything else, such as ``2.0`` or ``"2"``."""
    try:
        return index(number)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {number!r}") from None


def check_timeout(timeout: Any) -> float | None:
    """Return the limit in seconds; ``None`` if there is none, or a lock cannot wait that long."""
    if timeout is None:
        return None
    is_number = isinstance(timeout, Real)
    if not (is_number and timeout > 0):  # NaN included
        kind = ValueError if is_number else TypeError
        raise kind(f"timeout must be a positive number of seconds or None, got {timeout!r}")
    return float(timeout) if timeout <= threading.TIMEOUT_MAX else None


def refuse_keywords_of(
    layer: nn.Module | None, given: Mapping[str, object], positional: int = 0
) -> None:
    """Refuse a keyword of the call that the first layer takes as well.

    Args:
        layer: the first layer.
        given: the call's own keyword arguments; ``None`` counts as not given.
        positional: how many of the layer's arguments are given by position.
    """
    names = [name for name, value in given.items() if value is not None]
    if layer is None or not names:
        return
    taken = list(inspect.signature(layer.forward).parameters)[positional:]
    for name in names:
        if name in taken:
            raise TypeError(
                f"{name}=... belongs to the call, but the first layer takes a keyword of that name,"
                " too, and would not get it. Pass the layer's by position, or give it another name"
                + (", or set pipe.timeout" if name == "timeout" else "")
            )


OF_STEPS = (
    "loss_fn", "target", "microbatches", "step", "schedule", "reduction", "denominator",
    "loss_scale", "return_outputs", "timeout",
)  # fmt: skip
"""The keywords of a step; others go to the model."""
OF_CALLS = ("timeout",)
_OF_PIPES = "chunks", "checkpoint", "schedule"
_close_to = lru_cache(partial(difflib.get_close_matches, n=1, cutoff=0.8))  # for each call


def refuse_misspelt(
    layer: nn.Module | None, given: Mapping[str, object], own: Sequence[str]
) -> None:
    """Refuse a keyword close to one of the call's ``own``, unless the layer or a part names it.

    Raises:
        TypeError: a keyword is, or is a setting of the pipe. A layer that takes any keywords would
            ignore it.
    """
    for name in given:
        close = _close_to(name, (*own, *_OF_PIPES))
        modules = layer.modules() if close and layer is not None else ()
        named = [name in inspect.signature(each.forward).parameters for each in modules]
        if named and not any(named):  # one around another, as peft's, takes any keywords
            [meant] = close
            is_setting = name == meant
            remedy = f"set pipe.{name}" if is_setting else f"perhaps {meant}=... is meant"
            raise TypeError(
                f"{name}=... is no argument that the model names; {remedy}. Keywords other than "
                f"{', '.join(own)} go to the model"
            )
