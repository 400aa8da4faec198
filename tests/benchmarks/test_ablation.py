"""Tests that results are the same without each part of the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from _ablation import Components, only, through_all_between
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip.declarations import keys_of
from tests.helpers.skip_layers import popping, stashing

EVERY = [Components(*on) for on in itertools.product([True, False], repeat=3)]
PLACES = [
    ["cpu"] * 5,
    pytest.param([f"cuda:{k % 2}" for k in range(5)], marks=[pytest.mark.multi_gpu]),
]

Train = Callable[[Pipe, Tensor], Tensor]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip * self.weight


def model() -> nn.Sequential:
    """Makes partitions of two layers; skips of the first are popped in the third and the fifth."""
    near, far = (popping(name, take=Weighted()) for name in ("near", "far"))
    layers: list[nn.Module] = [nn.Linear(4, 4), stashing("near", "far", make=lambda x: x * 3)]
    layers += [nn.Linear(4, 4), nn.Tanh(), near, nn.Linear(4, 4)]
    layers += [nn.Tanh(), nn.Linear(4, 4), far, nn.Dropout()]
    return nn.Sequential(*layers)


def by_call(pipe: Pipe, x: Tensor) -> Tensor:
    loss: Tensor = pipe(x).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def by_step(pipe: Pipe, x: Tensor) -> Tensor:
    loss: Tensor = pipe.forward_backward(
        x, loss_fn=lambda y, _: y.square().sum(), reduction="sum"
    )
    return loss


@pytest.mark.pairwise
@pytest.mark.parametrize("devices", PLACES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("components", EVERY, ids=str)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("train", [by_call, by_step])
def test_results_are_the_same_without_each_part(
    train: Train, checkpoint: str, components: Components, devices: list[str]
) -> None:
    results = []
    x, state = torch.randn(6, 4), model().state_dict()
    for chosen in (Components(), components):
        module = model()
        module.load_state_dict(state)
        torch.manual_seed(1)
        with Pipe(module, [2] * 5, devices=devices, chunks=3, checkpoint=checkpoint) as pipe:
            leaf = x.clone().to(devices[0]).requires_grad_()
            with only(pipe, chosen):
                loss = train(pipe, leaf)
        grads = [leaf.grad, *[p.grad for p in module.parameters()]]
        results.append([loss.cpu(), *[grad.cpu() for grad in grads if grad is not None]])
    assert len(results[0]) == 2 + len(state)
    torch.testing.assert_close(results[0], results[1])


def test_direct_skips_touch_no_partition_in_between() -> None:
    with Pipe(model(), [2] * 5, devices=["cpu"] * 5) as pipe:
        near, far = (None, "near"), (None, "far")
        assert [*map(keys_of, pipe.partitions)] == [(far, near), (), (near,), (), (far,)]
        assert through_all_between(pipe.partitions) == (*[(far, near)] * 3, (far,), (far,))
