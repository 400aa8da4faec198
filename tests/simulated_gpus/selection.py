"""Selects the tests for ``python -m pytest --simulated-gpus``, and prints its summary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import simulated_gpus
from tests.simulated_gpus.cannot_run import CANNOT_RUN, matches, reason

__all__ = ["NAME", "Selection"]

NAME = "pipert simulated selection"
MARKED = "cuda or multi_gpu"


class Selection:
    """Selects the tests that need a GPU, except those that need a real one, and counts results.

    The default is ``-m "cuda or multi_gpu"``, which the user's own ``-m`` replaces; paths and
    ``-k`` choose among the selected tests.
    """

    def __init__(self) -> None:
        self.unmatched: set[str] = set()
        """The patterns of CANNOT_RUN that match no test of the collected files."""
        self.skipped: list[str] = []
        """The tests skipped so far, except those of CANNOT_RUN."""
        self.ran = 0
        self.reports = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.markexpr = config.option.markexpr or MARKED

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        files = {item.nodeid.split("::")[0] for item in items}
        whole = not any("::" in argument for argument in config.args)
        self.unmatched = {p for p in CANNOT_RUN if whole and p.split("::")[0] in files}
        for item in items:
            why = reason(item.nodeid)
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=f"cannot run on simulated GPUs: {why}"))
        self.unmatched -= {p for p in CANNOT_RUN if any(matches(p, i.nodeid) for i in items)}
        yield
        items.sort(key=lambda item: "test_cannot_run.py" in item.nodeid)  # last: it looks at all

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran += 1
        self.reports += "simulated GPUs report" in report.longreprtext
        if report.skipped and reason(report.nodeid) is None:
            self.skipped.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        gpus = simulated_gpus.running()
        if gpus is not None:
            operations = gpus.counts()["operations"]
            terminalreporter.write_line(
                f"simulated GPUs: {self.ran:,} tests ran {operations:,} operations, "
                f"{self.reports} of them made reports"
            )
