"""Tests random losses over labels, of which unequal numbers count, against the plain model's.

A pipe must have the plain loss, or name the remedy in a warning. A call must have it in any case.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipert import pipeline
from tests.helpers.ways import MODES

transformers = pytest.importorskip("transformers", reason="its losses are tested")

CALLS = ["call of the model", "call of the pipe"]
DIVIDED = ["mean, divided", "sum, divided"]
STEPS = ["the model's loss", "ready", "mean", "sum", "sum, added", *DIVIDED]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_loss_over_labels_is_the_plain_model_s_or_the_remedy_is_named(seed: int) -> None:
    torch.manual_seed(seed)
    dice = Random(seed)
    rows, chunks = dice.randint(1, 8), dice.randint(1, 5)
    way, own = dice.choice(CALLS * 3 + STEPS), dice.choice(list(OWN))
    ids = torch.randint(11, (rows, 6))
    wanted = torch.where(torch.rand(ids.shape) < dice.choice([0.0, 0.3, 0.9]), -100, ids)
    wanted[:, 0] = wanted[0, -1] = wanted[-1, 2] = 0  # the first is in no loss, and counts alike
    plain, model = _model(), _model()
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        OWN[own](each)
    y = plain(input_ids=ids, labels=wanted)
    others: dict[str, Any] = {kind: _loss(y, wanted, kind) for kind in ("mean", "sum")}
    others |= {"sum, added": others["sum"]} | dict.fromkeys(DIVIDED, others["mean"])
    expected: Any = others.get(way, y.loss)
    expected.backward()
    options: Any = {"chunks": chunks, "checkpoint": dice.choice(MODES)}
    pipe = pipeline(model, ["transformer.h.1"], devices=["cpu"] * 2, **options)
    with warnings.catch_warnings(record=True) as seen, pipe:
        warnings.simplefilter("always")
        loss = _take(way, model, pipe, ids, wanted)
    for text in (texts := [str(each.message) for each in seen]):
        known = ["one micro-batch"] if way in CALLS else ["denominator", "not finite"]
        assert any([part in text for part in known]), text
    both: Any = zip(plain.parameters(), model.parameters(), strict=True)
    pairs = [(expected, loss), *[(x.grad, y.grad) for x, y in both]]
    is_right = all([torch.allclose(x, y, 1e-6, 1e-9) for x, y in pairs])
    is_said = any(["denominator" in text for text in texts])
    assert is_right or is_said, f"{way}, {own}: wrong"
    # A mean of one label is its sum.
    assert not (is_right and is_said) or way == "mean, divided", f"{way}, {own}: said, but right"


def _take(way: str, model: Any, pipe: Any, ids: Tensor, wanted: Tensor) -> Any:
    """Takes a step; returns its loss."""
    if way in CALLS:
        loss: Any = (model if way == CALLS[0] else pipe)(input_ids=ids, labels=wanted).loss
        loss.backward()
        return loss
    if way == "the model's loss":
        return pipe.forward_backward(input_ids=ids, labels=wanted)
    if way == "ready":
        m = max(k for k in range(1, pipe.chunks + 1) if len(ids) % k == 0)
        parts = [{"input_ids": x, "labels": y} for x, y in zip(ids.chunk(m), wanted.chunk(m))]
        return pipe.forward_backward(microbatches=parts, step=lambda part: model(**part).loss)
    kind, _, how = way.partition(", ")
    count = (wanted[:, 1:] != -100).sum()
    more: Any = {"divided": {"denominator": count}, "added": {"reduction": "sum"}}
    more = {"loss_fn": functools.partial(_loss, kind=kind), **more.get(how, {})}
    return pipe.forward_backward(input_ids=ids, target=wanted, **more)


def _loss(output: Any, wanted: Tensor, kind: str = "mean") -> Tensor:
    logits, targets = output.logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten()
    return F.cross_entropy(logits, targets.to(logits.device), reduction=kind)


def _model() -> Any:
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).double()


def _own_mean(self: Any, input_ids: Tensor, labels: Any = None, **more: Any) -> Any:
    more.pop("num_items_in_batch", None)
    output = type(self).forward(self, input_ids, **more)
    output.loss = None if labels is None else _loss(output, labels)
    return output


def _added(output: Any) -> Any:
    if output.loss is not None:
        output.loss = output.loss + output.logits.square().mean()
    return output


def _wrap(model: Any) -> None:
    """Replaces the forward of the class."""
    forward: Any = type(model).forward
    wrapped = functools.wraps(forward)(lambda *args, **kwargs: _added(forward(*args, **kwargs)))
    model.__class__ = type("Wrapped", (type(model),), {"forward": wrapped})


OWN: dict[str, Callable[[Any], object]] = {
    "its own": id,
    "instance": lambda model: setattr(model, "forward", types.MethodType(_own_mean, model)),
    "hook": lambda model: model.register_forward_hook(lambda module, args, y: _added(y)),
    "wrapped": _wrap,
}
