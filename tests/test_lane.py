"""One lane: what F[i,j] sends, when it does not run, and which autograd nodes it leaves behind.

Lanes are driven by hand here, on the thread of the test. A lane between devices is seen on the
``meta`` device, which tensors really are copied to, with streams that only note what they are told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import groupby
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipert.autograd.streams import CopyStreams
from pipert.queues.closable import ClosableQueue
from pipert.schedules.clock_cycle import Forward
from pipert.skip import pop, skippable, stash
from pipert.skip.routes import routes
from pipert.stage.outcome import NOT_RUN
from pipert.workers.activity import Activity, Seat
from pipert.workers.turn import Turn
from tests.lanes import CPU, META, Driven, FakeStream, FakeStreams, run_between_devices
from tests.layers import Apply

TIMEOUT = 3.0  # s


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
    run.lane([nn.Identity()], queue).forward(0, run.seat)
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
    seat = Seat(Spy(threading.Lock()), Activity())
    thread = threading.Thread(target=lane.forward, args=(0, seat), daemon=True)
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
    run.lane([Apply(never)], [NOT_RUN]).forward(0, run.seat)
    assert run.sent == [NOT_RUN] and run.progress.take_error() is None


def test_a_task_after_the_failed_one_does_not_run() -> None:
    run = Driven(m=2)
    lane = run.lane([Apply(never)], [1, 1])
    run.progress.fail(run.schedule.position(0, 0), ValueError())
    lane.forward(1, run.seat)
    assert run.sent == [NOT_RUN]


def test_a_task_after_the_failed_one_does_not_wait_for_its_input() -> None:
    run = Driven(m=2)
    lane = run.lane([Apply(never)], ClosableQueue())
    run.progress.fail(run.schedule.position(0, 0), ValueError())
    lane.forward(1, run.seat)
    assert run.sent == [NOT_RUN]


def test_a_task_that_comes_to_be_after_the_failed_one_while_it_waits_does_not_run() -> None:
    run = Driven(m=2)

    class Fails(list[Any]):
        """An input that takes its time, in which another task fails."""

        def __getitem__(self, i: Any) -> Any:
            run.progress.fail(run.schedule.position(0, 0), ValueError())
            return super().__getitem__(i)

    run.lane([Apply(never)], Fails([1, 1])).forward(1, run.seat)
    assert run.sent == [NOT_RUN]


def test_a_task_before_the_failed_one_runs() -> None:
    run = Driven(m=2)
    lane = run.lane([nn.Identity()], [1, 1])
    run.progress.fail(run.schedule.position(1, 0), ValueError())
    lane.forward(0, run.seat)
    assert run.sent == [1]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_task_that_fails_raises_nothing_and_says_so(kind: type[BaseException]) -> None:
    error = kind()

    def fail(x: Any) -> Any:
        raise error

    run = Driven()
    run.lane([Apply(fail)], [1]).forward(0, run.seat)
    assert run.progress.take_error() is error


def test_a_task_that_fails_sends_that_there_is_no_output() -> None:
    run = Driven()
    run.lane([Apply(never)], [1]).forward(0, run.seat)
    assert run.sent == [NOT_RUN]


def test_a_task_that_is_abandoned_fails_and_sends_that_there_is_no_output() -> None:
    run = Driven()
    error = ValueError()
    run.lane([Apply(never)], [1]).abandon(Forward(0, 0), error)
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
    run.lane([scale()], inputs_of(1), 0, between.append).forward(0, run.seat)
    run.lane([scale()], between, 1).forward(0, run.seat)
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


@pytest.fixture(scope="module")
def meta() -> None:
    """The first operation on the meta device imports a lot; let no test pay for that."""
    x = torch.ones(2, device=META, requires_grad=True)
    torch.autograd.backward((torch.zeros_like(x, device=META) * x).clone().sum())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, meta: None) -> FakeStreams:
    return FakeStreams(monkeypatch)


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
        "<compute meta> waits for <copy meta 0>",  # at the end, in the caller
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
        "<compute meta> waits for <copy meta 0>",  # at the end, in the caller
    ]


def test_the_arguments_of_a_call_are_copied_after_what_computes_them(fake: FakeStreams) -> None:
    run = Driven(devices=[META])
    run.run.streams = cast(CopyStreams, fake)
    run.lane([fake.layer(0, META)], [torch.ones(2)]).forward(0, run.seat)
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
    run.lane([nn.Identity()], [x], 0, between.append).forward(0, run.seat)
    run.lane([nn.Identity()], between, 1).forward(0, run.seat)
    assert fake.log == [] and run.sent[0] is x


def test_what_a_layer_keeps_elsewhere_on_purpose_stays_there(fake: FakeStreams) -> None:
    run = Driven(devices=[META, CPU, CPU])
    run.run.streams = cast(CopyStreams, fake)
    lengths = torch.ones(2, dtype=torch.long)
    value = (torch.ones(2, device=META), lengths)
    run.lane([nn.Identity()], [value], 1).forward(0, run.seat)
    assert run.sent[0][0].device == CPU and run.sent[0][1] is lengths


def test_all_tensors_of_a_value_are_copied_at_once(fake: FakeStreams) -> None:
    run = Driven(devices=[CPU, META])
    run.run.streams = cast(CopyStreams, fake)
    value = {"a": torch.ones(2), "b": (torch.ones(3), "text")}
    run.lane([nn.Identity()], [value], 1).forward(0, run.seat)
    y = run.sent[0]
    assert (y["a"].device, y["b"][0].device, y["b"][1]) == (META, META, "text")
    assert fake.log.count("copy from <copy cpu 0> to <copy meta 0>") == 1


def test_each_micro_batch_is_copied_on_streams_of_its_own(fake: FakeStreams) -> None:
    run = Driven(m=2, devices=[CPU, META])
    run.run.streams = cast(CopyStreams, fake)
    lane = run.lane([nn.Identity()], [torch.ones(2), torch.ones(2)], 1)
    lane.forward(0, run.seat)
    lane.forward(1, run.seat)
    assert [line for line in fake.log if line.startswith("copy from")] == [
        "copy from <copy cpu 0> to <copy meta 0>",
        "copy from <copy cpu 1> to <copy meta 1>",
    ]


def test_the_repr_says_which_partition_of_which_run_it_is() -> None:
    assert repr(Driven(m=3).lane([], [])) == "<Lane 0 on cpu of <Progress of m=3 n=1, running>>"


# Skips --------------------------------------------------------------------------------------------

NAMES = {2: "x", 6: "skip"}  # what a tensor is, by its length


class NamingStreams(FakeStreams):
    """Notes for each copy what is copied."""

    def copy(
        self,
        tensors: tuple[Tensor, ...],
        device: torch.device,
        source: FakeStream,
        target: FakeStream,
        reader: object = None,
    ) -> tuple[Tensor, ...]:
        copied = super().copy(tensors, device, source, target, reader)
        self.log[-1] += f": {', '.join(NAMES[len(tensor)] for tensor in tensors)}"
        return copied

    def lines(self) -> list[str]:
        """The log. Each value waits, at once; what is said again is left out."""
        return [line for line, _ in groupby(self.log)]

    def copies(self) -> list[str]:
        return [line.removeprefix("copy ") for line in self.log if line.startswith("copy from")]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """``layer``; stashes a longer tensor that it makes of its output, or a constant."""

    def __init__(self, layer: nn.Module, requires_grad: bool = True) -> None:
        super().__init__()
        self.layer = layer
        self.requires_grad = requires_grad

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        y = self.layer(x)
        yield stash("skip", y.repeat(3) if self.requires_grad else y.detach().repeat(3))
        return y


@skippable(pop=["skip"])
class Pop(nn.Module):
    """``layer``, of its input and the skip."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return self.layer(x + skip[:2])


