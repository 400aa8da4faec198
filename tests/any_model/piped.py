"""Takes a step of an unchanged model in a pipe, in each way there is, and compares the results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import pipert
from tests.any_model.family import ROWS, Family, Made, Whole
from tests.any_model.reference import (
    Result,
    detached,
    first_rows,
    loss_of,
    reference,
    sizes_of,
    state_of,
)
from tests.any_model.same import assert_same, tolerance_of

__all__ = [
    "CHUNKS", "HOWS", "How", "assert_equal", "assert_equal_outputs", "chunks_of", "compare",
    "each_how", "found_and_plain", "in_each_how", "made", "pipeline", "results", "step",
]  # fmt: skip

CHUNKS = 4


class How(NamedTuple):
    """A way to take a step."""

    name: str
    schedule: str
    """The schedule; empty for a call followed by the caller's own backward."""
    checkpoint: str
    rows: int = ROWS


HOWS = [
    How("call never", "", "never"),
    How("call always", "", "always"),
    How("gpipe", "gpipe", "except_last"),
    How("1f1b", "1f1b", "never"),
    How("ragged", "1f1b", "always", rows=6),
]


each_how = pytest.mark.parametrize("how", HOWS, ids=[how.name for how in HOWS])


def in_each_how(models: Sequence[Any], seldom: Sequence[Any] = ()) -> list[Any]:
    """Makes cases of a model and a way: one call and one step of each model, the rest in the sweep.

    All cases of the models that are ``seldom`` tried are in the sweep.
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
    """Takes a step of the model in a pipe."""
    given = tree_map(_replicated, first_rows(batch, how.rows))
    with pipeline(model, family, how.checkpoint, **more) as pipe:
        if how.schedule:
            loss, output = pipe.forward_backward(
                **given, loss_fn=lambda output, _: family.loss(output), target=None,
                schedule=how.schedule, return_outputs=True,
            )  # fmt: skip
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*one micro-batch of 4 asked for")
                output = pipe(**given)
            sizes = sizes_of(first_rows(batch, how.rows), chunks_of(batch, how))
            loss = loss_of(output, sizes, family.loss)
            loss.backward()  # type: ignore[no-untyped-call]
    return Result(detached(output), loss.detach(), *state_of(model))


def chunks_of(batch: dict[str, Any], how: How) -> int:
    """Returns the micro-batches of a reference: a call with labels has the loss of all of them."""
    asks = {"labels", "return_loss"} & batch.keys()
    return 1 if asks and not how.schedule else CHUNKS


def results(made: Made, family: Family, how: How) -> tuple[Result, Result]:
    """Takes a step of copies of the model, in a pipe and plain; returns both results."""
    model, batch = made
    rows, chunks = first_rows(batch, how.rows), chunks_of(batch, how)
    plain = reference(copy.deepcopy(model), rows, family.loss, chunks)
    return step(copy.deepcopy(model), batch, family, how), plain


def compare(model: nn.Module, cuts: tuple[str, ...], how: How, refused: str = "") -> None:
    """Compares a step of a model of 4 features with the plain one's, or expects it ``refused``."""
    batch = {"x": torch.randn(ROWS, 4, dtype=torch.float64)}
    own = Family(type(model).__name__, lambda: Made(model.double(), batch), cuts)
    if not refused:
        assert_equal(*results(own.make(), own, how))
        return
    with pytest.raises(RuntimeError, match=refused):
        step(*own.make(), own, how)


@cache
def made(family: Family) -> Made:
    """Makes a family's model and batch, once. Do not change them; change a copy."""
    torch.manual_seed(0)
    return family.make()


@cache
def found_and_plain(family: Family, how: How) -> tuple[Result, Result]:
    """Returns the results of the family's model in a pipe and plain."""
    return results(made(family), family, how)


def assert_equal(found: Result, plain: Result) -> None:
    """Compares the output, each gradient, the loss and the buffers."""
    assert_equal_outputs(found.output, plain.output)
    assert_same(found.grads, plain.grads)
    tolerance = tolerance_of(plain.loss)
    torch.testing.assert_close(
        found.loss.reshape(()), plain.loss, rtol=tolerance, atol=tolerance, check_dtype=False
    )
    torch.testing.assert_close(found.buffers, plain.buffers, rtol=tolerance, atol=tolerance)


def assert_equal_outputs(found: Any, plain: Any) -> None:
    """Compares bit for bit: the same operations compute both from the same rows.

    A number, such as the loss of a call, may have been added up from those of micro-batches.
    """
    ours, spec = tree_flatten(found)
    others, expected = tree_flatten(plain)
    assert spec == expected
    for one, other in zip(ours, others, strict=True):
        if isinstance(other, Tensor):
            rtol = 0 if other.dim() else tolerance_of(other)
            torch.testing.assert_close(one, other, rtol=rtol, atol=0, equal_nan=True)
        else:
            assert one == other


def _replicated(leaf: Any) -> Any:
    return pipert.Replicate(leaf.value) if isinstance(leaf, Whole) else leaf
