"""What models do between their layers, where these are on several GPUs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.any_model.piped import CHUNKS, How, in_each_how, step
from tests.any_model.reference import first_rows, reference
from tests.any_model.same import assert_same
from tests.any_model.test_glue import (
    MODELS,
    ApplyingAFunction,
    CheckpointingItself,
    Three,
    Transforming,
    family,
)

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

# The first two are refused there. What crosses inside of a transform is copied by none.
NOT_THERE = {ApplyingAFunction, CheckpointingItself, Transforming}
THERE = [model for model in MODELS if model not in NOT_THERE]


@pytest.mark.parametrize(("model", "how"), in_each_how(THERE))
def test_a_model_gives_on_gpus_what_it_gives_without_a_pipe(model: type[Three], how: How) -> None:
    own = family(model)
    module, batch = own.make()
    plain = reference(copy.deepcopy(module), first_rows(batch, how.rows), own.loss, CHUNKS)
    devices = [f"cuda:{j % torch.cuda.device_count()}" for j in range(len(own.cuts) + 1)]
    found = step(module, batch, own, how, devices=devices)
    grads = {name: None if g is None else g.cpu() for name, g in found.grads.items()}
    assert_same(grads, plain.grads, slack=10)
    output = [leaf.cpu() for leaf in tree_leaves(found.output) if isinstance(leaf, Tensor)]
    expected = [leaf for leaf in tree_leaves(plain.output) if isinstance(leaf, Tensor)]
    torch.testing.assert_close(output, expected)
