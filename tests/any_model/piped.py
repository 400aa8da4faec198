"""A step of a pipe of a model as it is, in each of the ways that one is done."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import pipert
from tests.any_model.family import ROWS, Family, Made, Whole
from tests.any_model.reference import Result, first_rows, loss_of, reference, sizes_of, state_of
from tests.any_model.same import assert_same, tolerance_of

__all__ = [
    "CHUNKS", "HOWS", "How", "assert_equal", "assert_equal_outputs", "found_and_plain",
    "in_each_how", "made", "pipeline", "results", "step",
]  # fmt: skip

CHUNKS = 4


class How(NamedTuple):
    """In which way."""

    name: str
    schedule: str
    """Of a step; a call with a backward of one's own has none."""
    checkpoint: str
    rows: int = ROWS


HOWS = [
    How("call never", "", "never"),
    How("call always", "", "always"),
    How("gpipe", "gpipe", "except_last"),
    How("1f1b", "1f1b", "never"),
    How("ragged", "1f1b", "always", rows=6),
]


def in_each_how(models: Sequence[Any], seldom: Sequence[Any] = ()) -> list[Any]:
    """Cases of a model and how: a call and a step of each always, the others in the sweep.

    Those of models that are ``seldom`` tried are all in the sweep.
    """
    cases = []
    for models_of, always in (models, True), (seldom, False):
        for k, model in enumerate(models_of):
            chosen = (HOWS[k % 2], HOWS[2 + k % 3]) if always else ()
            for how in HOWS:
                marks = [] if how in chosen else [pytest.mark.sweep]
                name = getattr(model, "name", None) or model.__name__
                cases.append(pytest.param(model, how, marks=marks, id=f"{name}-{how.name}"))
    return cases


def pipeline(model: nn.Module, family: Family, checkpoint: str, **more: Any) -> Any:
    options: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": checkpoint}
    options |= {"devices": ["cpu"] * (len(family.cuts) + 1)}
    options |= {"deferred_batch_norm": False, "example": family.example} | more
    return pipert.pipeline(model, list(family.cuts), **options)


def step(
    model: nn.Module, batch: dict[str, Any], family: Family, how: How, **more: Any
) -> Result:
    """One of a pipe."""
    given = tree_map(_replicated, first_rows(batch, how.rows))
    with pipeline(model, family, how.checkpoint, **more) as pipe:
        if how.schedule:
            loss, output = pipe.forward_backward(
                **given, loss_fn=lambda output, _: family.loss(output), target=None,
                schedule=how.schedule, return_outputs=True,
            )  # fmt: skip
        else:
            output = pipe(**given)
            sizes = sizes_of(first_rows(batch, how.rows), CHUNKS)
            loss = loss_of(output, sizes, family.loss)
            loss.backward()  # type: ignore[no-untyped-call]
    return Result(_detached(output), loss.detach(), *state_of(model))


def results(made: Made, family: Family, how: How) -> tuple[Result, Result]:
    """Of a pipe and of the plain model, which are copies of the one that was made."""
    model, batch = made
    plain = reference(
        copy.deepcopy(model), first_rows(batch, how.rows), family.loss, CHUNKS
    )
    return step(copy.deepcopy(model), batch, family, how), plain


@cache
def made(family: Family) -> Made:
    """Its model and batch, each time the same; who changes them copies them."""
    torch.manual_seed(0)
    return family.make()


@cache
def found_and_plain(family: Family, how: How) -> tuple[Result, Result]:
    """The results of its own model."""
    return results(made(family), family, how)


def assert_equal(found: Result, plain: Result) -> None:
    """The output, each gradient, the loss and the buffers."""
    assert_equal_outputs(found.output, plain.output)
    assert_same(found.grads, plain.grads)
    tolerance = tolerance_of(plain.loss)
    torch.testing.assert_close(
        found.loss.reshape(()), plain.loss, rtol=tolerance, atol=tolerance, check_dtype=False
    )
    torch.testing.assert_close(found.buffers, plain.buffers, rtol=tolerance, atol=tolerance)


def assert_equal_outputs(found: Any, plain: Any) -> None:
    """Bit for bit: they are computed by the same operations on the same rows."""
    ours, spec = tree_flatten(found)
    others, expected = tree_flatten(plain)
    assert spec == expected
    for one, other in zip(ours, others, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def _replicated(leaf: Any) -> Any:
    return pipert.Replicate(leaf.value) if isinstance(leaf, Whole) else leaf


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
