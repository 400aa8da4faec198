"""Tests the timeline of all ranks, and its report on which rank waits for which."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipert import Event, Observer, RunInfo, Statistics, TaskInfo, distributed
from pipert.observe.recorder import Recording
from tests.distributed.launcher import run

N, M = 2, 4


class Sleeps(nn.Module):
    """A layer that takes a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return (x * self.weight).tanh()


def pipe_of(seconds: list[float], **settings: Any) -> distributed.Pipe:
    layers = nn.Sequential(*[Sleeps(each) for each in seconds])
    settings.setdefault("chunks", M)
    return distributed.Pipe(layers, [1] * len(seconds), **settings)


def step(pipe: distributed.Pipe) -> Tensor:
    x = torch.ones(2 * M, 4)
    loss: Tensor = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return loss


def recorded(
    rank: int, calls: str, seconds: list[float], settings: dict[str, Any]
) -> tuple[list[Event], str, str, list[str], int]:
    pipe = pipe_of(seconds, **settings)
    step(pipe)
    with pipe.record() as timeline:
        for call in calls:
            step(pipe) if call == "s" else pipe(torch.ones(2 * M, 4))
    with tempfile.TemporaryDirectory() as folder:
        trace, picture = Path(folder) / "trace.json", Path(folder) / "timeline.svg"
        timeline.save(trace)
        timeline.plot(picture)
        named = json.loads(trace.read_text())["traceEvents"]
        drawn = picture.read_text()
    lanes = [one["args"]["name"] for one in named if one["name"] == "thread_name"]
    report = timeline.report()
    return list(timeline.events), str(report), drawn, lanes, report.calls


@pytest.mark.parametrize(
    "checkpoint, recomputed", [("never", 0), ("except_last", M - 1), ("always", M)]
)
def test_each_rank_sees_all_tasks_of_all_ranks(checkpoint: str, recomputed: int) -> None:
    found = run(2, recorded, "sse", [0.0, 0.0], {"checkpoint": checkpoint})
    assert found[0][:2] == found[1][:2]  # the same events, the same words
    events, text, drawn, lanes, calls = found[0]
    assert calls == 3 and "3 calls of 4 micro-batches on 2 devices" in text
    counts = Counter((event.kind, event.partition) for event in events if event.kind != "wait")
    for j in range(N):
        assert counts["forward", j] == 3 * M
        backwards = [e for e in events if (e.kind, e.partition) == ("backward", j)]
        assert len({(e.run, e.micro_batch) for e in backwards}) == 2 * M
        assert counts["recompute", j] == 2 * recomputed
    assert lanes == ["rank 0", "rank 1"]  # a lane each: no two tasks of a rank overlap
    assert "rank 0" in drawn and "rank 1" in drawn


def other_clock(rank: int) -> list[Event]:
    """Recorded where the second rank's recording begins a second before the first one's."""
    pipe = pipe_of([0.02, 0.02], chunks=2)
    step(pipe)

    class Early(Recording):
        def __init__(self, devices: Sequence[torch.device]) -> None:
            super().__init__(devices)
            self.origin._began -= rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipert.distributed.rank_timeline.Recording", Early)
        with pipe.record() as timeline:
            step(pipe)
    return list(timeline.events)


def test_clocks_of_ranks_are_compared() -> None:
    """Whatever crosses is sent before it is used, by one clock, and not a second before."""
    events = run(2, other_clock)[1]
    at = {(event.kind, event.micro_batch, event.partition): event for event in events}
    for i in range(2):
        assert at["forward", i, 0].start < at["forward", i, 1].end
        assert at["forward", i, 1].start < at["forward", 1, 0].start + 0.5


def test_the_report_says_which_rank_waits_for_which() -> None:
    _, text, _, _, _ = run(2, recorded, "ss", [0.02, 0.0], {"schedule": "gpipe"})[1]
    assert "Waits: rank 1 for rank 0 " in text
    assert "partition 0 on rank 0 is the slowest" in text


