"""Virtual time: the smallest experiment runs without a missing wait, and its claims hold.

Each runs in its own process, since simulated devices must exist before torch is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpus.build import why_not

pytest.importorskip("torchgpipe", reason="the experiments run torchgpipe beside pipert")
pytest.importorskip("tqdm", reason="the experiments show their progress with tqdm")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweep,  # imports torch and torchgpipe, and builds the library
    pytest.mark.timeout(240),  # seconds on a machine that is busy, with the library to be built
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> str:
    """Runs a script, which must succeed; returns its output."""
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the figures of each mode at n=4 m=8, for sleeping stages."""
    path = tmp_path_factory.mktemp("figures") / "figures.json"
    shown = run(
        *("simulated_gpus.py", "speed", "--only", "sleeping", "--short", "--check"),
        *("--repeats", "2", "--json", str(path)),
    )
    assert "simulated, speed-up over the plain module" in shown
    assert "Missing waits: 0 reports." in shown
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def speed_ups(figures: dict[str, Any], mode: str) -> dict[str, float]:
    (one,) = [of for of in figures["speed"] if of["mode"] == mode]
    plain = min(one["plain_ms"])
    return {way.partition(",")[0]: plain / min(of) for way, of in one["steps_ms"].items()}


def test_no_wait_is_missing(figures: dict[str, Any]) -> None:
    assert figures["reports"] == 0


def test_sleeping_stages_reach_the_ideal_speed(figures: dict[str, Any]) -> None:
    found = speed_ups(figures, "never")
    for way in ("pipert", "pipert gpipe", "pipert 1f1b"):
        assert found[way] == pytest.approx(4 * 8 / (8 + 4 - 1), rel=1e-3)
    assert found["torchgpipe"] <= found["pipert"] * 1.001


def test_pipert_takes_as_long_in_each_step(figures: dict[str, Any]) -> None:
    for one in figures["speed"]:
        for way, took in one["steps_ms"].items():
            if way.startswith("pipert"):
                assert min(took) == pytest.approx(max(took), rel=1e-9)


def test_recomputation_costs_a_forward_and_less_in_a_step(figures: dict[str, Any]) -> None:
    for mode in ("except_last", "always"):
        found = speed_ups(figures, mode)
        never = speed_ups(figures, "never")["pipert"]
        assert found["pipert"] < found["pipert gpipe"] < never
    assert speed_ups(figures, "always")["pipert"] < speed_ups(figures, "except_last")["pipert"]


def test_the_simulators_predictions_match_the_steps() -> None:
    shown = run("simulator.py", "--short", "--check")
    assert "sleeping, n=8 m=16, always" in shown
    assert "Every bar held." in shown and "Missing waits: 0 reports." in shown
