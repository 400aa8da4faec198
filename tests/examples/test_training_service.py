"""Tests the service as a process: killed, told to stop, out of memory, stuck, asked for its health.

Whatever happens to it, it must end up with the state of an undisturbed run, bit
for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("tqdm", reason="the service takes its model from an example that needs tqdm")
pytest.importorskip("prometheus_client", reason="the service shows its metrics with it")

from tests.examples.service_lives import (  # noqa: E402
    ENVIRONMENT,
    HOOKED,
    OPTIONS,
    ROOT,
    STEPS,
    Folders,
    Starter,
    assert_same,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def run(starter: Starter, tmp_path: Path) -> Folders:
    return Folders(starter, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(
    starter: Starter, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[int, float]]:
    """Returns the last state and the losses of an undisturbed run."""
    folders = Folders(starter, tmp_path_factory.mktemp("undisturbed"))
    losses = folders.run().losses()
    assert list(losses) == list(range(1, STEPS + 1))
    return folders.final(), losses


Undisturbed = tuple[dict[str, Any], dict[int, float]]

# --- killed and told to stop ----------------------------------------------------------------------


@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.sweep)])
def test_a_service_killed_several_times_ends_like_an_undisturbed_one(
    run: Folders, undisturbed: Undisturbed, times: int
) -> None:
    moments = random.Random(0)
    losses: dict[int, float] = {}
    for k in range(times):
        life = run.start()
        if k % 2:
            life.wait_for("step", moments.randint(1, 4))
            time.sleep(moments.uniform(0, 0.03))  # any moment of a step will do
        else:
            life.wait_for("serving")
            wait_until(lambda: any(run.state.glob("*.unfinished")))
        assert life.kill(signal.SIGKILL) == -signal.SIGKILL
        losses |= life.losses()
    losses |= run.run().losses()
    assert losses == undisturbed[1]
    assert_same(run.final(), undisturbed[0])


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("torch.save", 4),  # half of the file is written
        ("os.fsync", 7),  # before the file is flushed
        ("os.replace", 4),  # before it gets its name
        ("os.fsync", 8),  # before the folder is flushed
        ("pathlib.Path.unlink", 2),  # before an older one is deleted
    ],
)
def test_a_service_killed_while_saving_resumes_from_a_whole_state(
    run: Folders, undisturbed: Undisturbed, function: str, call: int
) -> None:
    script = f"""
import io, os, pathlib, signal, torch
real, calls = {function}, 0

