"""Tests the search for a step that fits, on CPU, where bytes are counted tensor by tensor."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, plan_for
from pipert.balance import layer_sizes
from pipert.balance.calls import measure_layers
from pipert.balance.measure import Cost, joined, measure_all, once_for_equal, total, without
from pipert.planning.candidate import bytes_of, text_of
from pipert.planning.memory import peaks
from pipert.planning.optimizer import OptimizerMemory, optimizer_memory
from pipert.schedules import plan
from tests.helpers.activations import Activations

CPUS = ["cpu"] * 2


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each measured task take a millisecond, so that balances are the same in each run."""
    ticks = itertools.count()
    monkeypatch.setattr("pipert.balance.measure.now", lambda _: next(ticks) / 1000)


def layers(count: int = 4, width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    )


def square(y: Tensor, _: object = None) -> Tensor:
    return y.square().mean()


def test_candidates_are_the_fastest_first_and_fit() -> None:
    found = plan_for(layers(), torch.randn(32, 16), memory="1GB", loss_fn=square, devices=CPUS)
    assert len(found) == 5
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds) and seconds[0] > 0
    for each in found:
        assert sum(each.balance) == 4 and len(each.peaks) == 2
        assert all(0 < peak <= 10**9 for peak in each.peaks)


def test_each_candidate_runs_as_it_is() -> None:
    module, x = layers(), torch.randn(32, 16)
    state = copy.deepcopy(module.state_dict())
    found = plan_for(
        module, x, memory=10**9, loss_fn=square, devices=CPUS, chunks=[2, 4], best=1000
    )
    assert {each.schedule for each in found} == {
        "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v"
    }  # fmt: skip
    assert {each.chunks for each in found} == {2, 4}
    assert ("always", "never") in {each.checkpoint for each in found}
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])
    for each in found[:: max(1, len(found) // 12)]:
        with Pipe(
            layers(), each.balance, devices=each.devices, chunks=each.chunks,
            checkpoint=each.checkpoint,
        ) as pipe:  # fmt: skip
            pipe.forward_backward(x, loss_fn=square, schedule=each.schedule)


def test_a_loss_may_be_a_module_or_a_method_and_is_left_alone() -> None:
    class Owner:
        def __deepcopy__(self, memo: object) -> Any:
            raise AssertionError("copied")

        def loss(self, y: Tensor, target: Tensor) -> Tensor:
            return (y - target).square().mean()

    x, classes = torch.randn(8, 16), torch.randint(16, (8,))
    options: Any = {"memory": "1GiB", "devices": CPUS, "chunks": [2]}
    weighted = nn.CrossEntropyLoss(torch.rand(16))
    assert plan_for(layers(), x, target=classes, loss_fn=weighted, **options)
    assert plan_for(layers(), x, target=x, loss_fn=Owner().loss, **options)


def test_less_memory_means_recomputation_and_then_a_refusal_that_says_what_is_missing() -> None:
    module, x = layers(8, 64), torch.randn(256, 64)
    options: Any = {"loss_fn": square, "devices": CPUS, "chunks": [4], "best": 1000}
    every = plan_for(module, x, memory="1GiB", **options)
    least = min(max(each.peaks) for each in every)
    (tight,) = [plan_for(module, x, memory=least, **options)]
    assert all(max(each.peaks) <= least for each in tight) and len(tight) < len(every)
    assert any(each.checkpoint != "never" for each in tight)
    with pytest.raises(ValueError, match=r"nothing fits\. .* needs .*KiB of 1 KiB, with chunks=4"):
        plan_for(module, x, memory="1KiB", **options)
    each = plan_for(module, x, memory=[2**30, least], **options)
    assert all(found.peaks[1] <= least for found in each)


def test_the_table_and_the_line_to_paste() -> None:
    found = plan_for(
        layers(), torch.randn(8, 16), memory="1GiB", devices=["cpu"], chunks=[2], best=1
    )
    head, row, _, *report, make = str(found).splitlines()
    assert head.split("  ")[0] == "ms a step" and row.split()[1] == "2"
    assert report[:-1] == found[0].report().splitlines() and "measured" in report[1]
    weights, gradients, optimizer, activations = found[0].memory[0]
    assert (weights, gradients, optimizer) == (4 * 17 * 16 * 4, weights, 0) and activations > 0
    shown = map(text_of, (weights, gradients, optimizer, activations, *found[0].peaks, 2**30))
    assert report[-4].split() == " ".join(["cpu:0", *shown]).split()
    assert make == "pipe = Pipe(module, [4], devices=['cpu:0'], chunks=2, " + (
        f"checkpoint='never', schedule={found[0].schedule!r})"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 2**30), ("1.5 MB", 1_500_000), ("7", 7), (7, 7), ("2 KiB", 2048),
        ("1TB", 10**12),
    ],  # fmt: skip
)
def test_sizes_may_be_texts(text: int | str, size: int) -> None:
    assert bytes_of(text) == size


