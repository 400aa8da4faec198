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

_MODES = {"always", "except_last", "never"}


def check_chunks(chunks: Any) -> int:
    """Return ``chunks`` as an integer; refuse anything but a positive whole number."""
    number = whole(chunks, "chunks")
    if number < 1:
        raise ValueError(f"chunks must be a positive number of micro-batches, got {chunks!r}")
    return number


def check_checkpoint(checkpoint: Any, n: int = 1) -> str | tuple[str, ...] | None:
    """Return the checkpoint mode of all ``n`` partitions, or that of each; ``None`` for no choice.

    Refuse anything else.
    """
    is_list = isinstance(checkpoint, (list, tuple))
    modes = tuple(map(str, checkpoint if is_list else [checkpoint]))
    if checkpoint is not None and not (len(modes) == (n if is_list else 1) and {*modes} <= _MODES):
        raise ValueError(
            f"checkpoint must be one of {sorted(_MODES)}, or have one of them for each of {n} "
            f"partitions, got {checkpoint!r}"
        )
    return None if checkpoint is None else modes[0] if len({*modes}) == 1 else modes


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


OF_STEPS = (
    "loss_fn", "target", "microbatches", "step", "schedule", "reduction", "denominator",
    "loss_scale", "return_outputs", "timeout",
)  # fmt: skip
"""The keywords of a step; others go to the model."""
OF_CALLS = ("timeout",)
_OF_PIPES = "chunks", "checkpoint", "schedule"
_close_to = lru_cache(partial(difflib.get_close_matches, n=1, cutoff=0.8))  # for each call


def check_keywords(
    layer: nn.Module | None,
    own: Sequence[str],
    given: Mapping[str, object],
    positional: int,
    kwargs: Mapping[str, object],
) -> None:
    """Refuse keywords by which a call and the first layer, or the model, would miss each other.

    Args:
        layer: the first layer, or the model.
        own: the names of the call's own keywords.
        given: those that a layer may have, too; ``None`` counts as not given.
        positional: how many of the layer's arguments are given by position.
        kwargs: the layer's keywords.

    Raises:
        TypeError: the layer has one of those ``given``, too, and would not get it; or a keyword
            that no part of the model names is close to one of the call's ``own``, or a setting of
            the pipe: a layer that takes any keywords would ignore it.
    """
    names = [name for name, value in given.items() if value is not None]
    if layer is None or not (names or kwargs):
        return
    taken = list(_parameters(layer))[positional:] if names else []
    for name in names:
        if name in taken:
            raise TypeError(
                f"{name}=... belongs to the call, but the first layer takes a keyword of that name,"
                " too, and would not get it. Pass the layer's by position, or give it another name"
                + (", or set pipe.timeout" if name == "timeout" else "")
            )
    for name in kwargs:
        close = _close_to(name, (*own, *_OF_PIPES))
        # One around another, as peft's, takes any keywords.
        if close and not any(name in _parameters(each) for each in layer.modules()):
            remedy = f"perhaps {close[0]}=... is meant"
            raise TypeError(
                f"{name}=... is no argument that the model names; "
                f"{f'set pipe.{name}' if name in close else remedy}. Keywords other than "
                f"{', '.join(own)} go to the model"
            )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters
