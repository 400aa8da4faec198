"""Tests parts of the training service alone: the options, the saved states and random numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

pytest.importorskip("prometheus_client", reason="the service shows its metrics with it")

from service.checkpoints import Checkpoints  # noqa: E402
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


def test_random_numbers_go_on_after_a_restore(checkpoints: Checkpoints) -> None:
    def draw() -> tuple[float, float]:
        return torch.rand(()).item(), random.random()

    checkpoints.save(1, {"random": get_random_state()})
    expected = [draw() for _ in range(3)]
    state = checkpoints.load()
    assert state is not None
    set_random_state(state["random"])
    assert [draw() for _ in range(3)] == expected
