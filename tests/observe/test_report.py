"""Tests the reports of timelines made by hand: each figure, and each advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pipert import Event, Timeline

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", k) for k in range(4)]


def grid(
    costs: list[float], m: int, kind: str = "forward", at: float = 0.0, run: int = 0
) -> Iterator[Event]:
    """Tasks as early as they can be, on one CUDA device each; a backward goes back."""
    n = len(costs)
    done = [at] * m
    for j in range(n) if kind == "forward" else reversed(range(n)):
        free = at
        for i in range(m) if kind == "forward" else reversed(range(m)):
            start = max(free, done[i])
            free = done[i] = start + costs[j]
            yield Event(kind, i, j, CUDA[j], start, free, run)


def test_the_bubble_is_of_the_forward_and_the_backward_and_of_nothing_in_between() -> None:
    events = [*grid([1.0, 1.0], 3), *grid([2.0, 4.0], 3, "backward", at=4.5)]
    report = Timeline(events, CUDA[:2]).report()
    assert report.bubble == pytest.approx(1 - 24 / 36)
    assert (report.seconds, report.outside) == (18.5, 0.5)


def test_time_outside_the_pipe_counts_for_no_device() -> None:
    events = [*grid([1.0], 2), *grid([1.0], 2, "backward", at=5.0), *grid([1.0], 2, at=8.0, run=1)]
    report = Timeline(events, CUDA[:1]).report()
    assert (report.calls, report.seconds, report.outside) == (2, 10.0, 4.0)
    assert report.devices[0].waiting == 0.0 and report.bubble == 0.0
    assert "at work for 60%." in str(report)


def test_times_of_a_device_add_up() -> None:
    events = [
        *grid([1.0, 1.0], 1),
        Event("recomputation", 0, 1, CUDA[1], 2.0, 3.0),
        Event("backward", 0, 1, CUDA[1], 3.0, 5.0),
        Event("backward", 0, 0, CUDA[0], 5.0, 7.0),
        Event("wait", 0, 1, CUDA[1], 0.25, 1.0),
        Event("copy", 0, 1, CUDA[1], 0.5, 1.25, source=CUDA[0], origin=0, bytes=4),
    ]
    first, second = Timeline(events, CUDA[:2]).report().devices
    assert (first.forward, first.recomputing, first.backward, first.waiting) == (1, 0, 2, 4)
    assert (second.forward, second.recomputing, second.backward, second.waiting) == (1, 1, 2, 3)
    assert second.busy == 4


def test_a_recomputation_inside_of_a_backward_counts_once() -> None:
    events = [
        *grid([1.0], 1),
        Event("backward", 0, 0, CUDA[0], 1.0, 4.0),
        Event("recomputation", 0, 0, CUDA[0], 2.0, 3.0),
    ]
    report = Timeline(events, CUDA[:1]).report()
    (device,) = report.devices
    assert (device.busy, device.recomputing, device.backward) == (4.0, 1.0, 2.0)
    assert report.costs == (4.0,)


def test_gradients_of_weights_that_are_put_off_fill_the_bubble() -> None:
    starts = {
        "forward": [(0, 1), (1, 3)], "backward": [(3, 5), (2, 4)],
        "weight gradient": [(4, 6), (5, 6)],
    }  # fmt: skip
    events = [
        Event(kind, i, j, CUDA[j], start, start + 1.0)
        for kind, by_partition in starts.items()
        for j, each in enumerate(by_partition)
        for i, start in enumerate(each)
    ]
    report = Timeline(events, CUDA[:2]).report()
    assert [*report.costs] == [3, 3]
    assert report.bubble == pytest.approx(1 / 7)
    for device in report.devices:
        assert (device.busy, device.forward, device.backward, device.waiting) == (6, 2, 4, 1)


def test_recomputations_are_shared_out_among_all_micro_batches() -> None:
    events = [*grid([1.0], 4), *grid([2.0], 3, "recomputation", at=5.0)]
    assert Timeline(events, CUDA[:1]).report().costs == (2.5,)


def test_the_slowest_partition_is_named() -> None:
    report = Timeline(grid([1.0, 3.0], 4), CUDA[:2]).report()
    text = "partition 1 on cuda:1 is the slowest: 3000.00 ms for a micro-batch, 1.50 of the mean"
    assert report.advice[0] == text and len(report.advice) == 2


def test_a_plan_is_advised_while_devices_wait() -> None:
    (advice,) = Timeline(grid([1.0, 1.0, 1.0], 2), CUDA[:3]).report().advice
    assert advice.startswith("devices waited for 50% of their time and recomputed for 0%: ")
    assert "pipert.plan_for" in advice
    assert not Timeline(grid([1.0, 1.0], 32), CUDA[:2]).report().advice


def test_a_plan_is_advised_while_devices_recompute() -> None:
    events = [*grid([1.0], 2), *grid([1.0], 2, "recomputation", 2.0)]
    events += grid([2.0], 2, "backward", 4.0)
    (advice,) = Timeline(events, CUDA[:1]).report().advice
    assert "waited for 0% of their time and recomputed for 25%" in advice


def test_unlike_devices_get_no_advice_about_their_balance() -> None:
    events = [replace(e, device=CPU) if e.partition == 0 else e for e in grid([1.0, 3.0], 4)]
    (advice,) = Timeline(events, [CPU, CUDA[1]]).report().advice
    assert "pipert.plan_for" in advice


def test_partitions_of_one_device_share_a_line_and_have_no_balance() -> None:
    events = [
        Event("forward", i, j, CUDA[0], 4 * i + 3 * j, 4 * i + 3 * j + 3.0 - 2 * j)
        for i in range(4) for j in range(2)
    ]  # fmt: skip
    report = Timeline(events, ["cuda:0"] * 2).report()
    assert [device.name for device in report.devices] == ["cuda:0"]
    assert report.bubble == report.ideal_bubble == 0.0 and not report.advice


def test_a_pause_between_two_backwards_is_no_work() -> None:
    backward = [
        *grid([1.0], 1, at=0.0), *grid([1.0], 1, "backward", at=1.0),
        *grid([1.0], 1, "backward", at=60.0),
    ]  # fmt: skip
    report = Timeline(backward, CUDA[:1]).report()
    assert (report.outside, report.bubble) == (58.0, 0.0)


def test_calls_that_are_not_complete_are_left_out() -> None:
    broken = [event for event in grid([1.0, 1.0], 2, at=10.0, run=1) if event.name != "F[1,1]"]
    report = Timeline([*grid([1.0, 1.0], 2), *broken], CUDA[:2]).report()
    assert (report.calls, report.incomplete, report.seconds) == (1, 1, 3.0)
    assert "(1 incomplete left out)" in str(report)


def test_a_call_that_skips_a_partition_is_complete() -> None:
    events = [event for event in grid([1.0] * 3, 2) if event.partition != 1]
    assert Timeline(events, CUDA[:3]).report().calls == 1


def test_micro_batches_are_those_of_most_calls() -> None:
    events = [*grid([1.0], 32), *grid([1.0], 1, at=40.0, run=1), *grid([1.0], 1, at=50.0, run=2)]
    assert Timeline(events, CUDA[:1]).report().micro_batches == 1


def test_tasks_that_take_no_time_are_reported() -> None:
    report = Timeline([Event("forward", 0, j, CPU, 0.0, 0.0) for j in range(2)], [CPU] * 2).report()
    assert (report.bubble, report.outside, report.advice) == (0.0, 0.0, ())


def test_the_text_has_a_line_for_each_device_and_the_bubble_beside_the_ideal() -> None:
    text = str(Timeline(grid([1.0, 1.0, 1.0], 4), CUDA[:3]).report())
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert "Bubble: 33% of the devices' time; equal partitions would leave 33%." in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_timeline_without_forward_tasks_has_no_report() -> None:
    with pytest.raises(ValueError, match="no complete call"):
        Timeline([], [CPU]).report()
