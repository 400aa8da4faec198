"""Adds ``--simulated-gpus``, with which CUDA is simulated, and a report fails its test.

A test with a report is rerun with a Python stack for each operation, which would slow down every
test in the first run; the second run's reports are shown. ``--simulated-stacks`` keeps stacks from
the start, for reports that do not recur.

Operations of a test's threads after its end count for that test, too: their reports are found when
the next test begins, and logged as an error of the previous one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests import simulated_gpus
from tests.simulated_gpus import build, child
from tests.simulated_gpus.simulation import Report, Simulation

MOST = 6  # reports shown per test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated-gpus",
        action="store_true",
        help="run the tests marked cuda and multi_gpu on eight simulated GPUs (needs g++)",
    )
    parser.addoption(
        "--simulated-stacks", action="store_true", help="keep Python stacks from the start"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Starts the simulation before a conftest imports torch or output, the build's, is captured."""
    options = early_config.known_args_namespace
    if options.simulated_gpus:
        missing = build.why_not()
        if missing is None:
            gpus = simulated_gpus.start()
            gpus.detect(stacks=options.simulated_stacks)
            early_config.pluginmanager.register(_Watch(gpus, options.simulated_stacks))
        else:
            early_config.pluginmanager.register(_Skip(missing))
    return (yield)


class _Skip:
    """Skips the tests that need devices, because the library cannot be built."""

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def pytest_report_header(self) -> str:
        return self.missing

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("cuda") or item.get_closest_marker("multi_gpu"):
                item.add_marker(pytest.mark.skip(reason=self.missing))


class _Watch:
    """Fails the tests that cause reports."""

    def __init__(self, gpus: Simulation, stacks: bool) -> None:
        self.gpus = gpus
        self.stacks = stacks
        self.reported = False  # whether the running test has caused reports
        self.last: pytest.Item | None = None
        self.tests = {0: "no test"}  # node ids, by the era in which each test began
        self.folder = tempfile.TemporaryDirectory(prefix="simulated_gpus")
        self.by_children = Path(self.folder.name) / "reports"
        os.environ.update(child.environment(self.by_children))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Runs the test as pytest does, and once more if it causes reports."""
        self._log_late_reports()
        hook, where = item.ihook, item.location
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=where)
        phases = self._run(item, nextitem)
        if self.reported and not self.stacks:
            self.gpus.detect(stacks=True)
            item._initrequest()  # type: ignore[attr-defined]  # as pytest-rerunfailures does
            again = self._run(item, nextitem)
            self.gpus.detect(stacks=False)
            phases = again if self.reported else phases
        for phase in phases:
            hook.pytest_runtest_logreport(report=phase)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=where)
        self.last = item
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        self.reported = False
        self.tests[self.gpus.begin_era()] = item.nodeid
        phases: list[pytest.TestReport] = runtestprotocol(item, nextitem=nextitem, log=False)
        self.gpus.begin_era()  # orders the next test's operations after this one's
        return phases

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._watch(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._watch(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._watch(item, "teardown"))

    def _watch(self, item: pytest.Item, phase: str) -> Iterator[None]:
        try:
            result = yield
        except BaseException:
            text = self._take()
            if text:
                item.add_report_section(phase, "simulated GPUs", text)
            raise
        text = self._take()
        if text:
            pytest.fail(text, pytrace=False)
        return result

    def _take(self) -> str:
        """Takes the reports since the last call, as text; empty if there are none."""
        reports = self.gpus.reports()
        self.gpus.clear()
        lines = [self._show(report) for report in reports[:MOST]]
        count = len(reports)
        if self.by_children.exists():
            lines.append(self.by_children.read_text())
            self.by_children.unlink()
            count += lines[-1].count("in process ")  # zero if the child wrote an empty file
        self.reported |= count > 0
        return f"simulated GPUs report {count}:\n" + "\n".join(lines) if count else ""

    def _show(self, report: Report) -> str:
        era = max(era for era in self.tests if era <= report.era)
        newest = max(self.tests)
        origin = f"\n    allocated in {self.tests[era]}" if era != newest else ""
        return f"{report}{origin}"

    def _log_late_reports(self) -> None:
        text = self._take()
        if text and self.last is not None:
            late = pytest.TestReport(
                self.last.nodeid, self.last.location, {}, "failed",
                f"after the end of the test, {text}", "teardown",
            )  # fmt: skip
            self.last.ihook.pytest_runtest_logreport(report=late)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._log_late_reports()
        if session.testsfailed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
