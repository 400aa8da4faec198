"""Tests what profilers see, read from torch.profiler's own trace."""

from __future__ import annotations

import json
import runpy
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pipert import Pipe
from pipert.observe import ranges


def pipe() -> Pipe:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return Pipe(module, [1, 1], devices=["cpu", "cpu"], chunks=2, checkpoint="always")


def trace(path: Path, all_threads: bool = True) -> list[dict[str, Any]]:
    """Returns the events that torch.profiler records of a step."""
    # Of torch 2.11, once for a process.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
    config = _ExperimentalConfig(profile_all_threads=all_threads)
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


@pytest.mark.slow
def test_advice_for_profiling_only_the_own_thread_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_has_advised", [])
    with TestCase().assertLogs("pipert") as logged:
        names = {event["name"] for event in trace(tmp_path / "trace.json", all_threads=False)}
        trace(tmp_path / "trace.json", all_threads=False)
    assert "R[0,0]" in names and "F[0,0]" not in names
    (line,) = logged.output
    assert "profile_all_threads=True" in line


@pytest.mark.slow
def test_profiling_all_threads_logs_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_has_advised", [])
    with TestCase().assertNoLogs("pipert"):
        trace(tmp_path / "trace.json")


def test_ranges_are_off_without_a_profiler() -> None:
    assert not ranges.is_profiled()


def test_ranges_are_on_under_nsight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")  # which is read once, by the import
    assert runpy.run_path(ranges.__file__)["is_profiled"]()


def test_ranges_and_marks_are_nvtx_ranges_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    nvtx = torch.cuda.nvtx
    monkeypatch.setattr(nvtx, "range_push", lambda name: log.append(f"push {name}"))
    monkeypatch.setattr(nvtx, "range_pop", lambda: log.append("pop"))
    monkeypatch.setattr(nvtx, "mark", lambda name: log.append(f"mark {name}"))
    with pytest.raises(ZeroDivisionError), ranges.task_range("F[0,0]", torch.device("cuda", 0)):
        ranges.mark("B[0,0]", torch.device("cuda", 0))
        raise ZeroDivisionError
    assert log == ["push F[0,0]", "mark B[0,0]", "pop"]