@pytest.fixture
def naming(monkeypatch: pytest.MonkeyPatch, meta: None) -> NamingStreams:
    return NamingStreams(monkeypatch)


class Lanes:
    """All lanes of a run, with a skip from the first partition to the last."""

    def __init__(
        self,
        fake: NamingStreams,
        devices: Sequence[torch.device],
        checkpointed: int = 0,
        requires_grad: bool = True,
        pops: Iterable[int] = (),
    ) -> None:
        layers = [fake.layer(j, device) for j, device in enumerate(devices)]
        poppers = {*pops, len(devices) - 1}
        stashing = skippable(stash={"skip": len(poppers)})(Stash)
        layers[0] = stashing(layers[0], requires_grad)
        for j in poppers:
            layers[j] = Pop(layers[j])
        self.driven = run = Driven(devices=devices, checkpointed=checkpointed)
        run.run.streams = cast(CopyStreams, fake)
        self.sent: list[list[Any]] = [[torch.ones(2)]]
        skips = routes([nn.Sequential(layer) for layer in layers])
        self.lanes = []
        for j, layer in enumerate(layers):
            self.sent.append([])
            lane = run.lane([layer], self.sent[j], j, self.sent[j + 1].append, skips[j])
            self.lanes.append(lane)

    def forward(self) -> Tensor:
        for lane in self.lanes:
            lane.forward(0, self.driven.seat)
        error = self.driven.progress.take_error()
        if error is not None:
            raise error
        y: Tensor = self.sent[-1][0]
        return y


