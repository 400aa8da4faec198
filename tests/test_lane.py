"""One lane: what F[i,j] sends, when it does not run, and which autograd nodes it leaves behind.

Lanes are driven by hand here, on the thread of the test. A lane between devices is seen on the
``meta`` device, which tensors really are copied to, with streams that only note what they are told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipert import is_recomputing, stream
from pipert.lane import Lane
from pipert.progress import NOT_RUN
from pipert.queues.closable import ClosableQueue
from pipert.run import Run
from pipert.schedule import Schedule
from pipert.skip.routes import PartitionSkips
from pipert.stream import CopyStreams
from pipert.workers.context import CallerContext
from pipert.workers.turn import Turn

TIMEOUT = 3.0  # s

CPU, META = torch.device("cpu"), torch.device("meta")


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Driven:
    """A run of ``m`` micro-batches, whose lanes are made and driven by hand."""

    def __init__(
        self, m: int = 1, devices: Sequence[torch.device] = (CPU,), checkpointed: int = 0
    ) -> None:
        self.schedule = Schedule(m, len(devices))
        self.run = Run(self.schedule, checkpointed, devices, CallerContext(), CopyStreams())
        self.progress = self.run.progress
        self.sent: list[Any] = []
        self.turn = Turn(threading.Lock())

    def lane(
        self,
        layers: Iterable[nn.Module],
        receive: list[Any] | ClosableQueue[Any],
        j: int = 0,
        send: Callable[[Any], None] | None = None,
        skips: PartitionSkips | None = None,
    ) -> Lane:
        return Lane(
            self.run,
            j,
            nn.Sequential(*layers),
            skips,
            None,
            receive,
            self.sent.append if send is None else send,
        )

    def outputs(self, layers: Iterable[nn.Module], inputs: list[Any]) -> list[Any]:
        """What the only lane sends."""
        lane = self.lane(layers, inputs)
        for i in range(self.progress.schedule.m):
            lane.forward(i, self.turn)
        assert self.progress.take_error() is None
        return self.sent


def chain(y: Tensor) -> list[str]:
    """The nodes from ``y`` down to the first one that is not pipert's, along the first edges."""
    names: list[str] = []
    node = y.grad_fn
    while node is not None:
        names.append(node.name().replace("Backward", ""))
        if not names[-1].startswith("_"):
            break
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return names


def all_nodes(y: Tensor) -> set[str]:
    seen, names = set(), set()
    nodes = [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().replace("Backward", ""))
            nodes += [child for child, _ in node.next_functions]
    return names


# What is sent -------------------------------------------------------------------------------------


def test_the_output_of_the_layers_is_sent() -> None:
    (y,) = Driven().outputs([Apply(torch.neg), Apply(torch.exp)], [torch.ones(2)])
    assert torch.equal(y, torch.exp(-torch.ones(2)))


@pytest.mark.parametrize("value", [None, 3, "three", [1, {"a": None}], ()], ids=repr)
def test_a_value_without_tensors_is_sent_as_it_is(value: Any) -> None:
    assert Driven().outputs([nn.Identity()], [value]) == [value]


def test_an_input_is_let_go_when_its_task_begins() -> None:
    inputs: list[Any] = [torch.ones(1), torch.ones(1)]
    there: list[bool] = []

    def look(x: Tensor) -> Tensor:
        there.extend(value is not None for value in inputs)
        return x

    Driven(m=2).outputs([Apply(look)], inputs)
    assert there == [False, True, False, False]


def test_an_input_may_come_from_a_queue() -> None:
    run = Driven()
    queue: ClosableQueue[Any] = ClosableQueue()
    queue.put(7)
    run.lane([nn.Identity()], queue).forward(0, run.turn)
    assert run.sent == [7]


def test_the_turn_is_given_up_while_the_input_is_not_there() -> None:
    waiting = threading.Event()

    class Spy(Turn):
        def give_up(self) -> None:
            super().give_up()
            waiting.set()

    run = Driven()
    queue: ClosableQueue[Any] = ClosableQueue()
    lane = run.lane([nn.Identity()], queue)
    thread = threading.Thread(target=lane.forward, args=(0, Spy(threading.Lock())), daemon=True)
    thread.start()
    assert waiting.wait(TIMEOUT) and not run.sent
    queue.put(7)
    thread.join(TIMEOUT)
    assert run.sent == [7]


# When a task does not run -------------------------------------------------------------------------