def test_statistics_get_two_rows_or_more() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    options: Any = {"memory": "1GiB", "devices": CPUS, "best": 1000}
    assert {each.chunks for each in plan_for(module, torch.randn(8, 16), **options)} == {2, 4}
    found = plan_for(module.eval(), torch.randn(8, 16), **options)
    assert {each.chunks for each in found} == {2, 4, 8}


def test_other_bad_arguments_are_refused() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"devices": []}, "one device or more"), ({"best": 0}, "best must be 1 or more"),
        ({"memory": "1.5.2GiB"}, "or a text such as"),
        ({"memory": [1, 2, 3]}, "one for each of 2 devices"),
        ({"devices": ["cpu:1", "cpu:1"]}, "each device is named once"),
    ]  # fmt: skip
    for options, why in bad:
        every: dict[str, Any] = {"memory": 1, "devices": CPUS, **options}
        with pytest.raises(ValueError, match=why):
            plan_for(layers(), torch.randn(8, 16), **every)


def layer_costs(module: nn.Sequential, x: Tensor) -> list[Cost]:
    return [*measure_layers(module, x, "cpu", measure_all).values()]


def test_bytes_of_a_linear_layer_and_of_partitions() -> None:
    """A Linear needs its input, and keeps it and its gradient; Tanh needs its output."""
    first, tanh, last = costs = layer_costs(
        nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), torch.randn(4, 16)
    )
    row = 4 * 4  # bytes of a column of four rows
    assert total(first.parameters) == total(first.trained) == 4 * (16 * 32 + 32)
    assert first.saved == first.inputs and total(first.saved) == row * 16
    assert tanh.saved == tanh.outputs == last.inputs
    assert first.deferred == row * (16 + 32) and tanh.deferred == 0
    part = joined(costs)
    assert total(part.saved) == row * (16 + 32)  # the tensor between Tanh and Linear counts once
    assert part.deferred == row * (16 + 32 + 32 + 16)
    assert part.inputs == first.inputs and total(last.inputs) == row * 32


@pytest.mark.parametrize(("schedule", "kept"), [("1f1b", 2), ("gpipe", 4), ("zb-h2", 3)])
def test_peaks_rise_with_the_micro_batches_that_are_kept(schedule: str, kept: int) -> None:
    costs = layer_costs(layers(2, 64), torch.randn(512, 64))
    saved = total(without(costs[0].saved, costs[0].inputs))  # these belong to the mini-batch
    found = sum(peaks(plan(schedule, 4, 2), [[cost] for cost in costs], OptimizerMemory(), 0)[0])
    fixed = 2 * total(costs[0].parameters)
    assert kept * saved <= found - fixed <= (2 * kept + 2) * saved


@pytest.mark.parametrize("memory", [("14.2MiB", "38.2MiB"), ("38.2MiB", "14.2MiB")])
def test_another_balance_than_that_of_equal_times_is_found_where_it_fits(
    memory: tuple[str, str],
) -> None:
    """Of eight layers two fit on the small device, each with a gradient and the next one."""
    module = nn.Sequential(*[nn.Linear(724, 724, bias=False) for _ in range(8)])
    options: Any = {"loss_fn": square, "devices": CPUS, "chunks": [2]}
    (best, *_) = plan_for(module, torch.randn(4, 724), memory=memory, **options)
    assert all(peak <= bytes_of(limit) for peak, limit in zip(best.peaks, memory, strict=True))


def test_what_a_trained_layer_needs_beyond_its_weights_decides_where_it_fits() -> None:
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    module[:3].requires_grad_(False)
    options: Any = {
        "loss_fn": square, "devices": CPUS, "chunks": [2], "optimizer": torch.optim.AdamW
    }  # fmt: skip
    (best, *_) = plan_for(module, torch.randn(2, 64), memory=["472KiB", "136KiB"], **options)
    assert best.balance == (7, 1)


