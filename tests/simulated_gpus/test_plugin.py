"""The pytest plugin: a report fails its test, and shows both stacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_gpus import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweep,  # each imports torch several times
    pytest.mark.timeout(240),  # the first of them may have to build
    pytest.mark.skipif(build.why_not() is not None, reason="there is no g++"),
]

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, subprocess, sys, threading
import pytest, torch

pytestmark = pytest.mark.cuda

def race():
    x = torch.ones(8, device="cuda:0")
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        x.add_(1)

@pytest.fixture
def before():
    race()

@pytest.fixture
def after():
    yield
    race()

go = threading.Event()
late = threading.Thread(target=lambda: (go.wait(), race()))

def test_clean(): torch.ones(8, device="cuda:0").add_(1)
def test_in_the_call(): race()
def test_in_its_setup(before): pass
def test_in_its_teardown(after): pass
def test_fails_anyway():
    race()
    assert False, "its own message"
def test_leaves_a_thread(): late.start()
def test_in_a_child():
    subprocess.run([sys.executable, "-c", CHILD], check=True)

CHILD = '''
import torch
x = torch.ones(8, device="cuda:3")
with torch.cuda.stream(torch.cuda.Stream("cuda:3")):
    x.add_(1)
'''
"""


def run(folder: Path, *names: str, path: str | None = None) -> str:
    (folder / "test_program.py").write_text(PROGRAM)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda\n    multi_gpu\n")
    (folder / "conftest.py").write_text(CONFTEST)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SIMULATED")}
    environment["PYTHONPATH"] = str(ROOT)
    if path is not None:
        environment["PATH"] = path
    command = [sys.executable, "-m", "pytest", "-p", "tests.simulated_gpus.plugin", "-rA", "-v",
               "--simulated-gpus", "-p", "no:cacheprovider", "-k", " or ".join(names)]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


CONFTEST = '''
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logfinish(nodeid):
    """The thread that a test has left goes on when the test is over."""
    if "leaves_a_thread" in nodeid:
        import test_program
        test_program.go.set()
        test_program.late.join()
'''


def test_each_report_fails_the_test_that_it_belongs_to_and_shows_both_stacks(
    tmp_path: Path,
) -> None:
    out = run(tmp_path, "clean", "in", "anyway", "thread")
    assert "PASSED test_program.py::test_clean" in out
    assert "FAILED test_program.py::test_in_the_call" in out
    assert "ERROR test_program.py::test_in_its_setup" in out
    assert "ERROR test_program.py::test_in_its_teardown" in out
    assert "FAILED test_program.py::test_in_a_child" in out
    assert "ERROR test_program.py::test_leaves_a_thread" in out
    assert "4 failed" not in out and "3 failed, 3 passed, 3 errors" in out
    call = out[out.index("test_in_the_call ___") : out.index("test_fails_anyway ___")]
    assert call.count("test_program.py:8 race") >= 1, "the stack of what wrote before"
    assert call.count("test_program.py:10 race") >= 1, "the stack of what writes now"
    assert "its own message" in out and out.count("RACE on cuda:0") >= 4
    assert "in process" in out and "RACE on cuda:3" in out
    assert "after the end of the test, simulated GPUs report" in out


def test_tests_without_a_compiler_are_skipped_with_a_remedy(tmp_path: Path) -> None:
    out = run(tmp_path, "clean", path=str(tmp_path))
    assert "SKIPPED" in out and "install it (Debian: apt install g++)" in out
    assert "failed" not in out and "error" not in out.lower()


def test_a_program_runs_on_simulated_gpus_by_itself(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.partition("CHILD = '''")[2].partition("'''")[0])
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_gpus", str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "RACE on cuda:3" in done.stderr
    assert "program.py:5" in done.stderr
