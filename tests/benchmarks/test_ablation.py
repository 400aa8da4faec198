"""Tests that results are the same without each part of the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _ablation import Components, ComputeStreams, only, through_all_between
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd import streams
from pipert.skip import pop, skippable, stash
from pipert.skip.routes import routes
from pipert.skip.store import ABSENT
from pipert.stage.assembly import Layered

EVERY = [Components(*on) for on in itertools.product([True, False], repeat=3)]
PLACES = [
    ["cpu"] * 5,
    pytest.param([f"cuda:{k % 2}" for k in range(5)], marks=[pytest.mark.multi_gpu]),
]

Train = Callable[[Pipe, Tensor], Tensor]


@skippable(stash={"skip": 2})
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * 3)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip * self.weight


def model() -> nn.Sequential:
    """Makes partitions of two layers; a skip of the first is popped in the third and the fifth."""
    layers = [nn.Linear(4, 4), Stash(), nn.Linear(4, 4), nn.Tanh(), Pop(), nn.Linear(4, 4)]
    layers += [nn.Tanh(), nn.Linear(4, 4), Pop(), nn.Dropout()]
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


def test_the_pipe_is_restored_afterwards() -> None:
    with Pipe(model(), [2] * 5, devices=["cpu"] * 5) as pipe:
        runtime = pipe._runtime
        before = runtime._streams, runtime.model
        with only(pipe, Components(False, False, False)):
            assert type(runtime._streams) is ComputeStreams
            assert isinstance(runtime.model, Layered) and runtime.model.skips[1].leaving
        assert (runtime._streams, runtime.model) == before
        y = pipe(torch.ones(1, 4))
    assert isinstance(y, Tensor)


def test_direct_skips_touch_no_partition_in_between() -> None:
    with Pipe(model(), [2] * 5, devices=["cpu"] * 5) as pipe:
        skips = routes(pipe.partitions)
    assert [(s.arriving, s.leaving) for s in skips] == [
        ((), (((None, "skip"), 2), ((None, "skip"), 4))),
        ((), ()),
        ((((None, "skip"), 0),), ()),
        ((), ()),
        ((((None, "skip"), 0),), ()),
    ]


def test_other_skips_go_through_every_partition_as_far_as_the_last_that_pops() -> None:
    key = (None, "skip")
    with Pipe(nn.Sequential(*model(), nn.Tanh()), [2, 2, 2, 2, 2, 1], devices=["cpu"] * 6) as pipe:
        skips = through_all_between(pipe.partitions)
    assert [[k for _, k in s.arriving] for s in skips] == [[], [0], [1], [2], [3], []]
    assert [[k for _, k in s.leaving] for s in skips] == [[1], [2], [3], [4], [], []]
    assert [s.pops.get(key) for s in skips] == [0, 0, 1, 0, 1, None]


def test_a_skip_that_was_not_stashed_is_not_there_after_any_number_of_partitions() -> None:
    with Pipe(model(), [2] * 5, devices=["cpu"] * 5) as pipe:
        between = through_all_between(pipe.partitions)[1]
    store = between.store([ABSENT])
    assert store.send((None, "skip")) is ABSENT


@pytest.mark.parametrize("fork_join", [True, False])
def test_the_graph_has_no_order_without_fork_and_join(fork_join: bool) -> None:
    with Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"], chunks=2) as pipe:
        with only(pipe, Components(fork_join=fork_join)):
            y = pipe(torch.ones(2, 2))
    assert ("_ForkBackward" in nodes_behind(y)) == fork_join


def nodes_behind(y: Tensor) -> set[str]:
    names, left = set[str](), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [child for child, _ in node.next_functions]
    return names


@pytest.mark.multi_gpu
@pytest.mark.parametrize("copy_streams", [True, False])
@pytest.mark.parametrize("train", [by_call, by_step])
def test_copies_run_on_the_compute_streams_without_copy_streams(
    train: Train, copy_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: set[bool] = set()
    copy = streams.copy

    def watched(tensors: Any, device: torch.device, source: Any, target: Any, *reader: Any) -> Any:
        there, here = (streams.compute_stream(of) for of in (tensors[0].device, device))
        on.add(there == source and here == target)
        return copy(tensors, device, source, target, *reader)

    monkeypatch.setattr(streams, "copy", watched)
    with Pipe(model(), [5, 5], devices=["cuda:0", "cuda:1"], chunks=3) as pipe:
        with only(pipe, Components(copy_streams=copy_streams)):
            train(pipe, torch.randn(6, 4, device="cuda:0"))
    assert on == {not copy_streams}
