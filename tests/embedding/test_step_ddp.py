"""Whole steps in two processes over gloo, by the two recipes of docs/several_machines.md.

``_step_ddp_worker.py`` has the cases, each named by the fact that it shows. Both
processes run all cases, once for all tests here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedding.two_processes import run_in_two_processes, what_went_wrong

WORKER = Path(__file__).with_name("_step_ddp_worker.py")

FACTS = (
    "averaged_gradients_are_those_of_the_whole_batch",
    "ddp_around_a_step_reduces_once_what_the_whole_batch_gives",
    "ddp_around_a_step_accumulates_in_no_sync",
    "a_step_in_ddp_leaves_gradients_alone_until_its_backward",
    "frozen_layers_stay_without_gradient",
)
CASES = [f"{fact}-{schedule}" for fact in FACTS for schedule in ("gpipe", "1f1b")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each process: an empty string for each case, or what went wrong."""
    return run_in_two_processes(WORKER, tmp_path_factory.mktemp("step-ddp"), CASES, 100)


@pytest.mark.slow
@pytest.mark.timeout(120)  # the first waits for all cases
@pytest.mark.parametrize("case", CASES)
def test_in_two_processes(results: list[dict[str, str]], case: str) -> None:
    wrong = what_went_wrong(results, case)
    assert not wrong, wrong
