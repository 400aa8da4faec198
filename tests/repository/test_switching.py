"""Tests that the job with frequent thread switches really switches threads at every chance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWITCHING = Path(__file__).parents[1] / "switching"


@pytest.mark.slow
def test_every_process_switches_at_every_chance_if_the_folder_is_on_its_path() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.getswitchinterval())"],
        env=os.environ | {"PYTHONPATH": str(SWITCHING)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(found.stdout) == 1e-6


def test_this_process_switches_at_every_chance_if_it_was_asked_to() -> None:
    asked = str(SWITCHING) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    assert (sys.getswitchinterval() < 1e-5) == asked