both = pytest.mark.parametrize("checkpointed", [0, 1])

THERE, BACK = "from <copy cpu 0> to <copy meta 0>", "from <copy meta 0> to <copy cpu 0>"


@both
def test_a_skip_is_copied_before_x_and_waited_for_with_it(
    naming: NamingStreams, checkpointed: int
) -> None:
    Lanes(naming, [CPU, CPU, META], checkpointed).forward()
    assert naming.lines() == [
        "F[0,0]",
        "<copy cpu 0> waits for <compute cpu>",
        "F[0,1]",
        "<copy cpu 0> waits for <compute cpu>",
        f"copy {THERE}: skip",
        f"copy {THERE}: x",
        "<compute meta> waits for <copy meta 0>",
        "F[0,2]",
    ]


def test_a_skip_without_grad_is_copied_and_waited_for_in_the_same_order(
    naming: NamingStreams,
) -> None:
    with torch.no_grad():
        Lanes(naming, [CPU, CPU, META]).forward()
    assert naming.lines()[3:] == [
        "<copy cpu 0> waits for <compute cpu>",
        f"copy {THERE}: skip",
        f"copy {THERE}: x",
        "<compute meta> waits for <copy meta 0>",
        "F[0,2]",
    ]


def test_a_skip_that_does_not_require_grad_is_copied_before_x_too(naming: NamingStreams) -> None:
    y = Lanes(naming, [CPU, CPU, META], requires_grad=False).forward()
    assert naming.copies() == [f"{THERE}: skip", f"{THERE}: x"]
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.copies() == [f"{BACK}: x"]


# Where a skip goes from the first partition to the last: devices, copies there and back.
WAYS: list[tuple[list[torch.device], list[str], list[str]]] = [
    ([CPU, CPU, CPU], [], []),
    ([CPU, META], [f"{THERE}: skip", f"{THERE}: x"], [f"{BACK}: x", f"{BACK}: skip"]),
    ([CPU, META, CPU], [f"{THERE}: x", f"{BACK}: x"], [f"{THERE}: x", f"{BACK}: x"]),
    (
        [CPU, META, META],
        [f"{THERE}: x", f"{THERE}: skip"],
        [f"{BACK}: skip", f"{BACK}: x"],
    ),
    (
        [CPU, META, META, CPU, META],
        [f"{THERE}: x", f"{BACK}: x", f"{THERE}: skip", f"{THERE}: x"],
        [f"{BACK}: x", f"{BACK}: skip", f"{THERE}: x", f"{BACK}: x"],
    ),
]


@both
@pytest.mark.parametrize(("devices", "there", "back"), WAYS, ids=lambda way: str(len(way)))
def test_a_skip_is_copied_once_and_its_gradient_once(
    naming: NamingStreams,
    devices: list[torch.device],
    there: list[str],
    back: list[str],
    checkpointed: int,
) -> None:
    y = Lanes(naming, devices, checkpointed).forward()
    forward = naming.copies()
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert (forward, naming.copies()) == (there, back)


