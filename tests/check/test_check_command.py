"""Tests the output and the exit status of ``python -m pipert check``, on CPU workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipert.__main__ import main
from pipert.check import command, links, memory, overlap, repeats, speed, values
from pipert.check.command import NO_GPU, QUICK, _devices, run
from pipert.check.finding import BROKEN, HOLDS, NOT_CHECKED, REPORTED, Finding, Findings, judged
from pipert.check.ways import Devices

CPU = torch.device("cpu")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["check", *options])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Findings:
    """Provides findings in place of those of the checks, none of which are run."""
    findings = Findings([Finding("values", HOLDS, "all equal"), Finding("speed", REPORTED, "2.0")])
    monkeypatch.setattr(command, "run", lambda devices, effort: findings)
    return findings


@pytest.mark.slow
def test_all_checks_hold_on_two_cpu_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    assert main(["check", "--quick", "--devices", "cpu,cpu", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "Everything that was checked holds. Not checked: 3 of 12." in out
    data: dict[str, Any] = json.loads(path.read_text())
    assert data["holds"] and data["devices"] == ["cpu", "cpu"]
    outcomes = {row["check"]: row["outcome"] for row in data["checks"]}
    assert list(outcomes.values()).count(HOLDS) == 7
    assert {name for name, outcome in outcomes.items() if outcome == NOT_CHECKED} == {
        "peak memory", "copies beside computation", "copies by torch alone",
    }  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    for name in outcomes:
        assert f"| {name} " in out and f"  {name}: " in err
        assert name.partition(" (")[0].removeprefix("values ") in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_report_without_a_gpu_makes_no_claim_about_gpus(
    capsys: pytest.CaptureFixture[str], found: Findings
) -> None:
    assert main(["check"]) == 0
    out, err = capsys.readouterr()
    assert NO_GPU in out and NO_GPU in err


def test_a_failed_check_is_explained_and_sets_the_exit_status(
    capsys: pytest.CaptureFixture[str], found: Findings
) -> None:
    found.rows.append(Finding("memory", BROKEN, "5 MiB more", "it will run out"))
    assert main(["check", "--devices", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "**DOES NOT HOLD** memory: 5 MiB more. it will run out." in out
    assert "1 of 3 checks do not hold." in out


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("cuda:99", "cuda:99"),
        ("cpu,tpu", "tpu"),
        ("", "device"),
        (",".join(["cpu"] * 17), "17 are too many; at most 16"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    capsys: pytest.CaptureFixture[str], named: str, why: str
) -> None:
    error = refused(capsys, "--devices", named)
    assert "error: --devices: " in error and why in error


@pytest.mark.parametrize("path", [".", "nowhere/report.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    assert "error: --json must be a file in a folder that is there" in refused(
        capsys, "--json", path
    )


def test_an_option_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --fast" in refused(capsys, "--fast")


def test_a_single_device_has_both_partitions() -> None:
    assert _devices("cpu")[0].partitions == (CPU, CPU)


@pytest.mark.cuda
@pytest.mark.parametrize("named", ["cuda:0", "cuda:0,cpu"])
def test_the_report_for_one_gpu_lists_the_checks_left_out(named: str) -> None:
    assert _devices(named)[1] == [command.ONE_GPU]


def test_a_check_that_raises_is_a_finding_and_the_others_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("the device is gone\nand more")

    for others in (links, memory, overlap, repeats, values):
        monkeypatch.setattr(others, "check", lambda *_: iter(()))
    monkeypatch.setattr(overlap, "check_copies", lambda *_: iter(()))
    monkeypatch.setattr(speed, "check", fail)
    findings = run(Devices((CPU, CPU)), QUICK)
    assert [row.check for row in findings.rows] == ["errors of layers", "speed"]
    (broken,) = findings.broken
    assert broken.seen == "RuntimeError: the device is gone"
    assert "Traceback" in capsys.readouterr().err


def test_a_check_without_memory_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 bytes.")

    findings = Findings()
    command._run(findings, "speed", fail)
    assert findings.rows == [Finding("speed", NOT_CHECKED, "out of memory: CUDA out of memory")]


def test_settings_of_the_process_are_put_back(found: Findings) -> None:
    def settings() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        mode = torch.get_deterministic_debug_mode()
        return cudnn.allow_tf32, cudnn.benchmark, torch.get_num_threads(), mode

    before = settings()
    assert main(["check", "--devices", "cpu"]) == 0
    assert settings() == before


def test_only_the_first_faults_are_named() -> None:
    row = judged("memory", ["a", "b", "c", "d", "e"], "fine", "bad")
    assert row == Finding("memory", BROKEN, "a; b; c; and 2 more", "bad")
    assert judged("memory", [], "fine", "bad") == Finding("memory", HOLDS, "fine")


def test_the_report_is_a_table_in_markdown() -> None:
    findings = Findings([Finding("a | b", HOLDS, "yes")])
    text = findings.markdown(Devices((CPU, CPU)), {"torch": "1.0"}, ["a remark"])
    assert text == (
        "## pipert check\n\n* torch: 1.0\n* partitions on: cpu, cpu\n* a remark\n\n"
        "### Checks\n\n"
        "| check | result | seen |\n| ----- | ------ | ---- |\n| a / b | holds  | yes  |\n\n"
        "Everything that was checked holds."
    )
    assert findings.as_json(Devices((CPU,)), {}, [])["checks"][0]["check"] == "a | b"


def test_checks_left_out_are_counted() -> None:
    findings = Findings([Finding("a", HOLDS, ""), Finding("b", NOT_CHECKED, "")])
    assert findings.verdict() == ["Everything that was checked holds. Not checked: 1 of 2."]