def never(x: Any) -> Any:
    raise AssertionError("this layer must not run")


def test_a_task_without_an_input_does_not_run() -> None:
    run = Driven()
    run.lane([Apply(never)], [NOT_RUN]).forward(0, run.turn)
    assert run.sent == [NOT_RUN] and run.progress.take_error() is None


def test_a_task_after_the_failed_one_does_not_run() -> None:
    run = Driven(m=2)
    lane = run.lane([Apply(never)], [1, 1])
    run.progress.fail(run.progress.schedule.position(0, 0), ValueError())
    lane.forward(1, run.turn)
    assert run.sent == [NOT_RUN]


def test_a_task_after_the_failed_one_does_not_wait_for_its_input() -> None:
    run = Driven(m=2)
    lane = run.lane([Apply(never)], ClosableQueue())
    run.progress.fail(run.progress.schedule.position(0, 0), ValueError())
    lane.forward(1, run.turn)
    assert run.sent == [NOT_RUN]


def test_a_task_that_comes_to_be_after_the_failed_one_while_it_waits_does_not_run() -> None:
    run = Driven(m=2)

    class Fails(list[Any]):
        """An input that takes its time, in which another task fails."""

        def __getitem__(self, i: Any) -> Any:
            run.progress.fail(run.progress.schedule.position(0, 0), ValueError())
            return super().__getitem__(i)

    run.lane([Apply(never)], Fails([1, 1])).forward(1, run.turn)
    assert run.sent == [NOT_RUN]


def test_a_task_before_the_failed_one_runs() -> None:
    run = Driven(m=2)
    lane = run.lane([nn.Identity()], [1, 1])
    run.progress.fail(run.progress.schedule.position(1, 0), ValueError())
    lane.forward(0, run.turn)
    assert run.sent == [1]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_task_that_fails_raises_nothing_and_says_so(kind: type[BaseException]) -> None:
    error = kind()

    def fail(x: Any) -> Any:
        raise error

    run = Driven()
    run.lane([Apply(fail)], [1]).forward(0, run.turn)
    assert run.progress.take_error() is error


def test_a_task_that_fails_sends_that_there_is_no_output() -> None:
    run = Driven()
    run.lane([Apply(never)], [1]).forward(0, run.turn)
    assert run.sent == [NOT_RUN]


def test_a_task_that_is_abandoned_fails_and_sends_that_there_is_no_output() -> None:
    run = Driven()
    error = ValueError()
    run.lane([Apply(never)], [1]).abandon(0, error)
    assert run.sent == [NOT_RUN] and run.progress.take_error() is error


# The graph on CPU ---------------------------------------------------------------------------------


def scale() -> nn.Module:
    """Multiplies by a parameter; its node is ``Mul``."""
    layer = Apply(lambda x: x * layer.get_parameter("weight"))
    layer.register_parameter("weight", nn.Parameter(torch.ones(2)))
    return layer


def inputs_of(m: int) -> list[Any]:
    """Inputs that require grad and are no leaves, as those of any but the first partition."""
    return [torch.ones(2, requires_grad=True).exp() for _ in range(m)]


def test_a_single_micro_batch_has_the_plain_graph() -> None:
    (y,) = Driven(m=1).outputs([scale()], inputs_of(1))
    assert chain(y) == ["Mul0"]


def test_the_first_of_several_micro_batches_has_a_fork() -> None:
    y, _, _ = Driven(m=3).outputs([scale()], inputs_of(3))
    assert chain(y) == ["_Fork", "Mul0"] and all_nodes(y) & {"_Join", "_Recompute"} == set()


def test_a_micro_batch_in_the_middle_has_a_fork_and_a_join() -> None:
    _, y, _ = Driven(m=3).outputs([scale()], inputs_of(3))
    assert chain(y) == ["_Fork", "Mul0"] and "_Join" in all_nodes(y)


def test_the_last_micro_batch_has_a_join_alone() -> None:
    _, _, y = Driven(m=3).outputs([scale()], inputs_of(3))
    assert chain(y) == ["Mul0"] and "_Join" in all_nodes(y)


def test_without_a_differentiable_input_the_token_goes_from_fork_to_fork() -> None:
    _, _, y = Driven(m=3).outputs([scale()], [torch.ones(2) for _ in range(3)])
    assert chain(y)[:1] == ["_Fork"] and "_Join" not in all_nodes(y)