def test_the_gradient_of_a_skip_goes_straight_back(naming: NamingStreams) -> None:
    """While B[0,1] runs it is there already; B[0,0] waits for both gradients."""
    y = Lanes(naming, [CPU, META, META]).forward()
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.lines() == [
        "B[0,2]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: skip",
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: x",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
        "<compute meta> waits for <copy meta 0>",  # at the end, in the caller
    ]


def test_the_partition_that_stashed_recomputes_while_the_gradients_are_being_copied(
    naming: NamingStreams,
) -> None:
    y = Lanes(naming, [CPU, META, META], checkpointed=1).forward()
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.lines() == [
        "R[0,2]",
        "B[0,2]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: skip",
        "R[0,1]",
        "B[0,1]",
        "<copy meta 0> waits for <compute meta>",
        f"copy {BACK}: x",
        "R[0,0]",
        "<compute cpu> waits for <copy cpu 0>",
        "B[0,0]",
        "<compute meta> waits for <copy meta 0>",  # at the end, in the caller
    ]


@both
def test_a_skip_for_several_partitions_is_copied_to_each(
    naming: NamingStreams, checkpointed: int
) -> None:
    y = Lanes(naming, [CPU, META, CPU, META], checkpointed, pops=[1, 2]).forward()
    assert naming.copies().count(f"{THERE}: skip") == 2
    naming.log.clear()
    torch.autograd.backward(y.sum())
    assert naming.copies().count(f"{BACK}: skip") == 2


class LogKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where tensors as long as a skip are added or cloned: on the compute stream."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("add", "clone") and NAMES[len(args[0])] == "skip":
            self.log.append(f"{name} on <compute {args[0].device}>")
        return func(*args, **kwargs or {})


@both
def test_gradients_of_a_skip_from_several_partitions_are_added_after_they_were_copied(
    naming: NamingStreams, checkpointed: int
) -> None:
    """Autograd adds on the compute stream, and does not know on which they were copied."""
    y = Lanes(naming, [CPU, META, META], checkpointed, pops=[1]).forward()
    naming.log.clear()
    with LogKernels(naming.log):
        torch.autograd.backward(y.sum())
    added = naming.log.index("add on <compute cpu>")
    assert naming.log.index("<compute cpu> waits for <copy cpu 0>") < added


def test_in_inference_mode_what_is_copied_is_not_computed_on_the_way(
    naming: NamingStreams,
) -> None:
    """The copy stream has waited for the layers; a clone made since would be read too early."""
    with torch.inference_mode(), LogKernels(naming.log):
        Lanes(naming, [CPU, META, META], pops=[1]).forward()
    waited = naming.log.index("<copy cpu 0> waits for <compute cpu>")
    assert [line for line in naming.log[waited:] if line.endswith("on <compute cpu>")] == []


def test_each_micro_batch_s_skip_is_copied_on_streams_of_its_own(naming: NamingStreams) -> None:
    run = Driven(m=2, devices=[CPU, META])
    run.run.streams = cast(CopyStreams, naming)
    partitions = [nn.Sequential(Stash(nn.Identity())), nn.Sequential(Pop(nn.Identity()))]
    first, last = routes(partitions)
    between: list[Any] = []
    lanes = [
        run.lane(partitions[0], inputs_of(2), 0, between.append, first),
        run.lane(partitions[1], between, 1, None, last),
    ]
    for lane in lanes:
        for i in range(2):
            lane.forward(i, run.seat)
    assert run.progress.take_error() is None
    assert [line for line in naming.copies() if line.endswith("skip")] == [
        f"from <copy cpu {i}> to <copy meta {i}>: skip" for i in range(2)
    ]


def test_partitions_in_between_get_and_send_x_alone(naming: NamingStreams) -> None:
    lanes = Lanes(naming, [CPU, META, CPU])
    sent: list[Any] = []

    def tee(values: list[Any]) -> Callable[[Any], None]:
        return lambda y: sent.append(y) or values.append(y)

    for lane, values in zip(lanes.lanes, lanes.sent[1:], strict=True):
        lane._send = tee(values)
    lanes.forward()
    assert [NAMES[len(y)] for y in sent] == ["x", "x", "x"]


