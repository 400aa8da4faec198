"""Tests the code of models between layers on several GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pipert
from pipert import RecomputationError
from tests.any_model.family import ROWS, Family
from tests.any_model.piped import CHUNKS, How, each_how, in_each_how, step
from tests.any_model.reference import first_rows, reference
from tests.any_model.same import assert_same
from tests.any_model.test_own_code import (
    DIFFERENTIATING_LAYERS,
    MODELS,
    CheckpointingItself,
    Jacobians,
    Three,
    TransformingClones,
    family,
)

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

# They are refused there.
TRANSFORMS = [TransformingClones, Jacobians]
NOT_THERE = {CheckpointingItself, *TRANSFORMS}
THERE = [model for model in MODELS if model not in NOT_THERE]


def devices_of(own: Family) -> list[str]:
    return [f"cuda:{j % torch.cuda.device_count()}" for j in range(len(own.cuts) + 1)]


@pytest.mark.filterwarnings("ignore:no partition begins at:UserWarning")  # some leave cuts out
@pytest.mark.parametrize(("model", "how"), in_each_how(THERE))
def test_code_between_layers_has_the_plain_models_results_on_gpus(
    model: type[Three], how: How
) -> None:
    own = family(model)
    module, batch = own.make()
    if how.checkpoint != "never" and model in DIFFERENTIATING_LAYERS:
        with pytest.raises(RecomputationError, match="create_graph=True"):
            step(module, batch, own, how, devices=devices_of(own))
        return
    plain = reference(copy.deepcopy(module), first_rows(batch, how.rows), own.loss, CHUNKS)
    found = step(module, batch, own, how, devices=devices_of(own))
    grads = {name: None if g is None else g.cpu() for name, g in found.grads.items()}
    assert_same(grads, plain.grads, slack=10)
    output = [leaf.cpu() for leaf in tree_leaves(found.output) if isinstance(leaf, Tensor)]
    expected = [leaf for leaf in tree_leaves(plain.output) if isinstance(leaf, Tensor)]
    torch.testing.assert_close(output, expected)


@each_how
@pytest.mark.parametrize("model", TRANSFORMS)
def test_a_transform_refuses_what_is_on_another_gpu(model: type[Three], how: How) -> None:
    own = family(model)
    module, batch = own.make()
    with pytest.raises(RuntimeError, match="a transform .* in a model's own code uses a"):
        step(module, batch, own, how, devices=devices_of(own))


@each_how
def test_a_function_that_torch_calls_again_may_not_use_tensors_on_two_gpus(how: How) -> None:
    own = family(CheckpointingItself)
    module, batch = own.make()
    refused = "on the same device|different metadata"  # by torch, or by its checkpoint
    with pytest.raises(RuntimeError, match=refused):
        step(module, batch, own, how, devices=devices_of(own))


@pytest.mark.parametrize(("enabled", "checkpoint"), [(True, "never"), (False, "always")])
def test_a_forward_may_differentiate_by_a_tensor_of_another_gpu(
    enabled: bool, checkpoint: str
) -> None:
    """Also if the caller has turned gradients off, so that nothing is recomputed."""
    model = Forces().double()
    x = torch.randn(ROWS, 4, dtype=torch.float64, requires_grad=True)
    devices = devices_of(family(Forces))
    with torch.set_grad_enabled(enabled):
        plain = copy.deepcopy(model)
        expected = [plain(part) for part in x.chunk(CHUNKS)]
        with pipert.pipeline(
            model, ["b", "c"], devices=devices, chunks=CHUNKS, checkpoint=checkpoint
        ) as pipe:
            found = pipe(x)
            torch.testing.assert_close(found.cpu(), torch.cat(expected))
            if enabled:
                found.square().sum().backward()
                torch.cat(expected).square().sum().backward()  # type: ignore[no-untyped-call]
                for layer, own in zip(model.children(), plain.children(), strict=True):
                    found_grads = [weight.grad for weight in layer.parameters()]
                    plain_grads = [weight.grad for weight in own.parameters()]
                    torch.testing.assert_close(found_grads, plain_grads, check_device=False)


class Forces(Three):
    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            places = x.requires_grad_() * 1
            y = self.a(places)
            energies = (self.c(self.b(y) * y) + y).square()
            by_places, by_y = torch.autograd.grad(energies.sum(), [places, y], create_graph=True)
        return energies + by_places * by_y