def test_the_partition_that_is_full_is_recomputed_and_no_other() -> None:
    wide = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(9)]) for _ in range(2)]
    module, x = nn.Sequential(*layers(2), *wide), torch.randn(4096, 16)
    options: Any = {"loss_fn": square, "devices": CPUS, "chunks": [4], "best": 1000}
    every = plan_for(module, x, memory="1GiB", **options)
    modes = {each.checkpoint for each in every if each.schedule == "1f1b"}
    assert modes == {"never", "always", ("always", "never"), ("never", "always")}


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        (torch.optim.SGD, 2.0), (torch.optim.AdamW, 4.0), (torch.optim.Adagrad, 3.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3.0),
    ],
)  # fmt: skip
def test_the_state_of_an_optimizer_counts(optimizer: Any, scale: float) -> None:
    module, x = layers(), torch.randn(8, 16)
    options: Any = {"memory": "1GiB", "devices": ["cpu"], "chunks": [2], "loss_fn": square}
    one = optimizer(module.parameters())
    before = str(one.state_dict())
    trained = sum(parameter.nbytes for parameter in module.parameters())
    plain = plan_for(module, x, **options)[0].peaks[0]
    for given in (optimizer, one):
        found = plan_for(module, x, optimizer=given, **options)[0].peaks[0]
        assert found - plain == pytest.approx((scale - 2) * trained, rel=0.01)
    assert str(one.state_dict()) == before


@pytest.mark.parametrize(
    ("optimizer", "step"), [(torch.optim.SGD, 0.0), (torch.optim.AdamW, 1.0)]
)
def test_a_step_that_takes_all_parameters_at_once_needs_more(optimizer: Any, step: float) -> None:
    assert optimizer_memory(optimizer, on_gpus=False).step == 0
    assert optimizer_memory(optimizer, on_gpus=True).step == pytest.approx(step, abs=0.01)


def test_measuring_leaves_nothing_behind() -> None:
    """A layer that saves its output would keep it alive, if a hook returned it as it is."""
    made = Activations()

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return made.add(x.exp())

    module = nn.Sequential(Keeps(), nn.Linear(3, 3))
    layer_sizes(module, torch.randn(4, 3), device="cpu")
    layer_costs(module, torch.randn(4, 3))
    gc.collect()
    assert made.left() == 0


class Counted(nn.Linear):
    """Counts the calls of all copies, by the setting of each."""

    calls: dict[int, int] = {}

    def __init__(self, window: int) -> None:
        super().__init__(16, 16)
        self.window, self.layer_idx = window, id(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[self.window] = self.calls.get(self.window, 0) + 1
        return super().forward(x)


class Chain(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("wrapped", [nn.Sequential, Chain])
def test_equal_layers_are_measured_once_and_those_of_other_settings_apart(
    wrapped: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    Counted.calls.clear()
    stack = nn.Sequential(*[Counted(1) for _ in range(15)], Counted(2))
    model = Chain(stack) if wrapped is Chain else stack
    x = torch.randn(8, 16, requires_grad=True)
    said = list[str]()
    log = logging.getLogger("pipert")
    monkeypatch.setattr(log, "info", lambda text, *args: said.append(text % args))
    plan_for(model, x, memory="1GiB", devices=CPUS, chunks=[2])
    alone = Counted.calls[2]
    assert alone >= 6 and Counted.calls[1] <= alone + 14 * 7  # its forward, in each round
    assert "plan_for measures the layers on cpu for chunks=[2]" in said[0]


def test_what_an_equal_layer_keeps_has_names_of_its_own() -> None:
    measured = once_for_equal(measure_all)
    x = torch.randn(4, 16, requires_grad=True)
    costs = [*measure_layers(layers(3), x, "cpu", measured).values()]
    each = layer_costs(layers(3), torch.randn(4, 16, requires_grad=True))
    for found, expected in ((costs[2], each[2]), (joined(costs), joined(each))):
        for name in ("inputs", "outputs", "saved", "parameters", "trained"):
            assert total(getattr(found, name)) == total(getattr(expected, name)), name
        assert found.deferred == expected.deferred
