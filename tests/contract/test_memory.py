"""Tests what calls and steps keep alive, with the garbage collector off.

Counted is data, not tensor objects: what autograd saves is another object with the same data.
``tests/devices/test_peak_memory.py`` has the bytes of each device.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss

from pipert import Pipe, is_recomputing
from pipert.batch.tensors import alone
from tests.devices.lockstep import in_lockstep
from tests.helpers.activations import Activations, until
from tests.helpers.collection import settle
from tests.helpers.failing_steps import acting
from tests.helpers.skip_layers import popping, stashing
from tests.helpers.ways import MODES, SCHEDULES, Way, each_way, take_step
from tests.layers import Apply

pytestmark = pytest.mark.usefixtures("no_gc_in_module")

modes = pytest.mark.parametrize("checkpoint", MODES)


class Tanh(nn.Module):
    """A layer that saves its result for the backward, and reports it."""

    def __init__(self, seen: Activations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._seen = seen

    def forward(self, x: Tensor) -> Tensor:
        return self._seen.add(torch.tanh(x * self.weight))


class Setting:
    """A pipe of 2 partitions with 3 layers each; 4 micro-batches."""

    def __init__(self, checkpoint: str) -> None:
        self.inside = Activations()  # of a partition: all but what the last layers return
        self.between = Activations()  # partitions 0 and 1
        self.last = Activations()
        inside = self.inside
        seen = [inside, inside, self.between, inside, inside, self.last]
        layers = nn.Sequential(*map(Tanh, seen))
        self.pipe = Pipe(layers, [3, 3], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)

    def left(self) -> int:
        return sum(seen.settled(0) for seen in (self.inside, self.between, self.last))


# When all is over ---------------------------------------------------------------------------------


@each_way
def test_pitfall_29_after_a_step_no_activation_is_left(way: Way) -> None:
    """The mini-batch is not left either."""
    setting = Setting(way.checkpoint)
    batch = Activations()
    with setting.pipe as pipe:
        x, target = (batch.add(torch.randn(8, 3)) for _ in range(2))
        take_step(pipe, way, x, target=target, loss_fn=mse_loss)
        del x, target
        assert setting.left() + batch.settled(0) == 0


# Between forward and backward ---------------------------------------------------------------------


def test_nothing_inside_a_checkpointed_partition_waits_for_the_backward() -> None:
    setting = Setting("always")
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        assert setting.inside.settled(0) == 0
        del y


def test_except_last_keeps_the_inside_of_the_last_micro_batch_alone() -> None:
    setting = Setting("except_last")
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        assert setting.inside.settled(4) == 4
        del y


# During a backward --------------------------------------------------------------------------------


class Watch(nn.Module):
    """In a recomputation: notes how many activations are there at its start."""

    def __init__(self, seen: Activations, counts: list[int]) -> None:
        super().__init__()
        self._seen = seen
        self._counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self._counts.append(self._seen.now())
        return x


def test_a_recomputation_finds_the_activations_of_its_partition_s_previous_one_gone() -> None:
    counts: list[int] = []
    layers: list[nn.Module] = []
    for _ in range(2):
        seen = Activations()
        layers += [Watch(seen, counts), Tanh(seen), Tanh(seen), Tanh(Activations())]
    model = nn.Sequential(*layers)
    with Pipe(model, balance=[4, 4], devices=["cpu"] * 2, chunks=4, checkpoint="always") as pipe:
        pipe(torch.randn(8, 3, requires_grad=True)).sum().backward()
    assert counts == 8 * [0]


def test_a_retained_graph_does_not_keep_recomputed_tensors() -> None:
    setting = Setting("always")
    with setting.pipe as pipe:
        y = pipe(torch.randn(8, 3))
        y.sum().backward(retain_graph=True)
        assert setting.inside.settled(0) == 0
        del y


# During a forward ---------------------------------------------------------------------------------


def test_without_grad_a_micro_batch_is_dropped_where_it_has_passed() -> None:
    """When the last micro-batch reaches the last partition, only outputs are left of the others."""
    seen = Activations()
    counts: list[int] = []

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(seen.now())
            return x + 1

    model = nn.Sequential(Tanh(seen), Tanh(seen), Count())
    with Pipe(model, balance=[2, 1], devices=["cpu"] * 2, chunks=4) as pipe, torch.no_grad():
        pipe(torch.randn(8, 3))
    assert counts[-1] == 1  # its own input


# In a step ----------------------------------------------------------------------------------------

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


class CountedTanh(nn.Module):
    """A layer that saves its result for the backward, and reports it with its micro-batch."""

    def __init__(self, seen: Kept, outputs: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen, self.outputs = seen, outputs

    def forward(self, x: Tensor) -> Tensor:
        number = int(x.detach()[0, 0].item())
        y = torch.tanh(x[:, 1:] * self.weight)
        y = acting(self.seen.add(number, y), self.seen.look)
        self.seen.look()
        y = torch.cat([x[:, :1], y], 1)
        return self.seen.add(number, y) if self.outputs else y


class Kept:
    """The micro-batches of which a partition has activations, and their largest number at once.

    It is looked when a forward or a backward of the partition begins or ends, on its worker: of
    itself, since others may go on at any moment.
    """

    def __init__(self) -> None:
        self._data: list[tuple[int, Any]] = []
        self.most = 0

    def add(self, i: int, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._data.append((i, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
        return tensor

    def now(self) -> int:
        return len({i for i, data in self._data if not data.expired()})

    def look(self) -> None:
        self.most = max(self.most, self.now())


def rows(m: int) -> Tensor:
    """Makes ``m`` micro-batches of two rows, whose first column is the micro-batch's number."""
    numbers = torch.arange(float(m)).repeat_interleave(2).unsqueeze(1)
    return torch.cat([numbers, torch.rand(2 * m, 3)], 1)


