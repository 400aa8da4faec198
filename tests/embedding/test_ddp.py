"""DistributedDataParallel around a pipe: two processes, each with a pipe of its own, over gloo.

``_ddp_worker.py`` and ``_ddp_steps.py`` have the cases, each named by the fact that it shows. Both
processes run all cases, once for all tests here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipert

PACKAGE = Path(pipert.__file__).parent

MODES = ("always", "except_last", "never")

IN_EACH_MODE = (
    "ddp_trains_as_one_process_does_on_the_whole_batch",
    "looking_for_unused_parameters_changes_nothing",
    "gradients_that_are_views_of_buckets_change_nothing",
    "gradients_accumulate_without_reduction_in_no_sync",
    "frozen_layers_stay_without_gradient",
    "a_parameter_of_two_partitions_is_reduced_once",
    "a_layer_that_one_process_does_not_use_is_found",
    "statistics_of_micro_batches_are_those_of_process_0",
    "statistics_that_are_deferred_are_those_of_process_0",
    "the_step_after_an_error_of_a_layer_is_right",
    "ddp_around_a_model_in_place_has_the_gradients_of_the_whole_batch",
)
ONCE = (
    "every_process_begins_with_what_process_0_has",
    "the_state_dict_has_the_keys_of_ddp_around_the_plain_module",
)
IN_EACH_SCHEDULE = (
    "averaged_gradients_are_those_of_the_whole_batch",
    "ddp_around_a_step_reduces_once_what_the_whole_batch_gives",
    "ddp_around_a_step_accumulates_in_no_sync",
    "a_step_in_ddp_leaves_gradients_alone_until_its_backward",
)
CASES = [
    *[f"{name}-{MODES[k % 3]}" for k, name in enumerate(IN_EACH_MODE)],
    *[f"{name}-{schedule}" for name in IN_EACH_SCHEDULE for schedule in ("gpipe", "1f1b")],
    *ONCE,
]
IN_A_SWEEP = [f"{name}-{mode}" for name in IN_EACH_MODE for mode in MODES]
IN_A_SWEEP = [case for case in IN_A_SWEEP if case not in CASES]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """For each process: an empty string for each case, or what went wrong."""
    folder = tmp_path_factory.mktemp("ddp")
    left_out = [] if request.config.option.sweep else IN_A_SWEEP
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.embedding._ddp_worker", str(folder), *left_out],
        cwd=PACKAGE.parent, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]
    cases = {*CASES, *IN_A_SWEEP} - {*left_out}
    assert [{*each} for each in found] == [cases] * 2, "the list is not whole"
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)  # the first waits for all cases: 50 seconds on a busy machine
@pytest.mark.parametrize(
    "case", [*CASES, *[pytest.param(case, marks=pytest.mark.sweep) for case in IN_A_SWEEP]]
)
def test_in_two_processes(results: list[dict[str, str]], case: str) -> None:
    wrong = [f"process {rank}: {found[case]}" for rank, found in enumerate(results) if found[case]]
    assert not wrong, "\n".join(wrong)