def test_a_recomputation_comes_before_the_backward_and_after_the_fork() -> None:
    y, _ = Driven(m=2, checkpointed=2).outputs([scale()], inputs_of(2))
    assert chain(y) == ["_Fork", "_Recompute", "Mul0"]


def test_as_many_micro_batches_as_asked_for_are_checkpointed() -> None:
    outputs = Driven(m=4, checkpointed=3).outputs([scale()], inputs_of(4))
    # The graph of each holds those of the micro-batches before it, by the tokens.
    assert ["_Recompute" in chain(y) for y in outputs] == [True, True, True, False]


def test_there_are_no_copies_and_no_waits_between_cpu_partitions() -> None:
    run = Driven(devices=[CPU, CPU], checkpointed=1)
    between: list[Any] = []
    run.lane([scale()], inputs_of(1), 0, between.append).forward(0, run.turn)
    run.lane([scale()], between, 1).forward(0, run.turn)
    assert all_nodes(run.sent[0]) & {"_Copy", "_Wait"} == set()


def test_without_grad_there_is_no_graph() -> None:
    with torch.no_grad():
        run = Driven(m=2, checkpointed=2)
    outputs = run.outputs([scale()], [torch.ones(2), torch.ones(2)])
    assert [y.requires_grad for y in outputs] == [False, False]


def test_outputs_that_are_not_differentiable_have_no_node() -> None:
    outputs = Driven(m=2, checkpointed=2).outputs([Apply(torch.argmax)], inputs_of(2))
    assert [y.grad_fn for y in outputs] == [None, None]


def test_outputs_may_be_changed_in_place_by_the_next_partition() -> None:
    y, _ = Driven(m=2, checkpointed=2).outputs([scale()], inputs_of(2))
    y.mul_(3).sum().backward()
    assert torch.equal(y, torch.ones(2).exp() * 3)


def test_only_differentiable_outputs_pass_through_the_nodes() -> None:
    def split(x: Tensor) -> dict[str, Any]:
        return {"float": x * 2, "int": torch.ones(1, dtype=torch.long), "none": None}

    y, _ = Driven(m=2).outputs([Apply(split)], inputs_of(2))
    assert chain(y["float"])[0] == "_Fork"
    assert (y["int"].grad_fn, y["none"]) == (None, None)


