"""Runs the tests against one mutant, in a copy of the repository.

Each trial is a separate process, forked from one that has imported torch (see ``preload``): most
mutants are noticed within a second, but importing takes three.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import pytest

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.suite import stages

__all__ = ["Tree", "Verdict"]

SECONDS = 3600.0  # for all tests on two busy cores; more is a hang

_processes = multiprocessing.get_context("forkserver")


class Verdict(NamedTuple):
    """The result of the tests."""

    failed: str
    """The first test that failed; empty if none noticed."""
    how: str
    """Its message, in one line."""
    seconds: float

    @property
    def by(self) -> str:
        """The kind of failure: a report of the simulation, a compared value, or an error."""
        if self.how.startswith(("RACE", "ALLOC", "USE")):
            return "report"
        return "value" if self.how.startswith(("assert", "AssertionError")) else "error"

    def __bool__(self) -> bool:
        """Whether a test noticed."""
        return bool(self.failed)


class Tree:
    """A copy of the repository, in which one mutant after the other is tried.

    It lacks the tests of the mutants themselves, which would notice every one.

    Args:
        root: where it is made.
        tests: the tests to run, if not those of the stages.
        most: the number of the last stage.
    """

    def __init__(self, root: Path, tests: Sequence[str] | None, most: int) -> None:
        self._root = root
        self._tests = tests
        self._most = most
        self._written = 0
        _processes.set_forkserver_preload(["tests.mutants.preload"])
        ignored = shutil.ignore_patterns(
            ".*", "__pycache__", "*.egg-info", "build", "dist", "mutants"
        )
        shutil.copytree(ROOT, root, ignore=ignored, dirs_exist_ok=True)

    def try_out(self, mutant: Mutant, once: bool = False) -> Verdict:
        """Runs the tests of each stage until one notices; runs that again unless ``once``."""
        path = self._root / mutant.file
        seconds = 0.0
        verdict = Verdict("", "", 0.0)
        for tests in [self._tests] if self._tests else stages(mutant)[: self._most]:
            try:
                verdict = self._first_to_notice(tests, path, mutant.mutated(), once)
            finally:
                shutil.copy2(ROOT / mutant.file, path)
            seconds += verdict.seconds
            if verdict:
                break
        return verdict._replace(seconds=seconds)

    def _first_to_notice(
        self, tests: Sequence[str], path: Path, mutated: str, once: bool
    ) -> Verdict:
        """Finds the first test that fails, fails again alone, and passes without the mutant."""
        passed_over: list[str] = []
        seconds = 0.0
        while True:
            self._write(path, mutated)
            verdict = self._run("-x", *[f"--deselect={test}" for test in passed_over], *tests)
            seconds += verdict.seconds
            if once or "::" not in verdict.failed:
                return verdict._replace(seconds=seconds)
            again = self._run(verdict.failed)
            shutil.copy2(ROOT / path.relative_to(self._root), path)
            without = self._run(verdict.failed)
            seconds += again.seconds + without.seconds
            if again and not without:
                return verdict._replace(seconds=seconds)
            passed_over.append(verdict.failed)

    def _write(self, path: Path, source: str) -> None:
        """Writes a file with a new date, so that Python sees that its compiled file is old."""
        path.write_text(source)
        self._written += 1
        os.utime(path, (self._written, self._written))

    def _run(self, *options: str) -> Verdict:
        report, output = self._root / "report.xml", self._root / "output.txt"
        report.unlink(missing_ok=True)
        started = perf_counter()
        arguments = [
            "--simulated-gpus", "--sweep", "-q", "-p", "no:cacheprovider",
            f"--rootdir={self._root}", f"--junitxml={report}", *options,
        ]  # fmt: skip
        process = _processes.Process(target=_pytest, args=(self._root, output, arguments))
        process.start()
        process.join(SECONDS)
        seconds = perf_counter() - started
        if process.is_alive():
            process.kill()
            process.join()
            return Verdict("-", f"no end within {SECONDS:.0f} s", seconds)
        if process.exitcode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return Verdict("", "", seconds)
        if not report.exists() and "Timeout" in output.read_text():
            return Verdict("-", "a test hung", seconds)  # pytest-timeout ended the process
        if process.exitcode != 1:
            raise RuntimeError(
                f"pytest ended with {process.exitcode}: {' '.join(arguments)}\n"
                f"{output.read_text()[-3000:]}"
            )
        return Verdict(*_failure(report), seconds)


def _pytest(root: Path, output: Path, arguments: list[str]) -> None:
    """Runs the tests of the copy in ``root`` against its package. Called in a new process."""
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)  # for the processes that tests start
    sys.dont_write_bytecode = False  # most files are unchanged since the previous trial
    sys.path[:] = [str(root), *[path for path in sys.path if Path(path or ".").resolve() != ROOT]]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pipert

    if Path(pipert.__file__).resolve().parent != (root / "pipert").resolve():
        raise RuntimeError(f"{pipert.__file__} is imported instead of the copy in {root}")
    sys.exit(pytest.main(arguments))


def _failure(report: Path) -> tuple[str, str]:
    """Returns the first test that failed, and its message in one line."""
    for case in ElementTree.parse(report).iter("testcase"):
        for child in case:
            if child.get("message") == "collection failure":
                raise RuntimeError(f"tests that cannot be imported notice nothing:\n{child.text}")
            if child.tag in ("failure", "error"):
                return _node_id(case), _in_a_line(child.get("message") or "")
    raise RuntimeError(f"pytest says that a test has failed, and {report} has none")


def _node_id(case: ElementTree.Element) -> str:
    """Returns the node id, as in ``tests/cuda/test_waits.py::test_name[case]``."""
    file = case.get("classname", "").replace(".", "/") + ".py"
    return f"{'' if file.startswith('tests') else 'tests/'}{file}::{case.get('name')}"


def _in_a_line(message: str) -> str:
    report = re.search(r"(RACE|ALLOC-RACE|USE-AFTER-FREE) on .*?\): (.*)", message)
    if report is not None:
        return f"{report[1]}: {re.sub(r'cuda:[0-9]+/stream[0-9]+', 'a stream', report[2])}"
    return message.strip().partition("\n")[0][:100] or "an error"
