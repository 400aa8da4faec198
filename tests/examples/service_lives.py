"""Starts, queries and kills processes of the training service, for its tests.

Python and torch take seconds to start, and the first pipe of a process takes a tenth of a second.
So one process does all that once, and each service is a fork of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    ),
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning",  # torch works without NumPy
}
MODEL = "--context 8 --width 8 --layers 2 --heads 2 --dropout 0.2 --batch 4 --warmup 4 --lr 0.01"
STEPS = 24
OPTIONS = f"{MODEL} --save-every 2 --keep 2 --log-every 1 --port 0 --devices cpu,cpu --chunks 2"

STARTER = """
import json, os, sys
import torch._dynamo  # which the first step of an optimizer imports
import training_service
from pipert import Pipe
from service.loop import Service

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
names = {"Service": Service}
exec(order["script"], names)
code = training_service.main(order["argv"], names["Service"])
if "tests.simulated_gpus.child" in sys.modules:
    sys.modules["tests.simulated_gpus.child"].leave_reports()
os._exit(code)  # it takes a second to take torch down, and nothing is left to do
"""

# A service whose second layer calls `during(step, rows)` when it gets a micro-batch.
HOOKED = """
import os, signal, threading
import torch
from prometheus_client.parser import text_string_to_metric_families
from pipert import is_recomputing

calls = 0

def before(layer, args):
    global calls
    if not is_recomputing():
        calls += 1
        during(1 + (calls - 1) // 2, len(args[0]))

class Service(Service):
    def build_model(self):
        model = super().build_model()
        model[1].register_forward_pre_hook(before)
        return model
"""


class Life:
    """A process of the service."""

    def __init__(self, starter: Starter, argv: list[str], script: str, log: Path) -> None:
        self.starter, self.log = starter, log
        self.pid = starter.ask({"argv": argv, "script": script, "log": str(log)})

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """Returns the JSON objects logged so far, or only those of ``event``."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in lines if event in (None, line["event"])]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines("step")}

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """Waits for the ``count``-th line of ``event``, and returns it."""
        wait_until(lambda: len(self.lines(event)) >= count)
        return self.lines(event)[count - 1]

    def get(self, path: str) -> tuple[int, str]:
        port = self.wait_for("serving")["port"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name and labels, as in ``name label=value label=value``."""
        code, text = self.get("/metrics")
        assert code == 200
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
                found[" ".join([sample.name, *labels])] = sample.value
        return found

    def kill(self, number: int) -> int:
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Waits for the process to end; returns its exit code, negative if a signal ended it."""
        self.starter.alive.discard(self.pid)
        return self.starter.ask({"wait": self.pid})


class Starter:
    """The process from which services are forked."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

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


class Folders:
    """The text and the saved states of one run, which may take several processes."""

    def __init__(self, starter: Starter, path: Path) -> None:
        self.starter, self.path = starter, path
        self.data, self.state = path / "data", path / "state"
        self.lives = 0
        self.data.mkdir()
        for name in ("one.txt", "two.py"):
            (self.data / name).write_text(f"the pipeline is full of {name}. " * 20)

    def start(self, options: str = f"--steps {STEPS}", script: str = "") -> Life:
        self.lives += 1
        argv = [*OPTIONS.split(), "--data", str(self.data), "--state", str(self.state)]
        log = self.path / f"log {self.lives}"
        return Life(self.starter, [*argv, *options.split()], script, log)

    def run(self, options: str = f"--steps {STEPS}", script: str = "") -> Life:
        life = self.start(options, script)
        assert life.wait() == 0, life.lines()[-1]
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


def assert_same(actual: Any, expected: Any, place: str = "state") -> None:
    """Asserts that two saved states are equal bit for bit, including random numbers."""
    assert type(actual) is type(expected), place
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), place
        for key in expected:
            assert_same(actual[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), place
        for k, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{place}[{k}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), place
    else:
        assert actual == expected, place
