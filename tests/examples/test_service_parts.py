"""Tests parts of the training service alone: the saved states, the log, health and HTTP."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe

pytest.importorskip("prometheus_client", reason="the service shows its metrics with it")

from prometheus_client import CollectorRegistry  # noqa: E402
from service.checkpoints import CheckpointError, Checkpoints  # noqa: E402
from service.endpoints import Endpoints  # noqa: E402
from service.health import Health  # noqa: E402
from service.log_lines import JsonLines, log_event  # noqa: E402
from service.options import read_options  # noqa: E402
from service.random_state import get_random_state, set_random_state  # noqa: E402

# --- the saved states -----------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "state", keep=2) as checkpoints:
        yield checkpoints


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((50,), float(step)), "python": random.getstate()}


def step_loaded(checkpoints: Checkpoints) -> int:
    state = checkpoints.load()
    assert state is not None
    assert torch.equal(state["weight"], torch.full((50,), float(state["step"])))
    return int(state["step"])


def test_a_kill_costs_at_most_the_steps_that_readme_says(tmp_path: Path) -> None:
    options = read_options(["--data", str(tmp_path), "--state", str(tmp_path / "state")])
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert options.save_every == 10 and "It saves every ten steps, so a kill costs ten" in readme


def test_the_newest_state_is_loaded_and_the_last_ones_are_kept(checkpoints: Checkpoints) -> None:
    assert checkpoints.load() is None
    for step in (1, 5, 20, 100):
        checkpoints.save(step, state_of(step))
    assert step_loaded(checkpoints) == 100
    assert [path.name[:17] for path in checkpoints.paths()] == [
        "step-000000000020", "step-000000000100"
    ]  # fmt: skip


def test_a_file_that_was_cut_off_anywhere_is_never_loaded(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, state_of(1))
    whole = checkpoints.save(2, state_of(2)).read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path = checkpoints.save(2, state_of(2))
        path.write_bytes(whole[:length])
        with TestCase().assertLogs() as logged:
            assert step_loaded(checkpoints) == 1
        assert logged.output == ["ERROR:service.checkpoints:checkpoint refused"]


def test_a_file_with_one_other_bit_is_never_loaded(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, state_of(1))
    whole = checkpoints.save(2, state_of(2)).read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 30):
        torn = bytearray(whole)
        torn[place] ^= 1
        checkpoints.save(2, state_of(2)).write_bytes(torn)
        assert step_loaded(checkpoints) == 1


def test_training_does_not_start_anew_if_all_states_are_bad(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        checkpoints.save(step, state_of(step)).write_bytes(b"torn")
    for _ in range(2):  # nor at the next start
        with pytest.raises(CheckpointError, match="no saved state in .* can be used"):
            checkpoints.load()


def test_a_write_that_fails_leaves_the_earlier_states(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.save(1, state_of(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(2, state_of(2))
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", path.name]
    assert step_loaded(checkpoints) == 1


def test_the_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        calls.append("fsync " + os.readlink(f"/proc/self/fd/{descriptor}").split("/")[-1])
        fsync(descriptor)

    def noted_replace(old: Path, new: Path) -> None:
        calls.append(f"rename {old.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoints.save(1, state_of(1))
    unfinished = "step-000000000001.unfinished"
    assert calls == [f"fsync {unfinished}", f"rename {unfinished}", "fsync state"]


def test_the_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2):
        with pytest.raises(CheckpointError, match="another process uses the folder"):
            Checkpoints(tmp_path, keep=2)
    with Checkpoints(tmp_path, keep=2):
        pass


def test_random_numbers_go_on_after_a_restore(checkpoints: Checkpoints) -> None:
    def draw() -> tuple[float, float]:
        return torch.rand(()).item(), random.random()

    checkpoints.save(1, {"random": get_random_state()})
    expected = [draw() for _ in range(3)]
    state = checkpoints.load()
    assert state is not None
    set_random_state(state["random"])
    assert [draw() for _ in range(3)] == expected


# --- the log --------------------------------------------------------------------------------------


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines().format(record)
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return line


def test_an_event_is_one_json_object() -> None:
    path = Path("state")
    with TestCase().assertLogs() as logged:
        log_event(logging.getLogger("x"), logging.INFO, "100%s", step=3, loss=0.5, path=path)
    line = line_of(logged.records[0])
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "logger": "x", "event": "100%s", "step": 3, "loss": 0.5, "path": "state"
    }  # fmt: skip


# --- health and HTTP ------------------------------------------------------------------------------


class Gate(nn.Module):
    """A layer that waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.reached.set()
        assert self.open.wait(30)
        return x


def test_health_fails_without_a_recent_step() -> None:
    now = [100.0]
    with Pipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"]) as pipe:
        health = Health(pipe, 10.0, clock=lambda: now[0])
        now[0] = 109.0
        assert health.problems() == []
        now[0] = 111.0
        assert health.problems() == ["no step was finished for 11.0 s"]
        health.step_finished()
        assert health.problems() == []


def test_health_fails_with_a_stuck_worker() -> None:
    gate = Gate()
    with Pipe(nn.Sequential(nn.Identity(), gate), [1, 1], devices=["cpu", "cpu"]) as pipe:
        health = Health(pipe, 1e-9, clock=lambda: 0.0)
        call = threading.Thread(target=pipe, args=(torch.ones(1),))
        call.start()
        assert gate.reached.wait(30)
        (problem,) = health.problems()
        gate.open.set()
        call.join()
        assert problem.startswith("pipert-cpu-1 has been at partition 1, micro-batch 0 for ")


def get(port: int, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_healthz_answers_with_the_problems() -> None:
    problems: list[str] = []
    with Endpoints("127.0.0.1", 0, CollectorRegistry(), lambda: problems) as endpoints:
        code, kind, body = get(endpoints.port, "/healthz")
        assert (code, kind, json.loads(body)) == (
            200, "application/json", {"healthy": True, "problems": []}
        )  # fmt: skip
        problems.append("stuck")
        code, _, body = get(endpoints.port, "/healthz?verbose=1")
        assert (code, json.loads(body)) == (503, {"healthy": False, "problems": ["stuck"]})
