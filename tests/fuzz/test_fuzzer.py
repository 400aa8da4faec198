"""The fuzzer with a fixed number of cases; it finds injected faults."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert.autograd import streams as stream
from pipert.batch.joining import gather
from pipert.pipes import base
from pipert.stage.run import Run
from tests import simulated_gpus
from tests.fuzz.case import DEVICES, Case, Step, draw
from tests.fuzz.check import Failure, check, shrink

pytestmark = pytest.mark.slow
CPU = ("cpu",)
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")


def on_gpus(test: Any) -> Any:
    for mark in (pytest.mark.cuda, pytest.mark.multi_gpu, four_gpus):
        test = mark(test)
    return test


@pytest.mark.parametrize("autocast", [None, False, True])
@pytest.mark.parametrize(
    "places", [CPU, pytest.param(DEVICES, marks=[pytest.mark.multi_gpu, four_gpus])], ids=len
)
def test_random_cases_equal_the_plain_module_s_and_have_no_reports(
    places: tuple[str, ...], autocast: bool | None
) -> None:
    for number in range(25 if len(places) > 1 else 12):
        case = draw(12, number, places)
        if autocast is not None:
            steps = [replace(step, counted=True) for step in case.steps]
            case = replace(case, autocast=autocast, steps=tuple(steps))
        try:
            check(case)
        except Failure as failure:
            pytest.fail(f"{failure}\n{case!r}", pytrace=False)


@on_gpus
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [100, 200])
def test_a_hundred_cases_in_a_fresh_process_equal_the_plain_module_s(first: int) -> None:
    if simulated_gpus.running() is None:
        pytest.skip("starts simulated GPUs, and here are real ones")
    arguments = ["--seed", "12", "--first", str(first), "--cases", "100"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@on_gpus
def test_a_fault_does_not_wait_for_a_call_that_the_reference_does_not_have() -> None:
    step = Step(how="gpipe", chunks=4, checkpoint="always", fault=("F", 2), ready=True)
    check(Case(units=("fragile", "noise"), steps=(step,)))


@contextlib.contextmanager
def seeded_fault(*patch: Any) -> Iterator[None]:
    """Something wrong in pipert; what it provokes is no report of the test, nor of the next one."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(*patch)
        yield
    gc.collect()
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    gpus = simulated_gpus.running()
    if gpus is not None:
        gpus.clear()


def found(cases: int = 40) -> tuple[Case, str]:
    """Returns the first case that fails, and its failure."""
    for number in range(cases):
        case = draw(12, number)
        try:
            check(case)
        except Failure as failure:
            return case, failure.kind
    pytest.fail(f"nothing found in {cases} cases")


@on_gpus
def test_copies_without_a_wait_are_found() -> None:
    with seeded_fault(stream, "wait", lambda waiter, awaited: None):
        assert found()[1] == "reported"


@on_gpus
def test_memory_reused_too_early_is_found() -> None:
    with seeded_fault(Tensor, "record_stream", lambda tensor, stream: None):
        assert found()[1] == "reported"


@on_gpus
def test_inputs_that_may_be_overwritten_too_early_are_found() -> None:
    with seeded_fault(Run, "return_what_was_read", lambda run: None):
        assert found()[1] == "reported"


@on_gpus
def test_a_wrong_value_is_found_and_the_case_is_shrunk() -> None:
    right = gather
    with seeded_fault(base, "gather", lambda ys, sizes, *_: right(ys[::-1], sizes[::-1])):
        case, kind = found()
        assert kind == "differs"
        small = shrink(case, kind, seconds=20, tries=1)
        assert len(small.units) == len(small.steps) == 1
        with pytest.raises(Failure, match="differs"):
            check(small)


def test_a_case_is_reproduced_from_its_number_and_from_its_line() -> None:
    cases = [draw(1, number) for number in range(50)]
    assert cases == [draw(1, number) for number in range(50)]
    assert [eval(repr(case), {"Case": Case, "Step": Step}) for case in cases] == cases


@on_gpus
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("units", "status"), [("('tanh',)", 0), ("('no such layer',)", 1)])
def test_the_command_s_status_says_whether_the_case_has_failed(units: str, status: int) -> None:
    if simulated_gpus.running() is None:
        pytest.skip("starts simulated GPUs, and here are real ones")
    command = [sys.executable, "-m", "tests.fuzz", "--case", f"Case(units={units})"]
    assert subprocess.run(command, capture_output=True).returncode == status
