"""Tests the output and the exit status of ``python -m pipert check``, on CPU workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipert.__main__ import main
from pipert.check import command
from pipert.check.command import NO_GPU, _devices
from pipert.check.ways import BROKEN, HOLDS, NOT_CHECKED, REPORTED, Finding, judged
from tests import scripts

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Provides findings in place of those of the checks, and leaves this process's settings."""
    findings = [Finding("values", HOLDS, "all equal"), Finding("speed", REPORTED, "2.0")]
    monkeypatch.setattr(command, "run", lambda devices, effort: iter(findings))
    monkeypatch.setattr(command, "settle", lambda devices: None)
    return findings


@pytest.mark.slow
def test_all_checks_hold_on_two_cpu_workers() -> None:
    script = "import sys; from pipert.__main__ import main; sys.exit(main(sys.argv[1:]))"
    options = ["check", "--quick", "--devices", "cpu,cpu"]
    ended = scripts.run(f"import sys; sys.argv[1:] = {options}; {script}")
    assert ended.returncode == 0, ended.stderr
    assert "No checks failed." in ended.stdout
    lines = [line for line in ended.stdout.splitlines() if line.startswith("* **")]
    assert sum(f"**{HOLDS}**" in line for line in lines) == 4
    assert sum(f"**{NOT_CHECKED}**" in line for line in lines) == 2
    page = PAGE.read_text()
    for line in lines:
        check = line.split("** ")[1].partition(":")[0].partition(" (")[0]
        assert check.partition(" of ")[0] in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_report_without_a_gpu_makes_no_claim_about_gpus(
    capsys: pytest.CaptureFixture[str], found: list[Finding]
) -> None:
    assert main(["check"]) == 0
    assert NO_GPU in capsys.readouterr().out


def test_a_failed_check_is_explained_and_sets_the_exit_status(
    capsys: pytest.CaptureFixture[str], found: list[Finding]
) -> None:
    found.append(Finding("memory", BROKEN, "5 MiB more", "it will run out"))
    assert main(["check", "--devices", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "* **holds** values: all equal\n" in out
    assert "* **DOES NOT HOLD** memory: 5 MiB more. That means: it will run out\n" in out
    assert out.endswith("\n1 check failed.\n")


@pytest.mark.parametrize(
    ("named", "why"), [("cuda:99", "cuda:99"), ("cpu,tpu", "tpu"), ("", "device")]
)
def test_devices_that_are_not_there_are_refused(
    capsys: pytest.CaptureFixture[str], named: str, why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "--devices", named])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "error: --devices: " in error and why in error


def test_a_single_device_has_both_partitions() -> None:
    assert _devices("cpu").partitions == (CPU, CPU)


@pytest.mark.cuda
@pytest.mark.parametrize("named", ["cuda:0", "cuda:0,cpu"])
def test_the_report_for_one_gpu_says_what_is_not_checked(
    named: str, capsys: pytest.CaptureFixture[str], found: list[Finding]
) -> None:
    assert main(["check", "--devices", named]) == 0
    assert command.ONE_GPU in capsys.readouterr().out


def test_a_check_that_raises_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> Iterator[Finding]:
        yield Finding("before", HOLDS, "")
        raise RuntimeError("the device is gone\nand more")

    before, broken = command._found("speed", check)
    assert (before.check, broken.check, broken.outcome) == ("before", "speed", BROKEN)
    assert broken.seen == "RuntimeError: the device is gone"
    assert "Traceback" in capsys.readouterr().err


def test_a_check_without_memory_is_not_checked() -> None:
    def fail() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 bytes.")

    assert [*command._found("speed", fail)] == [
        Finding("speed", NOT_CHECKED, "out of memory: CUDA out of memory")
    ]


def test_only_the_first_faults_are_named() -> None:
    row = judged("memory", ["a", "b", "c", "d", "e"], "fine", "bad")
    assert row == Finding("memory", BROKEN, "a; b; c; and 2 more", "bad")
    assert judged("memory", [], "fine", "bad") == Finding("memory", HOLDS, "fine")
