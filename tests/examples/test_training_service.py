"""Tests the service as a process: killed, told to stop, out of memory, stuck, asked for its health.

Whatever happens to it, it must end up with the state of an undisturbed run, bit for bit. Python and
torch take seconds to start, so one process does that once, and each service is a fork of it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tqdm", reason="the service takes its model from an example that needs tqdm")
pytest.importorskip("prometheus_client", reason="the service shows its metrics with it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
STEPS = 24
OPTIONS = (
    "--context 8 --width 8 --layers 2 --heads 2 --dropout 0.2 --batch 4 --lr 0.01 --save-every 2 "
    f"--port 0 --devices cpu,cpu --chunks 2 --steps {STEPS}"
)
STARTER = """
import json, os, sys, traceback
import torch._dynamo  # which the first step of an optimizer imports
import training_service
from pipert import Pipe

Pipe(torch.nn.Sequential(torch.nn.Identity()), [1], devices=["cpu"]).close()  # starts no thread
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if not pid:
        break
    print(pid, flush=True)
else:
    os._exit(0)  # as below
os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
try:
    exec(order["script"], {})
    training_service.main(order["argv"])
    code = 0
except BaseException:
    traceback.print_exc()
    code = 1
if "tests.simulated_gpus.child" in sys.modules:
    sys.modules["tests.simulated_gpus.child"].leave_reports()
os._exit(code)  # it takes a second to take torch down, and nothing is left to do
"""
HOOKED = """  # the second layer calls `during(step, rows)` when it gets a micro-batch
import os, signal, threading, torch, training_service
from pipert import is_recomputing

calls, build_model = 0, training_service.build_model

def before(layer, args):
    global calls
    if not is_recomputing():
        calls += 1
        during(1 + (calls - 1) // 2, len(args[0]))

def hooked(config):
    model = build_model(config)
    model[1].register_forward_pre_hook(before)
    return model

training_service.build_model = hooked
"""


class Starter:
    """The process from which services are forked."""

    def __init__(self) -> None:
        path = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        quiet = "ignore:Failed to initialize NumPy:UserWarning"  # torch works without NumPy
        more = {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": quiet}
        self.alive: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER], env=os.environ | more,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        answer = int(self.process.stdout.readline())
        self.alive |= set() if "wait" in order else {answer}
        return answer

    def close(self) -> None:
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.close()


class Life:
    """A process of the service."""

    def __init__(self, starter: Starter, argv: list[str], script: str, log: Path) -> None:
        self.starter, self.log = starter, log
        self.pid = starter.ask({"argv": argv, "script": script, "log": str(log)})

    def lines(self, event: str) -> list[dict[str, str]]:
        """Returns the fields of the lines of ``event`` that were logged so far."""
        lines = re.findall(rf" root {event}: (.*)\n", self.text())
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, event: str, count: int = 1) -> dict[str, str]:
        """Waits for the ``count``-th line of ``event``, and returns it."""
        wait_until(lambda: len(self.lines(event)) >= count)
        return self.lines(event)[count - 1]

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.wait_for('serving')['port']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def kill(self, number: int) -> int:
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Waits for the process to end; returns its exit code, negative if a signal ended it."""
        self.starter.alive.discard(self.pid)
        return self.starter.ask({"wait": self.pid})


class Folders:
    """The text and the saved states of one run, which may take several processes."""

    def __init__(self, starter: Starter, path: Path) -> None:
        self.starter, self.path, self.lives = starter, path, 0
        self.data, self.state = path / "data", path / "state"
        self.data.mkdir(parents=True)
        for name in ("one.txt", "two.py"):
            (self.data / name).write_text(f"the pipeline is full of {name}. " * 20)

    def start(self, options: str = "", script: str = "") -> Life:
        self.lives += 1
        folders = ["--data", str(self.data), "--state", str(self.state)]
        log = self.path / f"log {self.lives}"
        argv = [*OPTIONS.split(), *folders, *options.split()]
        return Life(self.starter, argv, HOOKED + script if script else "", log)

    def run(self, options: str = "", script: str = "") -> Life:
        life = self.start(options, script)
        assert life.wait() == 0, life.text()
        return life

    def final(self, step: int = STEPS) -> dict[str, Any]:
        """Loads the last saved state, which must be that of ``step``."""
        newest = max(self.state.glob("*.pt"))
        assert newest.name.startswith(f"step-{step:012}.")
        state: dict[str, Any] = torch.load(newest, weights_only=True)
        return state


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def assert_same(actual: Any, expected: Any) -> None:
    """Asserts that two saved states are equal bit for bit, including random numbers."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def run(starter: Starter, tmp_path: Path) -> Folders:
    return Folders(starter, tmp_path / "run")


@pytest.fixture
def expected(starter: Starter, tmp_path: Path) -> Folders:
    return Folders(starter, tmp_path / "expected")


@pytest.fixture(scope="module")
def undisturbed(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the last state of an undisturbed run."""
    folders = Folders(starter, tmp_path_factory.mktemp("undisturbed") / "run")
    folders.run()
    return folders.final()


# --- killed and told to stop ----------------------------------------------------------------------


@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.sweep)])
def test_a_service_killed_several_times_ends_like_an_undisturbed_one(
    run: Folders, undisturbed: dict[str, Any], times: int
) -> None:
    moments = random.Random(0)
    for k in range(times):
        life = run.start()
        if k % 2:
            life.wait_for("saved", moments.randint(1, 3))
            time.sleep(moments.uniform(0, 0.03))  # any moment of a step will do
        else:
            life.wait_for("serving")
            wait_until(lambda: any(run.state.glob("unfinished")))
        assert life.kill(signal.SIGKILL) == -signal.SIGKILL
    run.run()
    assert_same(run.final(), undisturbed)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_lets_the_service_finish_the_step_and_save(
    run: Folders, undisturbed: dict[str, Any], name: str
) -> None:
    script = f"""
def during(step, rows):
    if step == 5:
        os.kill(os.getpid(), signal.{name})
"""
    assert run.run(script=script).lines("stopped")[0]["step"] == "5"
    assert run.final(5)["steps"] == 5
    run.run()
    assert_same(run.final(), undisturbed)


