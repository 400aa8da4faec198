"""Tests steps without a ``loss_fn``, whose loss is the one that the model has computed."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipert
from pipert import Pipe
from tests.helpers.ways import MODES, grads_of, linear, same

X = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


class WithLoss(NamedTuple):
    y: Tensor
    loss: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an attribute": lambda y, loss: WithLoss(y, loss),
    "an item": lambda y, loss: {"y": y, "loss": loss},
    "the first element": lambda y, loss: (loss, y),
    "the output": lambda y, loss: loss,
}


class Losing(nn.Module):
    """Computes a loss of its own, a mean over rows."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.last = form, linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.last(x)
        return FORMS[self.form](y, y.square().mean())


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_of_the_model_is_found_in_its_output(form: str) -> None:
    model = nn.Sequential(linear(3, 3), Losing(form))
    plain: Any = copy.deepcopy(model)
    expected = plain[1].last(plain[0](X)).square().mean()
    expected.backward()
    with Pipe(model, [1, 1], devices=["cpu"] * 2, chunks=3) as pipe:
        same(pipe.forward_backward(X), expected.detach())
        same(grads_of(model), grads_of(plain))


def test_an_output_without_a_loss_is_answered_with_both_ways_to_give_one() -> None:
    model = nn.Sequential(linear(3, 3), linear(3, 3))
    with Pipe(model, [1, 1], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(TypeError, match=r"loss_fn must be given.*own loss.*labels\?"):
            pipe.forward_backward(X)
    assert model[0].weight.grad is None


# Losses over labels that count ------------------------------------------------------------------

IDS = torch.randint(4, 60, (6, 8), generator=torch.Generator().manual_seed(2))
LABELS = IDS.masked_fill(torch.arange(8) > torch.tensor([[1], [7], [3], [5], [0], [7]]), -100)
BATCH = {"input_ids": IDS, "labels": LABELS}  # a micro-batch of one row has no labels
EACH = {"input_ids": IDS, "labels": IDS.where(torch.arange(8) <= LABELS[:, 1:2] % 5 + 2, -100)}


def llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="its losses are tested")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def in_pipe(model: Any, **more: Any) -> Any:
    given = {"devices": ["cpu"] * 2, "chunks": 4, **more}
    return pipert.pipeline(model, ["model.layers.1"], **given)


def rows_seen(model: Any) -> list[int]:
    """Returns a list that will hold the number of rows of each forward."""
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, args, y: seen.append(len(args[0])))
    return seen


@pytest.mark.pairwise
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 40}], ids=["counted", "given"])
def test_a_sum_over_the_labels_that_count_is_the_loss_of_the_mini_batch(
    schedule: str, checkpoint: str, more: dict[str, Any]
) -> None:
    model, plain = llama(), llama()
    expected = plain(**BATCH, **more).loss
    expected.backward()
    seen = rows_seen(model)
    with in_pipe(model, schedule=schedule, checkpoint=checkpoint) as pipe:
        for _ in range(3):
            model.zero_grad()
            seen.clear()
            same(pipe.forward_backward(**BATCH, **more), expected.detach())
            same(grads_of(model), grads_of(plain))
            assert sorted(set(seen)) == [1, 2]


def own_mean(model: Any) -> Any:
    def forward(self: Any, input_ids: Tensor, labels: Any = None, **more: Any) -> Any:
        more.pop("num_items_in_batch", None)
        output = type(self).forward(self, input_ids, **more)
        if labels is not None:
            logits = output.logits[:, :-1].flatten(0, 1)
            output.loss = F.cross_entropy(logits, labels[:, 1:].flatten())
        return output

    model.forward = types.MethodType(forward, model)
    return model


def hooked(model: Any) -> Any:
    def add(_: Any, args: Any, output: Any) -> Any:
        if output.loss is not None:
            output.loss = output.loss + output.logits.square().mean()
        return output

    model.register_forward_hook(add)
    return model