def dies(*args, **kwargs):
    global calls
    calls += 1
    if calls == {call}:
        if real is torch.save:
            whole = io.BytesIO()
            real(args[0], whole)
            args[1].write(whole.getvalue()[: len(whole.getvalue()) // 2])
            args[1].flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)

{function} = dies
"""
    life = run.start(script=script)
    assert life.wait() == -signal.SIGKILL
    assert max(life.losses()) == 6
    second = run.run()
    assert second.lines("resumed")[0]["step"] in (4, 6)
    assert not second.lines("checkpoint refused")
    assert_same(run.final(), undisturbed[0])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_lets_the_service_finish_the_step_and_save(
    run: Folders, undisturbed: Undisturbed, name: str
) -> None:
    script = f"""
def during(step, rows):
    if step == 5:
        os.kill(os.getpid(), signal.{name})
"""
    life = run.run(script=HOOKED + script)
    assert max(life.losses()) == 5
    last = life.lines()[-1]
    assert (last["event"], last["step"]) == ("stopped", 5)
    assert last["signal"] == getattr(signal, name)
    assert run.final(5)["trainer"]["steps"] == 5
    run.run()
    assert_same(run.final(), undisturbed[0])


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param("cuda:0,cuda:0", marks=pytest.mark.cuda),
        pytest.param("cuda:0,cuda:1", marks=pytest.mark.multi_gpu),
    ],
)
def test_a_stop_on_gpus_changes_no_result(run: Folders, devices: str) -> None:
    on_cuda = f"--devices {devices} --steps"
    run.run(f"{on_cuda} 8")
    expected = run.final(8)
    for path in run.state.iterdir():
        path.unlink()
    run.run(f"{on_cuda} 5")
    run.run(f"{on_cuda} 8")
    assert_same(run.final(8), expected)


def test_two_processes_do_not_use_the_same_states(run: Folders) -> None:
    first = run.start("--save-every 1000")
    first.wait_for("step")
    second = run.start()
    assert second.wait() == 1
    assert "another process uses the folder" in second.lines("failed")[0]["exception"]
    assert first.kill(signal.SIGTERM) == 0


# --- text that comes while it runs ----------------------------------------------------------------


def test_new_text_is_used_and_a_kill_changes_no_result(
    run: Folders, starter: Starter, tmp_path: Path
) -> None:
    """The same text comes during the same steps, once with a kill between two saves.

    At step 17 a pass begins with all that is known, which is not what came meanwhile.
    """
    script = """
def during(step, rows):
    if step == 3:
        (data / "three.txt").write_text("something that was not there. " * 5)
    if step == 14:
        (data / "one.txt").write_text("the pipeline is full of one.txt. " * 3 + "more. " * 50)
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
"""

    def script_for(folders: Folders, kill_at: int) -> str:
        names = f"import pathlib\ndata, kill_at = pathlib.Path({str(folders.data)!r}), {kill_at}"
        return f"{HOOKED}{names}{script}"

    options = "--save-every 6 --steps 30"
    (tmp_path / "expected").mkdir()
    expected = Folders(starter, tmp_path / "expected")
    for folders in (run, expected):
        for file in folders.data.iterdir():
            file.write_text(f"the pipeline is full of {file.name}. " * 3)
    losses = expected.run(options, script_for(expected, 0)).losses()
    first = run.start(options, script_for(run, 17))
    assert first.wait() == -signal.SIGKILL
    assert max(first.losses()) == 16
    second = run.run(options)
    assert second.lines("resumed")[0]["step"] == 12
    assert first.losses() | second.losses() == losses
    assert [line["bytes"] for line in first.lines("text found")][1:] == [144]  # windows of 150
    assert [line["bytes"] for line in second.lines("text found")] == [296]  # and of 300
    assert_same(run.final(30), expected.final(30))
    position = run.final(30)["trainer"]["corpus"]["position"]
    assert (position["pass"], position["part"]) == (2, 1)  # at what was found last


# --- out of memory, and stuck ---------------------------------------------------------------------

IN_FORWARD = """
def during(step, rows):
    if rows > 1:
        raise torch.OutOfMemoryError("there is room for one row")
"""

IN_BACKWARD = """
def during(step, rows):
    pass

backwards = 0

def in_backward(gradient):
    global backwards
    backwards += 1
    if len(gradient) > 1 and backwards == 2:  # the last one, when some parameters have gradients
        raise MemoryError("there is room for one row")

def after(layer, args, output):
    if output.requires_grad:
        output.register_hook(in_backward)

class Service(Service):
    def build_model(self):
        model = super().build_model()
        model[2].register_forward_hook(after)
        return model
"""


@pytest.mark.parametrize("script", [IN_FORWARD, IN_BACKWARD], ids=["forward", "backward"])
def test_a_step_out_of_memory_is_done_once_with_more_micro_batches(
    run: Folders, starter: Starter, tmp_path: Path, script: str
) -> None:
    (tmp_path / "expected").mkdir()
    expected = Folders(starter, tmp_path / "expected")
    losses = expected.run("--chunks 4 --steps 10").losses()

    first = run.start("--steps 10", HOOKED + script)
    retry = first.wait_for("out of memory")
    assert (retry["step"], retry["chunks"], retry["level"]) == (1, 4, "warning")
    first.wait_for("saved", 3)
    first.kill(signal.SIGKILL)
    second = run.run("--steps 10")  # has memory enough, and goes on as it was
    assert first.losses() | second.losses() == losses
    assert {line["chunks"] for line in second.lines("step")} == {4}
    states = run.final(10)["trainer"], expected.final(10)["trainer"]
    assert [state.pop("chunks") for state in states] == [
        {"asked": 2, "now": 4}, {"asked": 4, "now": 4}
    ]  # fmt: skip
    assert_same(*states)


def test_the_service_ends_if_one_row_needs_too_much_memory(run: Folders) -> None:
    script = """
def during(step, rows):
    if step > 3:
        raise torch.OutOfMemoryError("there is no room")
"""
    life = run.start(script=HOOKED + script)
    assert life.wait() == 1
    assert [line["chunks"] for line in life.lines("out of memory")] == [4]
    assert "OutOfMemoryError: there is no room" in life.lines("failed")[0]["exception"]
    assert max(life.losses()) == 3


def test_a_stuck_step_ends_the_service_and_says_where(run: Folders) -> None:
    script = """
def during(step, rows):
    if step > 3:
        threading.Event().wait()
"""
    life = run.start("--timeout 1.5", HOOKED + script)
    assert life.wait() == 3
    last = life.lines()[-1]
    assert (last["event"], last["level"], max(life.losses())) == ("stuck", "critical", 3)
    assert "PipelineTimeout" in last["exception"]
    assert "pipert-cpu-0" in last["exception"]
    assert "in during" in last["exception"]


# --- how it is ------------------------------------------------------------------------------------


def test_metrics_count_and_health_turns_with_a_stuck_worker(run: Folders, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"""
waited = []

def during(step, rows):
    if step == 4 and not waited:
        waited.append(step)
        open({str(gate)!r}).read()  # until somebody opens the other end
"""
    life = run.start("--steps 100000 --stale-after 1 --save-every 1000", HOOKED + script)
    wait_until(lambda: life.get("/healthz")[0] == 503)
    wait_until(lambda: "micro-batch 0" in life.get("/healthz")[1])
    problems = json.loads(life.get("/healthz")[1])["problems"]
    samples = life.metrics()
    gate.write_bytes(b"")
    wait_until(lambda: life.get("/healthz") == (200, '{"healthy": true, "problems": []}\n'))
    wait_until(lambda: life.metrics()["training_steps_total"] > 3)
    assert life.kill(signal.SIGTERM) == 0

    assert [problem.split(" for ")[0] for problem in problems] == [
        "no step was finished",
        "pipert-cpu-0 has been at partition 0, micro-batch 0",
    ]
    assert samples["training_steps_total"] == samples["training_step"] == 3
    assert samples["training_tokens_total"] == 3 * 4 * 8
    assert samples["pipert_runs_total outcome=succeeded pipe=training"] == 3
    assert samples["pipert_runs_in_flight pipe=training"] == 1
    assert samples["pipert_worker_tasks_total pipe=training worker=pipert-cpu-1"] == 6
    assert samples["pipert_worker_task_age_seconds pipe=training worker=pipert-cpu-0"] > 0.5
    assert samples["process_resident_memory_bytes"] > 1e6


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.sweep  # it starts Python and imports torch: four seconds
def test_the_command_of_the_docs_logs_json_lines_and_nothing_else(run: Folders) -> None:
    command = [sys.executable, str(ROOT / "examples" / "training_service.py"), *OPTIONS.split()]
    result = subprocess.run(
        [*command, "--data", str(run.data), "--state", str(run.state), "--steps", "2"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    events = [json.loads(line)["event"] for line in result.stderr.splitlines()]
    expected = ["serving", "text found", "saved", "begun", "step", "step", "saved", "stopped"]
    assert [event for event in events if event != "message"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data no/such/folder", "--data must be a folder, and no/such/folder is none"),
        ("--lr 0", "--lr must be above 0"),
        ("--stale-after -1", "--stale-after must be above 0"),
        ("--port 70000", "--port must be from 0 to 65535, not 70000"),
        ("--heads 3", "heads must divide width"),
        ("--keep 0", "argument --keep: must be 1 or more, not 0"),
    ],
)
def test_a_wrong_option_ends_the_service_with_code_2(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: str, message: str,
) -> None:  # fmt: skip
    folders = ["--data", str(tmp_path), "--state", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        example.main([*folders, *options.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