# --- out of memory, and stuck ---------------------------------------------------------------------


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError", "MemoryError"])
def test_a_step_out_of_memory_is_done_once_with_more_micro_batches(
    run: Folders, expected: Folders, error: str
) -> None:
    script = f"""
def during(step, rows):
    if rows > 1:
        raise {error}("there is room for one row")
"""
    expected.run("--chunks 4 --steps 10")
    first = run.run("--steps 6", script)
    assert first.lines("out of memory") == [{"step": "1", "chunks": "4"}]
    run.run("--steps 10")  # has memory enough, and goes on as it was
    assert_same(run.final(10), expected.final(10))


def test_a_stuck_step_ends_the_service_and_says_where(run: Folders) -> None:
    script = """
def during(step, rows):
    if step > 3:
        threading.Event().wait()
"""
    life = run.start("--timeout 1.5", script)
    assert life.wait() == 3
    for text in ("CRITICAL root stuck", "PipelineTimeout", "pipert-cpu-0", "in during"):
        assert text in life.text()


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
    life = run.start("--steps 100000 --timeout 15 --save-every 1000", script)
    wait_until(lambda: "micro-batch 0" in life.get("/healthz")[1])
    code, answer = life.get("/healthz")
    metrics = life.get("/metrics")[1]
    gate.write_bytes(b"")
    wait_until(lambda: life.get("/healthz") == (200, '{"problems": []}'))
    assert life.kill(signal.SIGTERM) == 0

    assert code == 503
    assert [problem.split(" for ")[0] for problem in json.loads(answer)["problems"]] == [
        "no step was finished",
        "pipert-cpu-0 has been at partition 0, micro-batch 0",
    ]
    assert 'pipert_runs_total{outcome="succeeded",pipe="training"} 3.0' in metrics
    assert re.search(r"^training_loss \d+\.", metrics, re.MULTILINE)