def wrapped(model: Any) -> Any:
    """Has the forward of its class replaced."""
    forward: Any = type(model).forward

    @functools.wraps(forward)
    def squared(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + output.logits.square().mean()
        return output

    model.__class__ = type("Wrapped", (type(model),), {"forward": squared})
    return model


def renormed(model: Any) -> Any:
    """Has statistics that a forward updates, and draws."""
    model = own_mean(model)
    model.lm_head = nn.Sequential(
        nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Unflatten(0, (-1, 8)),
        model.lm_head,
    ).double()  # fmt: skip
    return model


@pytest.mark.parametrize("change", [own_mean, hooked, wrapped])
def test_a_step_whose_losses_do_not_add_up_weighs_means_by_rows_and_says_so(change: Any) -> None:
    model, plain = change(llama()), change(llama())
    parts = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)]
    losses = [plain(**{name: x[k] for name, x in EACH.items()}).loss for k in parts]
    expected = sum([loss * len(IDS[k]) / 6 for loss, k in zip(losses, parts, strict=True)])
    expected.backward()
    with in_pipe(model) as pipe:
        with pytest.warns(UserWarning, match=r"denominator=\(target != -100\).sum"):
            same(pipe.forward_backward(**EACH), expected.detach())
        same(grads_of(model), grads_of(plain))
        pipe.forward_backward(**EACH)  # said once


@pytest.mark.parametrize("how", ["call", "step"])
def test_a_first_try_leaves_statistics_and_random_numbers_alone(how: str) -> None:
    def run(is_known: bool) -> Any:
        model = renormed(llama())
        with in_pipe(model, **options) as pipe, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if is_known:
                with torch.random.fork_rng():
                    taken(pipe, model)
                model.zero_grad()
                model.load_state_dict(state)
            torch.manual_seed(5)
            loss = taken(pipe, model)
            return loss, grads_of(model), dict(model.named_buffers()), torch.rand(1)

    def taken(pipe: Any, model: Any) -> Tensor:
        if how == "step":
            found: Tensor = pipe.forward_backward(**EACH)
            return found
        loss: Tensor = model(**EACH).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    options: Any = {"checkpoint": "never", "deferred_batch_norm": False}
    state = copy.deepcopy(renormed(llama()).state_dict())
    same(run(False), run(True), rtol=0, atol=0)


def test_an_argument_that_adds_a_term_is_tried_by_itself() -> None:
    def term(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if kwargs.get("output_router_logits"):
            output.loss = output.loss + 1
        return output

    model = llama()
    model.register_forward_hook(term, with_kwargs=True)
    expected = copy.deepcopy(model)(**BATCH).loss.detach()
    seen = rows_seen(model)
    with in_pipe(model, checkpoint="never"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for more, sizes in (({}, [2, 2, 1, 1]), ({"output_router_logits": True}, [6])) * 3:
            seen.clear()
            same(model(**BATCH, **more).loss.detach(), expected + len(more))
            assert seen[-len(sizes) :] == sizes


class Contrasting(nn.Module):
    """Compares each row with all others, if asked, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(3, 3), linear(3, 3)

    def forward(self, x: Tensor, return_loss: bool = False) -> Any:
        y = self.last(self.first(x))
        loss = F.cross_entropy(y @ y.T, torch.arange(len(y))) if return_loss else None
        return {"y": y, "loss": loss}


def test_a_contrastive_loss_that_is_asked_for_by_name_is_that_of_all_rows() -> None:
    model = Contrasting()
    plain = copy.deepcopy(model)
    expected = plain(X, return_loss=True)["loss"]
    expected.backward()
    with pipert.pipeline(model, ["last"], devices=["cpu"] * 2, chunks=3) as pipe:
        with pytest.warns(UserWarning, match="one micro-batch of 3"):
            loss = pipe.forward_backward(X, return_loss=True)
    same(loss, expected.detach())
    same(grads_of(model), grads_of(plain))
