"""Models as they are, of all families: outputs and every gradient are the plain model's."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from tests.any_model.family import Family, Made
from tests.any_model.piped import HOWS, How, assert_equal, pipeline, results, step
from tests.any_model.zoo import ZOO

RUNNING = [family for family in ZOO if not family.why_not]
each_family = pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.sweep] * f.seldom, id=f.name) for f in RUNNING],
)
each_how = pytest.mark.parametrize("how", HOWS, ids=[how.name for how in HOWS])
DROPPED = 0.1


@cache
def made(family: Family) -> Made:
    torch.manual_seed(0)
    return family.make()


@each_how
@each_family
def test_a_step_is_the_plain_models(family: Family, how: How) -> None:
    if how.rows % 4 and family.whole_rows:
        pytest.skip(family.whole_rows)
    assert_equal(*results(made(family), family, how))


@each_family
def test_the_model_stays_what_it_is(family: Family) -> None:
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


def dropping(model: nn.Module) -> nn.Module:
    """A copy in which all that drops does so; some libraries have layers for it, some a number."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = DROPPED
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, DROPPED)
    return model


def drops(family: Family) -> bool:
    """Whether it has any layers that do."""
    model, batch = made(family)
    torch.manual_seed(1)
    one = step(dropping(model), batch, family, HOWS[0])
    torch.manual_seed(2)
    other = step(dropping(model), batch, family, HOWS[0])
    return not torch.equal(one.loss, other.loss)


@each_how
@each_family
def test_a_seed_gives_the_same_dropout_each_time(family: Family, how: How) -> None:
    if how.rows % 4 and family.whole_rows:
        pytest.skip(family.whole_rows)
    if not drops(family):
        pytest.skip("no layer drops anything")
    model, batch = made(family)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(step(dropping(model), batch, family, how))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@each_family
def test_what_is_recomputed_drops_the_same(family: Family) -> None:
    if not drops(family):
        pytest.skip("no layer drops anything")
    model, batch = made(family)
    found = []
    for how in HOWS[:2]:
        torch.manual_seed(3)
        found.append(step(dropping(model), batch, family, how))
    assert_equal(*found)