def most_kept(
    schedule: str, checkpoint: str, n: int, m: int, outputs: bool = True
) -> list[int]:
    """Returns for each partition the largest number of micro-batches with activations at once.

    ``outputs`` says whether what layers return counts, too.
    """
    kept = [Kept() for _ in range(n)]
    model = nn.Sequential(*[CountedTanh(kept[j // 2], outputs) for j in range(2 * n)])
    with Pipe(model, [2] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            pipe.forward_backward(rows(m), loss_fn=total, reduction="sum", schedule=schedule)
    return [of.most for of in kept]


def total(y: Tensor, target: Any) -> Tensor:
    return y[:, 1:].sum()


@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 1), (3, 8), (4, 3), (4, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_a_partition_keeps_as_many_micro_batches_as_its_schedule_says(
    schedule: str, n: int, m: int
) -> None:
    """As many as partitions are left, or one more for each link behind."""
    left = range(n, 0, -1)
    most = [min(k if schedule == "1f1b" else 2 * k - 1, m) for k in left]
    assert most_kept(schedule, "never", n, m) == most


@schedules
def test_with_checkpointing_a_partition_has_activations_of_one_micro_batch_at_once(
    schedule: str,
) -> None:
    assert most_kept(schedule, "always", 3, 6, outputs=False) == [1, 1, 1]


# When all is over ---------------------------------------------------------------------------------


class StepSetting:
    """A pipe of 3 partitions with a skip past the middle one."""

    def __init__(self, checkpoint: str, **options: Any) -> None:
        self.seen = Activations()
        seen = self.seen  # a layer that knew this would keep the pipe
        first = stashing(make=lambda x: seen.add(x * 2))
        layers = [Tanh(self.seen), first, Tanh(self.seen), popping(), Tanh(self.seen)]
        self.pipe = Pipe(
            nn.Sequential(*layers), [2, 1, 2], devices=["cpu"] * 3, chunks=4,
            checkpoint=checkpoint, **options,
        )  # fmt: skip

    def step(self, schedule: str = "1f1b", x: Tensor | None = None, **options: Any) -> Any:
        x = self.seen.add(torch.rand(8, 3)) if x is None else x
        target = self.seen.add(torch.rand(8, 3))
        return self.pipe.forward_backward(
            x, target=target, loss_fn=mse_loss, schedule=schedule, **options
        )


class Storing(nn.Linear):
    """A layer that keeps a loss of its own, as a mixture of experts does."""

    loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        loss = y.square().mean()
        if not is_recomputing():
            self.loss = loss
        return y


@modes
def test_a_tensor_that_a_layer_keeps_keeps_no_target(checkpoint: str) -> None:
    layers, target = [nn.Linear(3, 3), Storing(3, 3), nn.Linear(3, 3)], torch.rand(8, 3)
    with Pipe(
        nn.Sequential(*layers), [1, 2], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint
    ) as pipe:
        pipe.forward_backward(torch.rand(8, 3), target=target, loss_fn=mse_loss)
        data: Any = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]
        del target
        assert until(data.expired)


@modes
def test_after_a_step_whose_outputs_are_kept_nothing_else_is_left(checkpoint: str) -> None:
    setting = StepSetting(checkpoint)
    with setting.pipe:
        loss, outputs = setting.step(return_outputs=True)
        assert setting.seen.left() == 0
        assert not outputs.requires_grad


@modes
def test_an_idle_worker_keeps_nothing_of_the_step_while_others_are_at_work(
    checkpoint: str,
) -> None:
    """Partition 1 has finished its last micro-batch when partition 0 runs backward with it."""
    seen = Activations()
    counts: list[bool] = []

    def look() -> None:
        counts.append(seen.left() == 0)

    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return acting(x * self.weight, look)

    with Pipe(
        nn.Sequential(Acts(), Tanh(seen), Tanh(seen)), [1, 2], devices=["cpu"] * 2, chunks=1,
        checkpoint=checkpoint,
    ) as pipe:  # fmt: skip
        pipe.forward_backward(torch.rand(2, 3), loss_fn=lambda y, _: y.exp().sum())
    assert counts == [True]


@pytest.mark.slow
@modes
@schedules
def test_a_step_makes_no_cycles(checkpoint: str, schedule: str) -> None:
    setting = StepSetting(checkpoint)
    with setting.pipe:
        setting.step(schedule)
        setting.seen.left()
        gc.collect()
        for _ in range(3):
            setting.step(schedule)
        setting.seen.left()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found = [one for one in gc.garbage if type(one).__module__.startswith("pipert")]
            tensors = [one for one in gc.garbage if isinstance(one, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert found == [] and tensors == []


@pytest.mark.layered  # any model keeps its pipe
def test_the_error_of_a_step_does_not_keep_its_pipe_alive_when_it_is_dropped() -> None:
    def no(*_: Any) -> Tensor:
        raise ValueError

    def fail(of: Callable[[], Pipe]) -> weakref.ref[Pipe]:
        one = of()
        with pytest.raises(ValueError):
            one.forward_backward(torch.rand(4, 3), loss_fn=no)
        return weakref.ref(one)

    pipe = fail(lambda: Pipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=["cpu"]))
    settle()
    assert pipe() is None


def test_inputs_and_outputs_that_no_operation_saves_are_not_kept() -> None:
    between, counts = Activations(), list[int]()

    def loss(y: Tensor, target: Any) -> Tensor:
        counts.append(between.now())
        return y.sum()

    model = nn.Sequential(
        nn.Linear(3, 3), Apply(lambda x: between.add(x + 1)),
        Apply(lambda x: x + 1), nn.Linear(3, 3),
    )  # fmt: skip
    with Pipe(model, [2, 2], devices=["cpu"] * 2, chunks=5, checkpoint="never") as pipe:
        with in_lockstep():
            pipe.forward_backward(torch.rand(5, 3), loss_fn=loss, schedule="gpipe")
    assert max(counts) <= 2  # in the hands of the worker, and the one that was sent meanwhile


def test_a_gradient_that_waits_is_no_part_of_a_larger_one() -> None:
    whole, number = torch.ones(4, 6), torch.ones(1).expand(4)
    assert alone(whole) is whole and alone(number) is number
    part = alone(whole[:, 1:3])
    assert torch.equal(part, whole[:, 1:3]) and part.untyped_storage().nbytes() == part.nbytes
