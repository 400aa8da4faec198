"""Steps of workers that have several partitions each: equal to the plain module, and in turns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Skippable, pop, skippable, stash
from tests.helpers.skip_layers import declaring
from tests.helpers.ways import MODES, batch, grads_of, linear, mean, same
from tests.layers import Apply

PATIENCE = 10.0  # s
TWO_EACH = ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]


@skippable(stash=["far", "near"])
class Stash(Skippable):
    def __init__(self) -> None:
        super().__init__()
        self.through, self.aside = linear(3, 3), linear(3, 3)

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("near", self.aside(x).tanh())
        yield stash("far", self.aside(x).sigmoid())
        return self.through(x)


class Pop(Skippable):
    def __init__(self) -> None:
        super().__init__()
        self.aside = linear(3, 3)

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        for name in sorted(self.skip_pops):
            x = x * (yield pop(name)) + self.aside(x)
        return x


def with_skips() -> nn.Sequential:
    """To the other worker, and to another partition of the same one."""
    near, far = declaring(Pop, pop=["near"]), declaring(Pop, pop=["far"])
    return nn.Sequential(Stash(), near(), far(), linear(3, 3))


def tied() -> nn.Sequential:
    """Partitions 0 and 3, of different workers, and 2, of the worker of 0, share a weight."""
    module = nn.Sequential(*[linear(3, 3) for _ in range(4)])
    module[3].weight = module[2].weight = module[0].weight
    return module


def plain_layers() -> nn.Sequential:
    return nn.Sequential(linear(3, 5), nn.Tanh(), linear(5, 4), linear(4, 3))


MODELS = {"layers": plain_layers, "skips": with_skips, "tied": tied}
models = pytest.mark.parametrize("model", MODELS)


def pipe_of(module: nn.Sequential, chunks: int = 4, checkpoint: str | None = "never") -> Pipe:
    return Pipe(module, [1] * 4, devices=TWO_EACH, chunks=chunks, checkpoint=checkpoint)


@models
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("m", [1, 4, 5])
def test_a_step_is_that_of_the_plain_module(model: str, checkpoint: str, m: int) -> None:
    module = MODELS[model]()
    plain, x = copy.deepcopy(module), batch(7)
    with pipe_of(module, m, checkpoint) as pipe:
        loss = pipe.forward_backward(x, loss_fn=mean, schedule="interleaved")
    expected = mean(plain(x), None)
    expected.backward()
    same(loss, expected.detach())
    same(grads_of(module), grads_of(plain))


@models
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_call_on_the_same_devices_is_that_of_the_plain_module(
    model: str, checkpoint: str
) -> None:
    module = MODELS[model]()
    plain, x = copy.deepcopy(module), batch(7)
    with pipe_of(module, 4, checkpoint) as pipe:
        y = pipe(x)
        mean(y, None).backward()
    expected = plain(x)
    mean(expected, None).backward()
    same(y, expected)
    same(grads_of(module), grads_of(plain))


def test_steps_recompute_only_on_request() -> None:
    with pipe_of(plain_layers(), checkpoint=None) as pipe:
        pipe.forward_backward(batch(4), loss_fn=mean, schedule="interleaved")
        assert pipe.statistics().recomputations == 0
        pipe.checkpoint = "always"
        pipe.forward_backward(batch(4), loss_fn=mean, schedule="interleaved")
        assert pipe.statistics().recomputations == 16


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("on its way back")


def test_an_error_says_where_and_the_next_step_is_right() -> None:
    state: dict[str, Any] = {"apply": lambda x: x * 1}
    module = nn.Sequential(
        linear(3, 3), linear(3, 3), Apply(lambda x: state["apply"](x)), linear(3, 3)
    )
    with pipe_of(module, chunks=2) as pipe:
        for apply, error, place in (
            (lambda x: 1 // 0, ZeroDivisionError, "in forward F[0,2]: partition 2 on cpu"),
            (Refuses.apply, ArithmeticError, "in backward B[0,2]: partition 2 on cpu"),
        ):
            state["apply"] = apply
            with pytest.raises(error) as caught:
                pipe.forward_backward(batch(4), loss_fn=mean, schedule="interleaved")
            assert place in "".join(caught.value.__notes__)
            assert all(grad is None for grad in grads_of(module).values())
        state["apply"] = lambda x: x * 1
        plain, x = copy.deepcopy(nn.Sequential(*pipe)), batch(4)
        pipe.forward_backward(x, loss_fn=mean, schedule="interleaved")
    mean(plain(x), None).backward()
    same(grads_of(module), grads_of(plain))


# Which thread serves which partition.


def thread_names(pipe: Pipe) -> list[str]:
    """The thread of each partition, whose layers note it."""
    found: list[str] = []
    for layer in pipe:
        layer.register_forward_hook(lambda *_: found.append(threading.current_thread().name))
    with torch.no_grad():
        pipe(batch(1))
    return found


EXPECTED = ["pipert-cpu-0", "pipert-cpu-1"] * 2


def test_a_logical_device_is_one_thread_and_torchs_cpu() -> None:
    with pipe_of(plain_layers()) as pipe:
        assert pipe.devices == [torch.device("cpu")] * 4
        assert thread_names(pipe) == EXPECTED
        assert [worker.name for worker in pipe.statistics().workers] == EXPECTED[:2]


def test_a_recording_has_a_lane_for_each_logical_device() -> None:
    with pipe_of(plain_layers()) as pipe:
        with pipe.record() as timeline:
            pipe.forward_backward(batch(4), loss_fn=mean, schedule="interleaved")
    assert timeline.lanes == ("cpu 0", "cpu 1")
    of_lane = {(event.partition, timeline.lane(event)) for event in timeline.events}
    assert of_lane == {(0, 0), (1, 1), (2, 0), (3, 1)}
    assert "cpu 1" in str(timeline.report())


# At the same time: a barrier breaks if one thread does all the work, or the order is another.


def test_a_worker_begins_its_second_partition_while_the_other_is_in_its_first() -> None:
    """``F[0,2]`` and ``F[1,1]``: with 1F1B in blocks of two layers there is no such pair."""
    together = threading.Barrier(2)
    threads: set[str] = set()

    def meet(j: int) -> Apply:
        count = iter(range(4))

        def apply(x: Tensor) -> Tensor:
            if (next(count), j) in ((0, 2), (1, 1)):
                threads.add(threading.current_thread().name)
                together.wait(PATIENCE)
            return x

        return Apply(apply)

    module = nn.Sequential(linear(3, 3), meet(1), meet(2), linear(3, 3))
    with pipe_of(module) as pipe:
        pipe.forward_backward(batch(4), loss_fn=mean, schedule="interleaved")
    assert threads == {"pipert-cpu-0", "pipert-cpu-1"}


def test_each_worker_does_its_actions_in_the_order_of_the_plan() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(j: int) -> Apply:
        count = iter(range(8))

        def apply(x: Tensor) -> Tensor:
            seen.setdefault(threading.current_thread().name, []).append((next(count), j))
            return x * 1

        return Apply(apply)

    module = nn.Sequential(*[nn.Sequential(linear(3, 3), note(j)) for j in range(4)])
    with pipe_of(module) as pipe:
        pipe.forward_backward(batch(4), loss_fn=mean, schedule="interleaved")
    order = [(0, 0), (1, 0), (0, 2), (1, 2), (2, 0), (3, 0), (2, 2), (3, 2)]
    assert seen["pipert-cpu-0"] == order
    assert seen["pipert-cpu-1"] == [(i, j + 1) for i, j in order]
