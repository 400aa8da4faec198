"""The switches of the ablation: what is computed is the same without each part of the runtime."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd import streams as stream
from pipert.autograd.streams import ComputeStreams
from pipert.skip import pop, skippable, stash
from pipert.skip.routes import routes
from pipert.skip.store import ABSENT
from pipert.stage.components import Components
from tests.lanes import CPU, META, Driven, FakeStreams

EVERY = [Components(*on) for on in itertools.product([True, False], repeat=3)]


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
    """Partitions of two layers: stashed in the first, popped in the third and the fifth."""
    layers = [nn.Linear(4, 4), Stash(), nn.Linear(4, 4), nn.Tanh(), Pop(), nn.Linear(4, 4)]
    layers += [nn.Tanh(), nn.Linear(4, 4), Pop(), nn.Dropout()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("components", EVERY, ids=str)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_what_is_computed_is_the_same_without(components: Components, checkpoint: str) -> None:
    results = []
    x, state = torch.randn(6, 4), model().state_dict()
    for chosen in (Components(), components):
        module = model()
        module.load_state_dict(state)
        torch.manual_seed(1)
        with Pipe(module, [2] * 5, devices=["cpu"] * 5, chunks=3, checkpoint=checkpoint) as pipe:
            pipe._runtime.components = chosen
            leaf = x.clone().requires_grad_()
            y = pipe(leaf)
            y.square().sum().backward()
        grads = [leaf.grad, *[p.grad for p in module.parameters()]]
        results.append([y.detach(), *grads])
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1:], results[1][1:])


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
        skips = routes(pipe.partitions, direct=False)
    assert [[k for _, k in s.arriving] for s in skips] == [[], [0], [1], [2], [3], []]
    assert [[k for _, k in s.leaving] for s in skips] == [[1], [2], [3], [4], [], []]
    assert [s.pops.get(key) for s in skips] == [0, 0, 1, 0, 1, None]


def test_a_skip_that_was_not_stashed_is_not_there_after_any_number_of_partitions() -> None:
    with Pipe(model(), [2] * 5, devices=["cpu"] * 5) as pipe:
        between = routes(pipe.partitions, direct=False)[1]
    store = between.store([ABSENT])
    assert store.send((None, "skip")) is ABSENT


def test_without_fork_and_join_there_is_no_order_in_the_graph() -> None:
    names = []
    for fork_join in (True, False):
        run = Driven(m=2)
        run.run.components = Components(fork_join=fork_join)
        outputs = run.outputs([nn.Linear(2, 2)], [torch.ones(2), torch.ones(2)])
        names.append(outputs[0].grad_fn.name())
    assert names[0] == "_ForkBackward" != names[1]


def test_without_copy_streams_copies_are_on_the_stream_of_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeStreams(monkeypatch)
    run = Driven(devices=[CPU, META])
    run.run.streams = ComputeStreams()
    between: list[Any] = []
    run.lane([fake.layer(0, CPU)], [torch.ones(2)], 0, between.append).forward(0, run.seat)
    run.lane([fake.layer(1, META)], between, 1).forward(0, run.seat)
    assert "copy from <compute cpu> to <compute meta>" in fake.log


def test_the_runtime_chooses_its_streams_by_its_components() -> None:
    with Pipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"]) as pipe:
        assert type(pipe._runtime._streams) is stream.CopyStreams
        pipe._runtime.components = Components(copy_streams=False)
        assert type(pipe._runtime._streams) is ComputeStreams


def test_a_layer_that_is_replaced_leaves_the_components_as_they_are() -> None:
    with Pipe(model(), [2] * 5, devices=["cpu"] * 5) as pipe:
        pipe._runtime.components = Components(direct_skips=False)
        pipe.add_module("0", nn.Linear(4, 4))
        assert [k for _, k in pipe._runtime._skips[1].leaving] == [2]