# Between devices ----------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeStreams:
    """The streams of two devices, and a log of what is asked of them and of the layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(stream, "compute_stream", lambda d: FakeStream(f"compute {d}"))
        monkeypatch.setattr(stream, "wait", self.wait)
        monkeypatch.setattr(stream, "copy", self.copy)

    def get(self, device: torch.device, i: int) -> FakeStream:
        return FakeStream(f"copy {device} {i}")

    def wait(self, waiter: FakeStream | None, awaited: FakeStream | None) -> None:
        if waiter is not None and awaited is not None:
            self.log.append(f"<{waiter.name}> waits for <{awaited.name}>")

    def copy(
        self,
        tensors: tuple[Tensor, ...],
        device: torch.device,
        source: FakeStream,
        target: FakeStream,
        reader: object = None,
    ) -> tuple[Tensor, ...]:
        self.log.append(f"copy from <{source.name}> to <{target.name}>")
        return tuple(torch.zeros_like(tensor, device=device) for tensor in tensors)

    def layer(self, j: int, device: torch.device) -> nn.Module:
        return LoggingLayer(j, device, self.log)


class _LogBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, j: int, log: list[str]) -> Tensor:
        ctx.j, ctx.log = j, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"B[0,{ctx.j}]")
        return grads[0], None, None


class LoggingLayer(nn.Module):
    def __init__(self, j: int, device: torch.device, log: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device=device))
        self.j = j
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"{'R' if is_recomputing() else 'F'}[0,{self.j}]")
        y: Tensor = _LogBackward.apply(  # type: ignore[no-untyped-call]
            x * self.weight, self.j, self.log
        )
        return y


@pytest.fixture(scope="module")
def meta() -> None:
    """The first operation on the meta device imports a lot; let no test pay for that."""
    x = torch.ones(2, device=META, requires_grad=True)
    torch.autograd.backward((torch.zeros_like(x, device=META) * x).clone().sum())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, meta: None) -> FakeStreams:
    return FakeStreams(monkeypatch)


def run_between_devices(fake: FakeStreams, checkpointed: int = 0) -> Tensor:
    """F[0,0] on ``cpu`` and F[0,1] on ``meta``; the output."""
    run = Driven(devices=[CPU, META], checkpointed=checkpointed)
    run.run.streams = cast(CopyStreams, fake)
    between: list[Any] = []
    first = run.lane([fake.layer(0, CPU)], [torch.ones(2)], 0, between.append)
    second = run.lane([fake.layer(1, META)], between, 1)
    first.forward(0, run.turn)
    second.forward(0, run.turn)
    error = run.progress.take_error()
    if error is not None:
        raise error
    y: Tensor = run.sent[0]
    return y


def test_a_forward_copies_after_compute_and_computes_after_the_copy(fake: FakeStreams) -> None:
    run_between_devices(fake)
    assert fake.log == [
        "F[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,1]",
    ]


def test_a_forward_without_grad_copies_and_waits_in_the_same_order(fake: FakeStreams) -> None:
    with torch.no_grad():
        run_between_devices(fake)
    assert fake.log == [
        "F[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,1]",
    ]


def test_a_backward_goes_the_same_way_back(fake: FakeStreams) -> None:
    y = run_between_devices(fake)
    fake.log.clear()
    torch.autograd.backward(y.sum())
    assert fake.log == [
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        "copy from <copy meta 0> to <copy cpu 0>",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
    ]


def test_a_recomputation_runs_while_the_gradient_is_still_being_copied(fake: FakeStreams) -> None:
    y = run_between_devices(fake, checkpointed=1)
    fake.log.clear()
    torch.autograd.backward(y.sum())
    assert fake.log == [
        "R[0,1]",
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        "copy from <copy meta 0> to <copy cpu 0>",
        "R[0,0]",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
    ]


def test_the_arguments_of_a_call_are_copied_after_what_computes_them(fake: FakeStreams) -> None:
    run = Driven(devices=[META])
    run.run.streams = cast(CopyStreams, fake)
    run.lane([fake.layer(0, META)], [torch.ones(2)]).forward(0, run.turn)
    assert fake.log == [
        "<copy cpu 0> waits for <compute cpu>",
        "copy from <copy cpu 0> to <copy meta 0>",
        "<compute meta> waits for <copy meta 0>",
        "F[0,0]",
    ]


def test_nothing_is_copied_that_is_there_already(fake: FakeStreams) -> None:
    run = Driven(devices=[META, META])
    run.run.streams = cast(CopyStreams, fake)
    between: list[Any] = []
    x = torch.ones(2, device=META)
    run.lane([nn.Identity()], [x], 0, between.append).forward(0, run.turn)
    run.lane([nn.Identity()], between, 1).forward(0, run.turn)
    assert fake.log == [] and run.sent[0] is x


def test_what_a_layer_keeps_elsewhere_on_purpose_stays_there(fake: FakeStreams) -> None:
    run = Driven(devices=[META, CPU, CPU])
    run.run.streams = cast(CopyStreams, fake)
    lengths = torch.ones(2, dtype=torch.long)
    value = (torch.ones(2, device=META), lengths)
    run.lane([nn.Identity()], [value], 1).forward(0, run.turn)
    assert run.sent[0][0].device == CPU and run.sent[0][1] is lengths


def test_all_tensors_of_a_value_are_copied_at_once(fake: FakeStreams) -> None:
    run = Driven(devices=[CPU, META])
    run.run.streams = cast(CopyStreams, fake)
    value = {"a": torch.ones(2), "b": (torch.ones(3), "text")}
    run.lane([nn.Identity()], [value], 1).forward(0, run.turn)
    y = run.sent[0]
    assert (y["a"].device, y["b"][0].device, y["b"][1]) == (META, META, "text")
    assert fake.log.count("copy from <copy cpu 0> to <copy meta 0>") == 1


def test_each_micro_batch_is_copied_on_streams_of_its_own(fake: FakeStreams) -> None:
    run = Driven(m=2, devices=[CPU, META])
    run.run.streams = cast(CopyStreams, fake)
    lane = run.lane([nn.Identity()], [torch.ones(2), torch.ones(2)], 1)
    lane.forward(0, run.turn)
    lane.forward(1, run.turn)
    assert [line for line in fake.log if line.startswith("copy from")] == [
        "copy from <copy cpu 0> to <copy meta 0>",
        "copy from <copy cpu 1> to <copy meta 1>",
    ]


def test_the_repr_says_which_partition_of_which_run_it_is() -> None:
    assert repr(Driven(m=3).lane([], [])) == "<Lane 0 on cpu of <Progress of m=3 n=1, running>>"
