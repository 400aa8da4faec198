"""Tests unchanged models of all families: outputs and gradients equal the plain model's."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from tests.any_model.all_families import RUNNING, each_family
from tests.any_model.family import Family, Made
from tests.any_model.piped import (
    CHUNKS,
    HOWS,
    How,
    assert_equal,
    each_how,
    found_and_plain,
    in_each_how,
    made,
    pipeline,
    step,
)
from tests.any_model.reference import Result, reference

OFTEN, SELDOM = ([f for f in RUNNING if f.seldom == seldom] for seldom in (False, True))


@pytest.mark.parametrize(("family", "how"), in_each_how(OFTEN, SELDOM))
def test_a_step_equals_the_plain_models(family: Family, how: How) -> None:
    if how.rows % CHUNKS and family.whole_rows:
        pytest.skip(family.whole_rows)
    assert_equal(*found_and_plain(family, how))


@each_family
def test_a_pipe_leaves_the_model_unchanged(family: Family) -> None:
    model = copy.deepcopy(made(family).model)
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    modules = list(model.named_modules())
    with pipeline(model, family, "never") as pipe:
        assert pipe.module is model
        assert list(pipe.state_dict()) == keys
        assert list(dict(model.named_modules()).items()) == modules
        for name, parameter in pipe.named_parameters():
            assert parameter is parameters[name]
    assert list(model.state_dict()) == keys


# Random numbers -----------------------------------------------------------------------------------

DROPPED = 0.1
DROPPING = ("gpt2", "vit")
"""Those in a run without ``--sweep``."""

each_that_may_drop = pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.sweep] * (f.name not in DROPPING), id=f.name)
        for f in RUNNING
        if not f.never_drops
    ],
)


def dropping(family: Family) -> Made:
    """Copies a model and turns on all dropout, which libraries keep in layers or as numbers."""
    model, batch = made(family)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = DROPPED
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, DROPPED)
    return Made(model, batch)


@cache
def drops(family: Family) -> bool:
    """Tells whether anything in the model can drop."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(reference(*dropping(family), family.loss, CHUNKS).loss)
    return not torch.equal(*found)


def seeded_step(family: Family, how: How) -> Result:
    model, batch = dropping(family)
    torch.manual_seed(3)
    return step(model, batch, family, how)


@each_how
@each_that_may_drop
def test_a_seed_gives_the_same_dropout_each_time(family: Family, how: How) -> None:
    if how.rows % CHUNKS and family.whole_rows:
        pytest.skip(family.whole_rows)
    if not drops(family):
        pytest.skip("nothing in it can drop")
    for one, other in zip(seeded_step(family, how), seeded_step(family, how), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@each_that_may_drop
def test_recomputation_replays_the_same_dropout(family: Family) -> None:
    if not drops(family):
        pytest.skip("nothing in it can drop")
    never, always, *_ = HOWS
    assert_equal(seeded_step(family, always), seeded_step(family, never))
