"""Tests ``step=``: a function that does with each micro-batch what a plain loop would do."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import Pipe
from tests.any_model.stepped import a_model, a_pipe, batches, own_loss, plain_step, same
from tests.helpers.ways import MODES, grads_of

SCHEDULES = ["1f1b", "gpipe", "eager-1f1b"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", MODES)
def test_loss_and_gradients_are_those_of_the_plain_loop(schedule: str, checkpoint: str) -> None:
    model = a_model()
    expected = plain_step(model, own_loss)
    with a_pipe(model, checkpoint=checkpoint) as pipe:
        loss = pipe.forward_backward(
            microbatches=batches(), step=lambda batch: own_loss(model, batch), schedule=schedule
        )
        assert pipe.statistics().runs == 1  # calls of the model are part of the step
    assert not loss.requires_grad
    same((loss, grads_of(model)), expected)


@pytest.mark.parametrize(
    ("options", "divisor"), [({"reduction": "sum"}, 1.0), ({"denominator": 10}, 10.0)]
)
def test_sums_of_losses_are_divided_as_asked(options: dict[str, Any], divisor: float) -> None:
    def sums(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"])["logits"], batch["labels"], reduction="sum")

    model = a_model()
    expected = plain_step(model, lambda own, batch: sums(own, batch) * 4 / divisor)
    with a_pipe(model) as pipe:
        loss = pipe.forward_backward(
            microbatches=batches(), step=lambda batch: sums(model, batch), **options
        )
    same((loss, grads_of(model)), expected)


def test_arguments_are_split_and_passed_to_the_function() -> None:
    model, x = a_model(), torch.randn(8, 4, dtype=torch.float64)
    expected = plain_step(model, lambda own, x: own(x)["norm"] * 2.0, [x])
    with a_pipe(model, chunks=4) as pipe:
        loss = pipe.forward_backward(x, times=2.0, step=lambda x, times: model(x)["norm"] * times)
    same((loss, grads_of(model)), expected)


def test_dropout_is_the_same_from_a_seed_whatever_the_schedule() -> None:
    def found(seed: int, schedule: str, checkpoint: str) -> Any:
        model = a_model(p=0.5)
        with a_pipe(model, checkpoint=checkpoint) as pipe:
            torch.manual_seed(seed)
            loss = pipe.forward_backward(
                microbatches=batches(), step=lambda b: own_loss(model, b), schedule=schedule
            )
        return loss, grads_of(model)

    expected = found(7, "1f1b", "never")
    torch.testing.assert_close(found(7, "1f1b", "never"), expected, rtol=0, atol=0)
    for schedule in SCHEDULES:
        for checkpoint in MODES:
            same(found(7, schedule, checkpoint), expected)
    assert found(8, "1f1b", "never")[0] != expected[0]


def test_random_numbers_of_the_function_itself_come_from_the_seed() -> None:
    def step(batch: Any) -> Any:
        noise = torch.randn_like(batch["x"])
        seen.append(noise.sum().item())
        return model(batch["x"] + noise)["norm"]

    model, seen = a_model(), list[float]()
    with a_pipe(model, checkpoint="always") as pipe:
        for _ in range(2):
            torch.manual_seed(5)
            pipe.forward_backward(microbatches=batches(), step=step)
    assert sorted(seen[:4]) == sorted(seen[4:]) and len(set(seen)) == 4


def test_outputs_of_pairs_are_a_list_with_one_for_each() -> None:
    def step(batch: Any) -> Any:
        y = model(**batch)
        return y["loss"], {"logits": y["logits"], "rows": len(batch["x"])}

    model = a_model()
    expected = [copy.deepcopy(model)(**batch)["logits"].detach() for batch in batches()]
    with a_pipe(model) as pipe:
        loss, outputs = pipe.forward_backward(
            microbatches=batches(), step=step, return_outputs=True
        )
        alone = pipe.forward_backward(microbatches=batches(), step=step)
    assert torch.equal(alone, loss) and [y["rows"] for y in outputs] == [3, 1, 4, 2]
    assert not any(y["logits"].requires_grad for y in outputs)
    assert all(torch.equal(y["logits"], e) for y, e in zip(outputs, expected, strict=True))


def test_a_function_that_never_calls_the_model_is_refused() -> None:
    model = a_model()
    other, grads = copy.deepcopy(model), {name: p.grad for name, p in model.named_parameters()}
    with a_pipe(model) as pipe:
        with pytest.raises(RuntimeError, match=r"called no layer of the model .* pipe\.module"):
            pipe.forward_backward(
                microbatches=batches(), step=lambda b: other(b["x"])["logits"].sum()
            )
        assert {name: p.grad for name, p in model.named_parameters()} == grads
        pipe.forward_backward(  # not each micro-batch need call it
            microbatches=batches(),
            step=lambda b: model(b["x"])["logits"].sum() if len(b["x"]) > 1
            else sum(p.sum() for p in model.parameters()),
        )  # fmt: skip


def test_autocast_inside_the_function_is_the_plain_loop_s() -> None:
    def step(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = model(batch["x"].float())["logits"]
        assert y.dtype is torch.bfloat16
        return F.cross_entropy(y.float(), batch["labels"])

    model = a_model().float()
    expected = plain_step(model, step)
    with a_pipe(model, checkpoint="always") as pipe:
        loss = pipe.forward_backward(
            microbatches=batches(), step=lambda b: step(model, b), schedule="gpipe"
        )
    torch.testing.assert_close((loss, grads_of(model)), expected, rtol=1e-5, atol=1e-6)


def distill(model: Any, teacher: Any, batch: Any) -> Any:
    with torch.no_grad():
        wanted = teacher(batch["x"])["logits"].softmax(-1)
    return F.cross_entropy(model(batch["x"])["logits"], wanted.to(batch["x"].device))


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("kind", ["plain", "a pipe", "a Pipe"])
def test_a_teacher_is_called_without_gradients(kind: str, checkpoint: str) -> None:
    model, teacher = a_model(), a_model(seed=3)
    expected = plain_step(model, lambda own, batch: distill(own, teacher, batch))
    with contextlib.ExitStack() as stack:
        called: Any = teacher
        if kind == "a pipe":
            other = stack.enter_context(a_pipe(teacher))
        elif kind == "a Pipe":
            layers = nn.Sequential(Called(teacher), nn.Identity())
            other = called = stack.enter_context(Pipe(layers, [1, 1], devices=["cpu"] * 2))
        pipe = stack.enter_context(a_pipe(model, checkpoint=checkpoint))
        loss = pipe.forward_backward(
            microbatches=batches(), step=lambda b: distill(model, called, b)
        )
        assert kind == "plain" or other.statistics().succeeded == 4
    same((loss, grads_of(model)), expected)
    assert all(p.grad is None for p in teacher.parameters())


class Called(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


AGAIN = "the model is called again for the same micro-batch"


def twice(model: Any, batch: Any) -> Any:
    """A contrastive loss: two calls of the model, the second of which goes back to its start."""
    one, two = model(batch["x"])["logits"], model(batch["x"].flip(0) * 0.5)["logits"]
    return (one - two).square().mean() + one.mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", MODES)
def test_two_calls_of_the_model_are_those_of_the_plain_loop(
    schedule: str, checkpoint: str
) -> None:
    model = a_model()
    expected = plain_step(model, twice)
    with a_pipe(model, checkpoint=checkpoint) as pipe, pytest.warns(UserWarning, match=AGAIN):
        loss = pipe.forward_backward(
            microbatches=batches(), step=lambda b: twice(model, b), schedule=schedule
        )
    same((loss, grads_of(model)), expected)


@pytest.mark.multi_gpu
@pytest.mark.filterwarnings(f"ignore:{AGAIN}:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("step", [own_loss, twice])
def test_on_gpus_the_function_is_the_plain_loop_s(
    schedule: str, checkpoint: str, step: Any
) -> None:
    model = a_model()
    loss, grads = plain_step(model, step)
    gpus = ["cuda:0", "cuda:1", "cuda:0"]
    with a_pipe(model, devices=gpus, checkpoint=checkpoint) as pipe:
        found = pipe.forward_backward(
            microbatches=[{k: v.to("cuda:0") for k, v in b.items()} for b in batches()],
            step=lambda b: step(model, b), schedule=schedule,
        )  # fmt: skip
    same(found.cpu(), loss)
    torch.testing.assert_close(grads_of(model), grads, rtol=1e-12, atol=1e-16, check_device=False)
