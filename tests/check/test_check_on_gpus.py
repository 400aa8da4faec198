"""Tests the whole check, and faults that only GPUs can show, on GPUs or simulated ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import schedules
from pipert.__main__ import main
from pipert._typing import Tensors
from pipert.autograd import streams as stream
from pipert.autograd.streams import CopyStreams, compute_stream
from pipert.check import links, memory, overlap, speed, values
from pipert.check.finding import BROKEN, HOLDS, NOT_CHECKED, REPORTED, Finding, Found, Measurement
from pipert.check.load import Load, timed
from pipert.check.models import small_models
from pipert.check.ways import Devices, Way
from pipert.pipes import pipelined
from pipert.stage import backward, recorded
from pipert.stage.stage import Stage
from tests import simulated_gpus

pytestmark = pytest.mark.slow

GPUS = tuple(torch.device("cuda", k) for k in range(4))
TWO = Devices(GPUS[:2])


@pytest.fixture
def long_tasks() -> Iterator[None]:
    """Makes simulated devices slow, so that tasks are long in virtual time."""
    gpus = simulated_gpus.running()
    if gpus is not None:
        gpus.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=1e-8)
    yield
    if gpus is not None:
        gpus.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=20)


def findings(found: Iterable[Found]) -> list[Finding]:
    return [row for row in found if isinstance(row, Finding)]


def found_in_memory(steps: int = 4) -> dict[str, Finding]:
    found = findings(memory.check(TWO, memory.load_for_memory(2, 16, 64), steps))
    return {row.check: row for row in found}


@pytest.mark.cuda
@pytest.mark.timeout(240)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_checks_hold(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} CUDA devices")
    named = ",".join(map(str, GPUS[:n]))
    assert main(["check", "--quick", "--devices", named]) == 0
    out = capsys.readouterr().out
    assert "Everything that was checked holds." in out
    assert "| copies beside computation " in out
    assert ("Not checked" in out) == (n == 1)


@pytest.mark.multi_gpu
def test_copies_that_torch_does_not_perform_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.outcome for row in findings(links.check(TWO, 1 << 10))] == [HOLDS]
    monkeypatch.setattr(Tensor, "copy_", lambda self, source: self)
    (found,) = findings(links.check(TWO, 1 << 10))
    assert found.outcome == BROKEN
    assert found.seen.startswith("cuda:0 to cuda:1: something else arrives; cuda:1 to cuda:0: ")


# Values -------------------------------------------------------------------------------------------


def change_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors]) -> None:
    """Let what is copied between GPUs arrive as something else."""
    copy = stream.copy

    def changed(tensors: Tensors, device: torch.device, *args: Any) -> Tensors:
        copied = copy(tensors, device, *args)
        between = {tensor.device for tensor in (*tensors, *copied)} == {*TWO.gpus}
        return change(copied) if between else copied

    monkeypatch.setattr(stream, "copy", changed)


@pytest.mark.multi_gpu
def test_copies_that_deliver_zeros_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    change_copies(monkeypatch, lambda copied: tuple(map(torch.zeros_like, copied)))
    found = [*values.check(TWO, small_models(2, torch.float64))]
    assert [row.outcome for row in found] == [BROKEN] * 3
    assert "without gradients: output differs by" in found[0].seen


@pytest.mark.multi_gpu
def test_copies_that_deliver_stale_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    last: dict[object, Tensor] = {}

    def stale(copied: Tensors) -> Tensors:
        before = tuple(last.get((x.shape, x.device), x) for x in copied)
        last.update({(x.shape, x.device): x.detach() for x in copied})
        return before

    change_copies(monkeypatch, stale)
    found = next(values.check(TWO, small_models(2, torch.float64)))
    assert found.outcome == BROKEN


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_checkpointing_that_keeps_all_activations_is_noticed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined, "recomputed", lambda mode, m: 0)
    found = found_in_memory()
    assert found["peak memory of 'always'"].outcome == BROKEN
    assert "cuda:0: loss.backward(), checkpoint='always' needs" in (
        found["peak memory of 'always'"].seen
    )
    assert found["peak memory of 1f1b"].outcome == HOLDS


@pytest.mark.multi_gpu
def test_a_1f1b_that_keeps_all_activations_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "plan", lambda schedule, *args: schedules.plan("gpipe", *args))
    found = found_in_memory()
    assert found["peak memory of 1f1b"].outcome == BROKEN
    assert found["peak memory of 'always'"].outcome == HOLDS


@pytest.mark.multi_gpu
def test_growing_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def keep(copied: Tensors) -> Tensors:
        kept.extend(x.detach() for x in copied)
        return copied

    change_copies(monkeypatch, keep)
    found = found_in_memory()["memory stays the same over steps"]
    assert found.outcome == BROKEN
    assert "bytes more in the second half of 4 steps" in found.seen


# Overlap ------------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@pytest.mark.parametrize("where", [GPUS[:1], GPUS[1:2], GPUS[:2]], ids=["from", "to", "both"])
def test_copies_on_the_compute_stream_are_noticed(
    monkeypatch: pytest.MonkeyPatch, where: tuple[torch.device, ...]
) -> None:
    get = CopyStreams.get

    def shared(self: CopyStreams, device: torch.device, i: int) -> torch.cuda.Stream | None:
        return compute_stream(device) if device in where else get(self, device, i)

    monkeypatch.setattr(CopyStreams, "get", shared)
    (found,) = overlap.check_copies(TWO)
    assert found.outcome == BROKEN
    assert found.seen == f"from cuda:0 to cuda:1 in none of {overlap.ATTEMPTS} attempts"


@pytest.mark.multi_gpu
def test_copies_beside_computation_hold_in_both_directions() -> None:
    (found,) = overlap.check_copies(Devices((GPUS[0], GPUS[1], GPUS[0])))
    assert found.outcome == HOLDS
    assert found.seen == "while both GPUs compute: cuda:0 to cuda:1, cuda:1 to cuda:0"


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_copies_are_not_judged_where_the_user_wants_no_overlap(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    (found,) = overlap.check_copies(TWO)
    assert found.outcome == NOT_CHECKED and found.seen.startswith(f"{name}=1 ")


@pytest.mark.cuda
@pytest.mark.parametrize("others", [[GPUS[0]], [torch.device("cpu")]], ids=["alone", "cpu"])
def test_copies_of_one_gpu_are_not_checked(others: list[torch.device]) -> None:
    (found,) = overlap.check_copies(Devices((GPUS[0], *others)))
    assert (found.outcome, found.seen) == (NOT_CHECKED, "there is one GPU")


def overlapping() -> Finding:
    (found,) = findings(overlap.check(TWO, Load(2, 4, layers=1, width=16, rows=16)))
    return found


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("long_tasks")
def test_how_much_overlaps_is_reported() -> None:
    found = overlapping()
    assert found.outcome == REPORTED
    assert found.seen.endswith("of the time two or more partitions compute")


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("long_tasks")
def test_partitions_that_take_turns_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, last = threading.Lock(), [torch.cuda.Event()]  # type: ignore[no-untyped-call]

    def after_the_last(compute: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any) -> Any:
            (stage,) = [arg for arg in args if isinstance(arg, Stage)]
            with lock:
                on = torch.cuda.current_stream(stage.place.device)
                on.wait_event(last[0])
                result = compute(*args)
                last[0] = on.record_event()
                return result

        return alone

    for of, name in ((recorded, "_compute"), (backward, "_backward")):
        monkeypatch.setattr(of, name, after_the_last(getattr(of, name)))
    monkeypatch.setattr(overlap, "NEVER", [Way("gpipe", "never"), Way("1f1b", "never")])
    found = overlapping()
    assert found.outcome == BROKEN
    assert found.seen.startswith("0% to 0% of the time")


# Speed --------------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@pytest.mark.skipif(simulated_gpus.running() is None, reason="needs the known times of simulation")
@pytest.mark.usefixtures("long_tasks")
def test_the_speed_up_is_taken_from_the_clocks_of_the_devices() -> None:
    table, found = speed.check(TWO, Load(2, 8, layers=1, width=16, rows=16), 0.0)
    assert isinstance(table, Measurement) and isinstance(found, Finding)
    rows = {row[0]: row for row in table.rows}
    assert float(rows["gpipe, checkpoint='never'"][-2]) == pytest.approx(16 / 9, rel=0.05)
    assert rows["gpipe, checkpoint='never'"][-1] == "1.78"
    assert rows["loss.backward(), checkpoint='except_last'"][-1] == "-"
    assert found.outcome == REPORTED


@pytest.mark.multi_gpu
@pytest.mark.skipif(simulated_gpus.running() is None, reason="needs the known times of simulation")
@pytest.mark.parametrize("device", TWO.gpus, ids=str)
def test_a_task_takes_as_long_as_the_device_that_takes_longest(device: torch.device) -> None:
    def sleep() -> None:
        with torch.cuda.device(device):
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]

    assert timed(TWO, sleep) == pytest.approx(20e-3, rel=0.01)
