"""Starts the simulation in a program run by a test, when the program imports torch."""

from __future__ import annotations

import atexit
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests import simulated_gpus

__all__ = ["REPORTS", "environment", "leave_reports", "start_with_torch"]

REPORTS = "SIMULATED_GPUS_REPORTS"


def environment(reports: Path) -> dict[str, str]:
    """Returns the environment in which a child simulates, and appends its reports to the file."""
    folder = str(Path(__file__).parent / "in_children")
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{path}" if path else folder, REPORTS: str(reports)}


def start_with_torch() -> None:
    """Starts the simulation when torch is imported: most programs of tests never import it."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import hook that loads the two halves of the simulation before and after torch, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        simulated_gpus.load()
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_start(module: ModuleType) -> None:
            load(module)
            simulated_gpus.pretend_loaded()
            atexit.register(leave_reports)

        setattr(spec.loader, "exec_module", load_and_start)  # noqa: B010
        return spec


def leave_reports() -> None:
    """Appends the reports to the parent's file, at exit or, by hand, before ``os._exit``."""
    gpus = simulated_gpus.running()
    file = os.environ.get(REPORTS)
    if gpus is None or file is None:
        return
    reports = gpus.reports()
    gpus.clear()
    with open(file, "a") as out:
        out.writelines(f"in process {os.getpid()}: {report}\n" for report in reports)
