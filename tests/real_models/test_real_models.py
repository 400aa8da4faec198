"""Models of libraries, cut at random: outputs and every gradient are the plain module's."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import pipert
from tests.any_model.family import Made, Whole, everything
from tests.any_model.reference import Result, detached, first_rows, loss_of, sizes_of, state_of
from tests.any_model.same import assert_same
from tests.real_models.diffusers_models import DIFFUSERS
from tests.real_models.random_pipe import SCHEDULES, Calls, RandomPipe, called, draw_pipe
from tests.real_models.real_model import RealModel
from tests.real_models.timm_models import TIMM
from tests.real_models.vit_models import VIT_PYTORCH
from tests.real_models.x_models import X_TRANSFORMERS

pytestmark = pytest.mark.sweep

MODELS = [*TIMM, *VIT_PYTORCH, *X_TRANSFORMERS, *DIFFUSERS]
SEEDS = range(2)
# Some models compute partly in float32, and round differently with another number of rows.
SLACK = 100.0
same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("real", MODELS, ids=repr)
def test_a_random_pipe_equals_the_plain_module(real: RealModel, schedule: str, seed: int) -> None:
    (model, batch), calls = made(real)
    dice = Random(f"{real.name} {schedule} {seed}")
    drawn = draw_pipe(dice, schedule, model, calls, real.recomputed)
    if schedule == "call" and real.returns_loss:
        drawn = replace(drawn, chunks=1)  # numbers of several micro-batches are refused
    print(drawn)  # pytest shows it if the test fails
    found = piped(prepared(model, drawn), rows_of(batch, drawn), drawn)
    assert_equal(found, plain(prepared(model, drawn), rows_of(batch, drawn)))


@cache
def made(real: RealModel) -> tuple[Made, Calls]:
    """Makes a model and its batch, and notes its calls. Change copies of them only."""
    found = real.made()
    with torch.no_grad():
        return found, called(copy.deepcopy(found.model), tree_map(whole, found.batch))


def prepared(model: nn.Module, drawn: RandomPipe) -> nn.Module:
    """Copies a model, and freezes parameters."""
    model = copy.deepcopy(model)
    for name in drawn.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def rows_of(batch: dict[str, Any], drawn: RandomPipe) -> dict[str, Any]:
    """Copies the first rows of a batch."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.clone().requires_grad_(drawn.inputs and leaf.is_floating_point())

    rows: dict[str, Any] = tree_map(copied, first_rows(batch, drawn.rows))
    return rows


def plain(model: nn.Module, batch: dict[str, Any]) -> Result:
    """Takes a step of the plain module, with all rows at once."""
    output = model(**tree_map(whole, batch))
    loss = everything(output)
    loss.backward()  # type: ignore[no-untyped-call]
    return result_of(model, batch, output, loss)


def piped(model: nn.Module, batch: dict[str, Any], drawn: RandomPipe) -> Result:
    """Takes a step of the model in a pipe."""
    arguments = tree_map(replicated, batch)
    with pipert.pipeline(
        model, drawn.cuts, devices=drawn.devices, chunks=drawn.chunks,
        checkpoint=drawn.checkpoint, example=arguments if drawn.example else None,
    ) as pipe:  # fmt: skip
        if drawn.schedule == "call":
            output = pipe(**arguments)
            loss = loss_of(output, sizes_of(batch, drawn.chunks), everything)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss, output = pipe.forward_backward(
                **arguments, loss_fn=lambda output, _: everything(output), target=None,
                schedule=drawn.schedule, return_outputs=True,
            )  # fmt: skip
    return result_of(model, batch, output, loss)


def result_of(model: nn.Module, batch: dict[str, Any], output: Any, loss: Tensor) -> Result:
    """Returns the result of a step; its gradients are those of parameters and arguments."""
    grads, buffers = state_of(model)
    arguments = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    grads |= {f"argument {k}": leaf.grad for k, leaf in enumerate(arguments)}
    return Result(detached(output), loss.detach(), grads, buffers)


def assert_equal(found: Result, plain: Result) -> None:
    """Compares outputs, loss, gradients and buffers."""
    same(tensors(found.output), tensors(plain.output))
    same(found.loss.reshape(()), plain.loss)
    assert_same(found.grads, plain.grads, SLACK)
    same(found.buffers, plain.buffers)


def tensors(output: Any) -> list[Tensor]:
    """Returns the tensors of an output that have rows; a pipe returns a loss per micro-batch."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() > 1]


def whole(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Whole) else leaf


def replicated(leaf: Any) -> Any:
    return pipert.Replicate(leaf.value) if isinstance(leaf, Whole) else leaf
