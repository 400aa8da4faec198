"""What a report says of timelines made by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipert import Event, Timeline
from pipert.timeline.intervals import length, overlap, union

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


def test_equal_partitions_leave_the_ideal_bubble() -> None:
    report = Timeline(grid([1.0, 1.0, 1.0], 4), CUDA[:3]).report()
    assert report.ideal_bubble == pytest.approx(2 / 6)
    assert report.bubble == report.forward_bubble == pytest.approx(2 / 6)
    assert report.backward_bubble is None


def test_forward_and_backward_have_bubbles_of_their_own() -> None:
    events = [*grid([1.0, 1.0], 3), *grid([2.0, 4.0], 3, "backward", at=10.0)]
    report = Timeline(events, CUDA[:2]).report()
    assert report.forward_bubble == pytest.approx(1 / 4)
    assert report.backward_bubble == pytest.approx(1 - 18 / 28)
    assert report.bubble == pytest.approx(1 - 24 / 36)


def test_what_is_outside_of_the_pipe_counts_for_no_device() -> None:
    events = [*grid([1.0], 2), *grid([1.0], 2, "backward", at=5.0), *grid([1.0], 2, at=8.0, run=1)]
    report = Timeline(events, CUDA[:1]).report()
    assert (report.calls, report.seconds, report.outside) == (2, 10.0, 4.0)
    assert report.devices[0].waiting == 0.0 and report.bubble == 0.0
    assert "40% of the time the pipe was not at work" in str(report)


def test_times_of_a_device_add_up() -> None:
    events = [
        *grid([1.0, 1.0], 1),
        Event("recompute", 0, 1, CUDA[1], 2.0, 3.0),
        Event("backward", 0, 1, CUDA[1], 3.0, 5.0),
        Event("backward", 0, 0, CUDA[0], 5.0, 7.0),
        Event("wait", 0, 1, CUDA[1], 0.25, 1.0),
        Event("copy", 0, 1, CUDA[1], 0.5, 1.25, source=CUDA[0], origin=0, bytes=4),
    ]
    first, second = Timeline(events, CUDA[:2]).report().devices
    assert (first.forward, first.recomputing, first.backward, first.waiting) == (1, 0, 2, 4)
    assert (second.forward, second.recomputing, second.backward, second.waiting) == (1, 1, 2, 3)
    assert (second.busy, second.for_input, second.copying, second.hidden) == (4, 0.75, 0.75, 0.25)


def test_a_recomputation_inside_of_a_backward_counts_once() -> None:
    events = [
        *grid([1.0], 1),
        Event("backward", 0, 0, CUDA[0], 1.0, 4.0),
        Event("recompute", 0, 0, CUDA[0], 2.0, 3.0),
    ]
    (device,) = Timeline(events, CUDA[:1]).report().devices
    assert (device.busy, device.recomputing, device.backward) == (4.0, 1.0, 2.0)


def test_a_better_balance_is_named() -> None:
    layers = [[0.5, 0.5], [1.0, 1.0, 1.0]]
    report = Timeline(grid([1.0, 3.0], 4), CUDA[:2], layers=layers).report()
    assert [(cost.forward, cost.whole) for cost in report.costs] == [(1, 1), (3, 3)]
    best = report.advice[0]
    assert "partition 1 on cuda:1 is the slowest: 3000.00 ms" in best.text
    assert "balance=[3, 2] instead of [2, 3]" in best.text
    assert best.gain == pytest.approx(1 / 3)


def test_layers_cost_what_they_take_of_the_whole_task() -> None:
    # The backward of partition 0 makes it the slow one, though its forward is short.
    events = [*grid([1.0, 1.5], 2), *grid([5.0, 0.5], 2, "backward", at=10.0)]
    report = Timeline(events, CUDA[:2], layers=[[0.5, 0.5], [1.5]]).report()
    assert "balance=[1, 2] instead of [2, 1]" in report.advice[0].text


def test_where_no_balance_is_better_the_largest_layer_is_named() -> None:
    report = Timeline(grid([1.0, 3.0], 4), CUDA[:2], layers=[[1.0], [3.0]]).report()
    assert any("no other balance is much better" in one.text for one in report.advice)


def test_without_times_of_layers_it_says_how_to_find_a_balance() -> None:
    report = Timeline(grid([1.0, 3.0], 4), CUDA[:2]).report()
    assert "balance_by_time" in report.advice[0].text


def test_an_even_pipe_gets_no_advice_about_its_balance() -> None:
    report = Timeline(grid([1.0, 1.0], 4), CUDA[:2], layers=[[1.0], [1.0]]).report()
    assert not any("balance" in one.text for one in report.advice)


def test_more_chunks_are_advised_while_they_pay() -> None:
    few = Timeline(grid([1.0, 1.0, 1.0], 2), CUDA[:3]).report()
    (advice,) = few.advice
    assert advice.text.startswith("chunks=4 instead of 2") and advice.gain == pytest.approx(1 / 4)
    assert not Timeline(grid([1.0, 1.0], 32), CUDA[:2]).report().advice


def test_much_recomputation_is_named() -> None:
    events = [*grid([1.0], 2), *grid([1.0], 2, "recompute", 5.0), *grid([2.0], 2, "backward", 7.0)]
    texts = [one.text for one in Timeline(events, CUDA[:1]).report().advice]
    assert any(text.startswith("25% of what is computed is recomputed") for text in texts)


def test_short_tasks_are_named() -> None:
    (advice,) = Timeline(grid([1e-4], 2), CUDA[:1]).report().advice
    assert "as little as 100 us" in advice.text


def test_on_cpu_the_one_thread_of_the_backward_is_named() -> None:
    events = [
        Event("forward", 0, 0, CPU, 0.0, 1.0), Event("forward", 0, 1, CPU, 1.0, 2.0),
        Event("backward", 0, 1, CPU, 2.0, 3.0), Event("backward", 0, 0, CPU, 3.0, 9.0),
    ]  # fmt: skip
    texts = [one.text for one in Timeline(events, ["cpu", "cpu"]).report().advice]
    assert any("one thread of autograd" in text for text in texts)
    assert not any("slowest" in text for text in texts)  # forwards alone run at the same time


def test_partitions_on_one_device_share_a_line() -> None:
    events = [Event("forward", 0, j, CUDA[0], j, j + 1.0) for j in range(2)]
    report = Timeline(events, ["cuda:0", "cuda:0"]).report()
    assert [device.name for device in report.devices] == ["cuda:0"]
    assert report.bubble == report.ideal_bubble == 0.0


def test_the_text_has_a_line_for_each_device_and_the_bubble_beside_the_ideal() -> None:
    text = str(Timeline(grid([1.0, 1.0, 1.0], 4), CUDA[:3]).report())
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert "Bubble: 33% of the devices' time (forward 33%); (n-1)/(m+n-1) is 33%." in text


def test_a_timeline_without_forward_tasks_has_no_report() -> None:
    with pytest.raises(ValueError, match="no forward task"):
        Timeline([], [CPU]).report()


def test_events_of_partitions_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"F\[0,2\] is of partition 2"):
        Timeline([Event("forward", 0, 2, CPU, 0.0, 1.0)], [CPU, CPU])


def test_devices_and_workers_must_match() -> None:
    with pytest.raises(ValueError, match="2 devices and 1 workers"):
        Timeline([], [CPU, CPU], [0])


def test_intervals() -> None:
    merged = union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)])
    assert merged == [(0, 2.5), (3, 4)] and length(merged) == 3.5
    assert overlap(merged, [(1, 3.5), (3.75, 9)]) == [(1, 2.5), (3, 3.5), (3.75, 4)]
    assert overlap([], merged) == []
