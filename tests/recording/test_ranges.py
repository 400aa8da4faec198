"""Tests what profilers see, read from torch.profiler's own trace."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pipert import Pipe
from pipert.observe import run_trace
from pipert.observe.run_trace import Trace
from pipert.schedules.action import Action
from pipert.schedules.plan import plan_call


def pipe() -> Pipe:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return Pipe(module, [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint="always")


def trace(path: Path) -> list[dict[str, Any]]:
    """Returns the events that torch.profiler records of a step."""
    # Of torch 2.11, once for a process.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
    config = _ExperimentalConfig(profile_all_threads=True)
    with pipe() as one:
        one(torch.ones(2, 4)).sum().backward()  # the first time torch takes long
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            one(torch.ones(2, 4)).sum().backward()
    profiler.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.layered  # names threads, not those of micro-batches
@pytest.mark.slow
def test_each_task_is_in_the_trace_once_on_the_thread_that_ran_it(tmp_path: Path) -> None:
    events = trace(tmp_path / "trace.json")
    threads: dict[str, set[int]] = {}
    for letter in "FRB":
        for i, j in PLACES:
            (event,) = (event for event in events if event["name"] == f"{letter}[{i},{j}]")
            threads.setdefault(f"{letter}{j}", set()).add(event["tid"])
    assert all(len(of) == 1 for of in threads.values())
    assert threads["F0"] != threads["F1"]
    assert threads["R0"] == threads["B0"] == {threading.get_native_id()}


def test_tasks_on_cuda_are_nvtx_ranges_under_nsight(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    monkeypatch.setattr(run_trace, "stamp", lambda *_: 0.0)
    for under_nsight in (False, True):
        monkeypatch.setattr(run_trace, "_UNDER_NSIGHT", under_nsight)
        with Trace().open(plan_call(1, 1, [0])) as run, pytest.raises(ZeroDivisionError):
            with run.task(Action("F", 0, 0), torch.device("cuda", 0)):
                raise ZeroDivisionError
    assert log == ["push F[0,0]", "pop"]
