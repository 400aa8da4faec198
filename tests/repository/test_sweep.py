"""Tests which cases pytest runs with ``--sweep`` and without, and what it says of the others."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PROGRAM = """
from typing import NamedTuple
import pytest

class Case(NamedTuple):
    a: int
    b: list
    c: str

CASES = [Case(a, [b], c) for a in (1, 2) for b in (1, 2) for c in "xy"]

@pytest.mark.sweep
def test_left_out(): pass

def test_always(): pass

@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_once(k): pass

@pytest.mark.pairwise(keep=lambda a, b, c: a == b == c == 2)
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("c", [1, 2])
def test_pairs(a, b, c): pass

@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.a}{case.b[0]}{case.c}")
def case(request): return request.param

@pytest.mark.pairwise
def test_record(case): pass

@pytest.mark.pairwise
def test_same_record(case): pass
"""


@functools.cache
def collected(folder: Path, *options: str) -> dict[str, list[str]]:
    """Returns the cases of each test that pytest would run."""
    (folder / "test_program.py").write_text(PROGRAM)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    sweep\n    pairwise\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.sweep", "-q",
               "-p", "no:cacheprovider", "--collect-only", f"--rootdir={folder}",
               *options, str(folder)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if "::" in line:
            name, _, case = line.rpartition("::")[2].partition("[")
            found.setdefault(name.removeprefix("test_"), []).append(case.removesuffix("]"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


def test_pairs_and_kept_cases_run_without_the_option(folder: Path) -> None:
    found = collected(folder)
    assert found["always"] == [""] and found["once"] == ["1"] and "left_out" not in found
    assert 4 < len(found["pairs"]) < 8 and "2-2-2" in found["pairs"]
    assert len(found["record"]) == 4 and found["record"] == found["same_record"]


@pytest.mark.sweep
def test_a_share_of_the_cases_left_out_runs(folder: Path) -> None:
    whole = collected(folder, "--sweep", "-m", "sweep")
    some = collected(folder, "--sweep", "--every", "2")
    assert some["always"] == [""] and some["once"][0] == "1"  # what is never left out runs
    chosen = collected(folder, "--sweep", "--every", "2", "-m", "sweep")
    count = sum(map(len, whole.values()))
    assert 0 < sum(map(len, chosen.values())) < count
    assert all(set(cases) <= set(whole[name]) for name, cases in chosen.items())
