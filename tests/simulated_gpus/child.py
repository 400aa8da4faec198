"""Starts the simulation in a program that a test runs, once the program imports torch."""

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
    """What a child's environment needs: it appends its reports to the file."""
    here = str(Path(__file__).parent / "in_children")
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{here}:{others}" if others else here, REPORTS: str(reports)}


def start_with_torch() -> None:
    """Start the simulation as soon as torch is imported: most programs of tests never do so."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds torch, once, and lets it be loaded with the simulation before it and after it."""

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
    """Append the reports to the parent's file: at exit, or before ``os._exit``, which has none."""
    gpus = simulated_gpus.running()
    file = os.environ.get(REPORTS)
    if gpus is None or file is None:
        return
    reports = gpus.reports()
    gpus.clear()
    with open(file, "a") as out:
        out.writelines(f"in process {os.getpid()}: {report}\n" for report in reports)