def test_a_skip_is_posted_when_the_output_is_sent(naming: NamingStreams) -> None:
    lanes = Lanes(naming, [CPU, CPU, CPU])
    posted: list[str] = []

    def send(y: Any) -> None:
        posted.append(repr(lanes.driven.run.mail))
        lanes.sent[1].append(y)

    lanes.lanes[0]._send = send
    lanes.forward()
    assert posted == ["<Mail of 1 skips>"]


@both
def test_when_a_run_is_over_and_gone_back_no_skip_is_in_the_mail(
    naming: NamingStreams, checkpointed: int
) -> None:
    lanes = Lanes(naming, [CPU, META, CPU, META], checkpointed, pops=[2])
    torch.autograd.backward(lanes.forward().sum())  # a recomputation posts nothing
    assert repr(lanes.driven.run.mail) == "<Mail of 0 skips>"


def test_the_skip_of_a_task_that_fails_is_not_posted() -> None:
    run = Driven(devices=[CPU, CPU])
    partitions = [nn.Sequential(Stash(nn.Identity()), Apply(never)), nn.Sequential(Pop(Apply(int)))]
    run.lane(partitions[0], inputs_of(1), 0, None, routes(partitions)[0]).forward(0, run.seat)
    assert repr(run.run.mail) == "<Mail of 0 skips>" and run.sent == [NOT_RUN]


def test_a_skip_is_one_more_value_of_the_recomputation_and_the_fork() -> None:
    """The backward of the stash is over before that of the micro-batch before begins."""
    run = Driven(m=2, devices=[CPU, CPU], checkpointed=2)
    partitions = [nn.Sequential(Stash(scale())), nn.Sequential(Pop(scale()))]
    first, last = routes(partitions)
    between: list[Any] = []
    lane = run.lane(partitions[0], inputs_of(2), 0, between.append, first)
    lane.forward(0, run.seat)
    lane.forward(1, run.seat)
    assert last is not None
    ((key, _),) = last.arriving
    skips = [run.run.mail.fetch(key, i, 1) for i in range(2)]
    assert [chain(skip)[:2] for skip in skips] == [
        ["_Fork", "_Recompute"],
        ["_Recompute", "Mul0"],  # y comes first
    ]
    assert [skip.grad_fn for skip in skips] == [x.grad_fn for x in between]


def popped_in(run: Driven, through: nn.Module) -> list[Tensor]:
    """What the second of two partitions pops, for each micro-batch; it gets x by ``through``."""
    popped: list[Tensor] = []
    m = run.schedule.m

    @skippable(pop=["skip"])
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            popped.append((yield pop("skip")))
            return popped[-1] * 2

    partitions = [nn.Sequential(Stash(scale()), through), nn.Sequential(Keep())]
    between: list[Any] = []
    lanes = [
        run.lane(partitions[0], inputs_of(m), 0, between.append, routes(partitions)[0]),
        run.lane(partitions[1], between, 1, None, routes(partitions)[1]),
    ]
    for lane in lanes:
        for i in range(m):
            lane.forward(i, run.seat)
    assert run.progress.take_error() is None
    return popped


def test_the_gradient_of_a_skip_itself_is_waited_for_before_it_is_copied(
    fake: FakeStreams,
) -> None:
    run = Driven(devices=[CPU, META])
    run.run.streams = cast(CopyStreams, fake)
    (skip,) = popped_in(run, nn.Identity())
    assert chain(skip)[:3] == ["_Wait", "_Copy", "_Wait"]


@pytest.mark.parametrize(
    ("through", "node"), [(nn.Identity(), "Repeat0"), (Apply(torch.argmax), "_Join")]
)
def test_a_skip_takes_the_token_where_x_cannot(through: nn.Module, node: str) -> None:
    first, second = popped_in(Driven(m=2, devices=[CPU, CPU]), through)
    assert (chain(first)[0], chain(second)[0]) == ("_Fork", node)
