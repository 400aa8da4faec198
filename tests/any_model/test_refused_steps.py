"""Tests errors of ``step=``: where they are, what is refused, and that nothing is added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipert import Pipe, ReentrantCallError
from tests.any_model.stepped import a_model, a_pipe, batches, own_loss, plain_step, same
from tests.helpers.ways import grads_of


@pytest.mark.parametrize("before", [True, False])
def test_an_error_of_the_function_says_where_and_adds_nothing(before: bool) -> None:
    def step(batch: Any) -> Any:
        if before and len(batch["x"]) == 4:
            raise ValueError("of mine")
        loss = own_loss(model, batch)
        if len(batch["x"]) == 4:
            raise ValueError("of mine")
        return loss

    model = a_model()
    with a_pipe(model) as pipe:
        with pytest.raises(ValueError, match="of mine") as caught:
            pipe.forward_backward(microbatches=batches(), step=step)
        (note,) = caught.value.__notes__
        assert "micro-batch 2 of 4" in note and f"F[2,{0 if before else 2}]" in note
        assert all(p.grad is None for p in model.parameters())
        expected = plain_step(model, own_loss)
        loss = pipe.forward_backward(
            microbatches=batches(), step=lambda batch: own_loss(model, batch)
        )
    same((loss, grads_of(model)), expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda y: None, "step must return a tensor of one element, got None"),
        (lambda y: y["logits"], "step must return a tensor of one element, got float64"),
        (lambda y: (y["norm"], 1, 2), "step must return"),
        (lambda y: (y["logits"], y["norm"]), "step must return a tensor of one element"),
        (lambda y: y["norm"] * 1j, "step must return a real number"),
    ],
)
def test_what_is_no_loss_is_refused(returned: Any, message: str) -> None:
    model = a_model()
    with a_pipe(model) as pipe, pytest.raises(TypeError, match=message):
        pipe.forward_backward(microbatches=batches(), step=lambda b: returned(model(**b)))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"loss_fn": F.mse_loss}, TypeError, "takes no loss_fn and no target"),
        ({"target": [1, 2, 3, 4]}, TypeError, "takes no loss_fn and no target"),
        ({"step": 3}, TypeError, "step must be a function"),
        ({"microbatches": []}, ValueError, "at least one entry"),
    ],
)
def test_what_a_step_cannot_begin_with_is_refused(given: Any, error: Any, message: str) -> None:
    model = a_model()
    with a_pipe(model) as pipe, pytest.raises(error, match=message):
        options = {"microbatches": batches(), "step": lambda batch: own_loss(model, batch)}
        pipe.forward_backward(**{**options, **given})


@pytest.mark.layered
def test_a_pipe_of_layers_refuses_it() -> None:
    with Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"]) as pipe:
        with pytest.raises(TypeError, match=r"make the pipe with pipert.pipeline\(module, cuts\)"):
            pipe.forward_backward(torch.ones(2, 2), step=lambda x: x.sum())


def test_a_function_that_calls_the_pipe_instead_of_the_model_is_refused() -> None:
    with a_pipe(a_model()) as pipe, pytest.raises(ReentrantCallError):
        pipe.forward_backward(microbatches=batches(), step=lambda b: pipe(**b)["loss"])
