"""Tests that the reference for pipes is right, and that the comparison notices errors."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from tests.any_model.all_families import ZOO
from tests.any_model.family import ROWS, Family, Made
from tests.any_model.reference import Result, first_rows, reference
from tests.any_model.same import assert_same, scale_of, tolerance_of

RUNNING = [family for family in ZOO if not family.why_not]
each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.sweep] * (f.seldom or f.library != ""), id=f.name)
        for f in RUNNING
    ],
)


@cache
def made(family: Family) -> Made:
    torch.manual_seed(0)
    return family.make()


def step(family: Family, chunks: int = 4, rows: int = ROWS) -> Result:
    model, batch = made(family)
    return reference(copy.deepcopy(model), first_rows(batch, rows), family.loss, chunks)


@each_family
def test_micro_batches_add_up_to_the_batch_unless_rows_are_mixed(family: Family) -> None:
    rows = ROWS if family.whole_rows else 6
    whole, parts = step(family, 1, rows), step(family, 4, rows)
    if family.mixes_rows:
        with pytest.raises(AssertionError):
            assert_same(parts.grads, whole.grads, slack=100)
    else:
        assert_same(parts.grads, whole.grads, slack=10)


@each_family
def test_a_missing_gradient_is_noticed(family: Family) -> None:
    """Gradients of most parameters are far larger than the tolerance for rounding errors."""
    found = step(family).grads
    least = 1000 * scale_of(found) * max(tolerance_of(g) for g in found.values() if g is not None)
    seen = [g is not None and float(g.abs().max()) > least for g in found.values()]
    wanted = [p.requires_grad for p in made(family).model.parameters()]
    assert sum(seen) > 0.5 * sum(wanted)
