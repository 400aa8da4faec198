"""Checks a case, and shrinks a failing one to a smaller case that fails the same way."""

from __future__ import annotations

import dataclasses
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipert import SharedStateWarning
from tests import simulated_gpus
from tests.fuzz.case import Case, Step
from tests.fuzz.run import in_pipe, reference, synchronize
from tests.fuzz.users import Found

__all__ = ["Failure", "check", "shrink"]


class Failure(Exception):
    """The failure of a case.

    Args:
        kind: ``'reported'``, ``'raised'`` or ``'differs'``.
        text: the report, the traceback or the difference.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(case: Case) -> None:
    """Takes the steps of a case in a pipe and in its reference, and compares them.

    Raises:
        Failure: they differ, something was raised, or the simulated GPUs have reports.
    """
    gpus = simulated_gpus.running()
    if gpus is not None:
        gpus.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Autograd's threads may keep their last nodes for a moment after a backward, and after
            # one that failed until the next. A step on other streams then finds an AccumulateGrad
            # of the previous step, and torch warns that it may wait longer than it needs to.
            warnings.filterwarnings("ignore", ".*AccumulateGrad node's stream", UserWarning)
            # By which a fragile layer counts its calls.
            warnings.filterwarnings("ignore", r"forward sets '[\w.]*left'", SharedStateWarning)
            if "fragile" in case.units:
                warnings.filterwarnings("ignore", "Error detected in RaisesBackward", UserWarning)
            found = in_pipe(case)
            expected = reference(case, found)
    except Exception as error:
        raise Failure("raised", "".join(traceback.format_exception(error))) from error
    finally:
        synchronize()
    if gpus is not None:
        reports = gpus.reports()
        if reports:
            raise Failure("reported", "\n".join(map(str, reports[:4])))
    if {"detach", "unused"} & set(case.units):
        # Without a graph such layers may return a tensor that the user made, outside of inference
        # mode and wanting a gradient. A copy of it, or one gathered from several micro-batches, is
        # made inside and wants none; and the reference slices all rows.
        own = "inference mode", "wants a gradient"
        for one in (found, expected):
            one.values = [
                (name, value)
                for name, value in one.values
                if not (name.startswith("output without a graph") and name.endswith(own))
            ]
    _compare(found, expected, 0.02 if case.autocast else 1e-6)


def _compare(found: Found, expected: Found, tolerance: float) -> None:
    names = [name for name, _ in found.values], [name for name, _ in expected.values]
    if names[0] != names[1]:
        only = [sorted({*one} - {*other}) for one, other in (names, names[::-1])]
        raise Failure("differs", f"found only {only[0]}, expected only {only[1]}, of {names[1]}")
    # What cancels to zero, such as the gradient of a bias before BatchNorm, is the rounding of the
    # larger values that it comes from.
    largest = max([_size(value) for _, value in expected.values], default=0.0)
    for (name, one), (_, other) in zip(found.values, expected.values, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            one, other = one.detach().cpu(), other.detach().cpu()
            size = max(_size(other), 0.01, tolerance * largest)
            try:
                torch.testing.assert_close(
                    one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True
                )
            except AssertionError as error:
                raise Failure("differs", f"{name}: {error}") from None
        elif one is not other:
            raise Failure("differs", f"{name}: {one!r} and not {other!r}")


def _size(value: Any) -> float:
    is_tensor = isinstance(value, Tensor) and value.numel()
    return float(value.detach().nan_to_num(0, 0, 0).abs().max()) if is_tensor else 0.0


def shrink(case: Case, kind: str, seconds: float = 60.0, tries: int = 2) -> Case:
    """Shrinks a case as long as it fails in the same way in one of ``tries`` tries."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(case):
            if time.monotonic() > end:
                return case
            if any(_kind_of(candidate) == kind for _ in range(tries)):
                case, smaller = candidate, True
                break
    return case


def _kind_of(case: Case) -> str | None:
    try:
        check(case)
    except Failure as failure:
        return failure.kind
    return None


def _smaller(case: Case) -> Iterator[Case]:
    """Yields the cases with one item less or one field simpler."""
    for name in ("steps", "units", "skips", "cuts", "frozen", "hooked"):
        for shorter in _shorter(getattr(case, name), 1 if name in ("steps", "units") else 0):
            fields: dict[str, Any] = {name: shorter}
            yield dataclasses.replace(case, **fields)
    yield from _simpler(case, Case())
    for k, step in enumerate(case.steps):
        choices = list(_simpler(step, Step()))
        choices += [dataclasses.replace(step, then=then) for then in _shorter(step.then, 0)]
        for other in choices:
            steps = (*case.steps[:k], other, *case.steps[k + 1 :])
            yield dataclasses.replace(case, steps=steps)


def _shorter(items: tuple[Any, ...], least: int) -> Iterator[tuple[Any, ...]]:
    if len(items) > least:
        for k in range(len(items)):
            yield items[:k] + items[k + 1 :]


def _simpler(item: Any, simplest: Any) -> Iterator[Any]:
    """Yields copies of an item, each with one field set as in the simplest item."""
    for field in dataclasses.fields(item):
        value = getattr(simplest, field.name)
        if field.name not in ("steps", "units", "devices", "then", "cuts", "skips"):
            if value != getattr(item, field.name):
                yield dataclasses.replace(item, **{field.name: value})