def test_several_partitions_on_a_rank() -> None:
    found = run(2, recorded, "s", [0.0] * 4, {"schedule": "interleaved"})
    events, _, _, lanes, calls = found[1]
    assert calls == 1 and lanes == ["rank 0", "rank 1"]
    assert {event.partition for event in events if event.kind == "backward"} == {0, 1, 2, 3}


def replicas(rank: int) -> tuple[list[str], int, int]:
    mesh = init_device_mesh("cpu", (2, 2))
    pipe = pipe_of([0.0, 0.0], mesh=mesh)
    with pipe.record() as timeline:
        step(pipe)
    forward = [event for event in timeline.events if event.kind == "forward"]
    return list(timeline.lanes), len(forward), timeline.report().calls


def test_a_replica_sees_its_own_pipeline() -> None:
    found = run(4, replicas)
    assert [lanes for lanes, *_ in found] == [["rank 0", "rank 2"], ["rank 1", "rank 3"]] * 2
    assert all((tasks, calls) == (N * M, 1) for _, tasks, calls in found)


def fails_in_the_block(rank: int) -> tuple[int, list[str], int]:
    """One step fails, is caught in the block, and the next succeeds; then one ends the block."""
    pipe = pipe_of([0.0, 0.0])
    with pipe.record() as timeline:
        with pytest.raises((RuntimeError, TypeError)):
            pipe.forward_backward(torch.ones(8, 4), target=None, loss_fn=refuse)
        step(pipe)
    report = timeline.report()
    with pytest.raises((RuntimeError, TypeError)), pipe.record() as cut:
        pipe.forward_backward(torch.ones(8, 4), target=None, loss_fn=refuse)
    with pipe.record() as again:
        step(pipe)
    assert again.report().calls == 1
    return report.calls, [str(event.device) for event in cut.events], report.incomplete


def refuse(output: Tensor, target: None) -> Tensor:
    raise TypeError("no loss today")


def test_a_step_that_fails_is_left_out() -> None:
    for calls, cut, incomplete in run(2, fails_in_the_block):
        assert (calls, incomplete) == (1, 1)
        assert cut == []  # a block that is left by an error is of no rank


class Notifier(Observer):
    def __init__(self) -> None:
        self.names: list[str] = []

    def run_started(self, run: RunInfo) -> None:
        self.names.append(f"run {run.number} of {run.micro_batches} x {run.partitions}")

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        self.names.append(outcome)

    def task_started(self, task: TaskInfo) -> None:
        self.names.append(f"{task.phase} {task.micro_batch},{task.partition}")

    def failed(self, task: TaskInfo, error: BaseException) -> None:
        self.names.append(f"failed {task.phase} {task.micro_batch},{task.partition}")


def observed(rank: int) -> tuple[list[str], Statistics]:
    pipe = pipe_of([0.0, 0.0], checkpoint="except_last", chunks=2)
    told = Notifier()
    pipe.add_observer(told)
    step(pipe)
    with pytest.raises((RuntimeError, TypeError)):
        pipe.forward_backward(torch.ones(8, 4), target=None, loss_fn=refuse)
    pipe.remove_observer(told)
    pipe(torch.ones(8, 4))
    with pytest.raises(TypeError, match="pipert.Observer"):
        pipe.add_observer(print)  # type: ignore[arg-type]
    return told.names, pipe.statistics()


def test_observers_and_statistics_are_of_this_rank() -> None:
    found = run(2, observed)
    for rank, (names, statistics) in enumerate(found):
        own = [name for name in names if f",{rank}" in name]
        assert names[0] == "run 0 of 2 x 2" and names[-1] == "failed"
        begins = [name for name in names if name[0] in "fbr" and "," in name]
        assert own == begins and f"recomputation 0,{rank}" in own
        assert f"backward 1,{rank}" in own
        again = 1 + (rank == 0)  # which knows nothing of the failure when it goes back
        assert statistics == Statistics(3, 0, 2, 1, 0, again, ())
    assert "failed forward 0,1" in found[1][0] and "failed forward 0,1" not in found[0][0]
