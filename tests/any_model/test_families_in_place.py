"""Tests models of all families in place: whoever calls the model, calls its pipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.any_model.all_families import each_family
from tests.any_model.family import ROWS, Family
from tests.any_model.piped import CHUNKS, made, pipeline
from tests.any_model.reference import Result, detached, reference, sizes_of, split, state_of
from tests.any_model.same import assert_same

WHERE = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.multi_gpu], id="gpus"),
]
each_place = pytest.mark.parametrize("kind", WHERE)


def in_place(model: nn.Module, family: Family, kind: str, chunks: int) -> Any:
    """Puts the model into a pipe; on GPUs, of two devices."""
    devices = [kind if kind == "cpu" else f"cuda:{j % 2}" for j in range(len(family.cuts) + 1)]
    return pipeline(model, family, "except_last", devices=devices, chunks=chunks)


def assert_on_cpu_equal(found: Result, plain: Result) -> None:
    here = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, found)
    assert_same(here.grads, plain.grads, slack=10)
    torch.testing.assert_close(here.output, plain.output, check_dtype=False)
    torch.testing.assert_close(here.loss.reshape(()), plain.loss, check_dtype=False)


@each_place
@each_family
def test_a_call_of_the_model_equals_the_plain_models(family: Family, kind: str) -> None:
    model, batch = made(family)
    plain = reference(copy.deepcopy(model), batch, family.loss, 1)
    model = copy.deepcopy(model)
    (given,) = split(batch, [ROWS])
    with in_place(model, family, kind, chunks=1) as pipe:
        output = model(**given)
        assert pipe.statistics().runs == 1
        loss = family.loss(output)
        loss.backward()  # type: ignore[no-untyped-call]
        found = Result(detached(output), loss.detach(), *state_of(model))
    assert_on_cpu_equal(found, plain)


@each_place
@each_family
def test_a_step_of_ready_microbatches_equals_the_plain_models(family: Family, kind: str) -> None:
    model, batch = made(family)
    plain = reference(copy.deepcopy(model), batch, family.loss, CHUNKS)
    model = copy.deepcopy(model)
    with in_place(model, family, kind, CHUNKS) as pipe:
        ready = split(batch, sizes_of(batch, CHUNKS))
        loss = pipe.forward_backward(
            microbatches=ready, step=lambda batch: family.loss(model(**batch))
        )
        found = Result(plain.output, loss.detach(), *state_of(model))
    assert_on_cpu_equal(found, plain)
