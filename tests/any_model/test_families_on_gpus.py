"""Tests unchanged models on several GPUs: a pipe's results equal the plain model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.any_model.all_families import each_family
from tests.any_model.family import ROWS, Family
from tests.any_model.piped import How, chunks_of, each_how, made, step
from tests.any_model.reference import first_rows, reference
from tests.any_model.same import assert_same

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


def forget_states(model: nn.Module) -> None:
    """Drops tensors with a graph that a model keeps, as recurrent ones do.

    Such a graph contains the layer's recomputation, which references the layer and so the tensor:
    a cycle that the garbage collector cannot free.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(module, name, None)


@each_how
@each_family
def test_a_step_on_gpus_equals_the_plain_models(family: Family, how: How) -> None:
    if family.whole_rows:
        how = how._replace(rows=ROWS)
    model, batch = made(family)
    rows, chunks = first_rows(batch, how.rows), chunks_of(batch, how)
    plain = reference(copy.deepcopy(model), rows, family.loss, chunks)
    devices = [f"cuda:{j % torch.cuda.device_count()}" for j in range(len(family.cuts) + 1)]
    own = copy.deepcopy(model)
    found = step(own, batch, family, how, devices=devices)
    forget_states(own)
    grads = {name: None if g is None else g.cpu() for name, g in found.grads.items()}
    assert_same(grads, plain.grads, slack=10)
    output = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, found.output)
    torch.testing.assert_close(output, plain.output, check_dtype=False)
