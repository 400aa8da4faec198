"""Tests ``python -m pipert check`` on CPU workers: it holds for pipert, and notices a fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import check
from pipert.__main__ import main
from pipert.check import BROKEN, HOLDS, NOT_CHECKED, Finding, difference, judged
from pipert.stage.gradients import Gradients
from tests.helpers import scripts

TWO = [torch.device("cpu")] * 2
PAGE = Path(__file__).parents[2] / "docs" / "your_devices.md"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Provides findings in place of those of the checks, and leaves this process's settings."""
    findings = [Finding("values", HOLDS, "all equal")]
    monkeypatch.setattr(check, "run", lambda devices, *sizes: iter(findings))
    monkeypatch.setattr(check, "settle", lambda devices: None)
    return findings


@pytest.mark.slow
def test_all_checks_hold_on_two_cpu_workers() -> None:
    script = "import sys; from pipert.__main__ import main; sys.exit(main(sys.argv[1:]))"
    options = ["check", "--quick", "--devices", "cpu,cpu"]
    ended = scripts.run(f"import sys; sys.argv[1:] = {options}; {script}")
    assert ended.returncode == 0, ended.stderr
    assert "partitions on cpu, cpu" in ended.stdout and "No checks failed." in ended.stdout
    lines = [line for line in ended.stdout.splitlines() if line.startswith("* **")]
    assert [line.split("**")[1] for line in lines] == [HOLDS] * 3 + [NOT_CHECKED]
    page = PAGE.read_text()
    assert all(f"\n| {line.split('** ')[1].partition(':')[0].split(' (')[0]} |" in page
               for line in lines)  # fmt: skip


# Faults


def change_gradients(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the gradients of a step be something else."""
    take = Gradients.take

    def changed(self: Gradients) -> list[tuple[Tensor, Tensor]]:
        return [(weight, change(gradient)) for weight, gradient in take(self)]

    monkeypatch.setattr(Gradients, "take", changed)


@pytest.mark.slow
def test_a_gradient_that_is_wrong_by_a_millionth_is_noticed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    change_gradients(monkeypatch, lambda gradient: gradient * (1 + 1e-6))
    (found,) = check.check_values("values", check.transformer(2), TWO, 0)
    assert found.outcome == BROKEN
    assert "Pipe, gpipe, checkpoint='never': the gradient of " in found.seen
    assert "differs by 1.0e-06 of its largest entry" in found.seen
    assert "and 9 more" in found.seen  # not loss.backward()


@pytest.mark.slow
def test_a_last_bit_that_varies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))
    change_gradients(monkeypatch, lambda g: g * (1 + 1e-6 * next(calls)))
    chain = check.chain(2, 4, depth=1, width=8, rows=4, dropout=0.2)
    (found,) = check.check_repeats("repeats", chain, TWO, 2)
    assert found.outcome == BROKEN
    assert "Pipe, gpipe, checkpoint='never': 1 of 1 have other bits" in found.seen
    assert "and 9 more" in found.seen


def test_a_check_that_raises_is_a_finding_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Iterator[Finding]:
        yield Finding("before", HOLDS, "")
        raise RuntimeError("the device is gone\nand more")

    monkeypatch.setattr(check, "check_values", fail)
    monkeypatch.setattr(check, "check_repeats", lambda *_: [Finding("next", HOLDS, "")])
    before, broken, *_, following, memory = check.run(TWO, *check.QUICK)
    assert (before.check, broken.check) == ("before", "values (transformer)")
    assert broken.outcome == BROKEN
    assert broken.seen.startswith("RuntimeError: the device is gone. That means: ")
    assert (following.check, memory.outcome) == ("next", NOT_CHECKED)
    assert "Traceback" in capsys.readouterr().err


# What is compared


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({"loss": torch.tensor(2.0), "gradient": None}, (0.0, "nothing")),
        ({"loss": torch.tensor(2.5), "gradient": None}, (0.25, "loss")),
        ({"loss": torch.tensor(float("nan")), "gradient": None}, (float("inf"), "loss")),
        ({"loss": torch.tensor(2.0), "gradient": torch.ones(())}, (float("inf"), "gradient")),
        ({"loss": None, "gradient": None}, (float("inf"), "loss")),
    ],
)
def test_the_largest_difference_is_named(
    found: dict[str, Tensor | None], worst: tuple[float, str]
) -> None:
    assert difference(found, {"loss": torch.tensor(2.0), "gradient": None}) == worst


# The report


def test_a_failed_check_is_explained_and_sets_the_exit_status(
    capsys: pytest.CaptureFixture[str], found: list[Finding]
) -> None:
    found.append(judged("memory", ["5 MiB more"], "fine", "it will run out"))
    assert main(["check", "--devices", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "* **holds** values: all equal\n" in out
    assert "* **DOES NOT HOLD** memory: 5 MiB more. That means: it will run out\n" in out
    assert out.endswith("\n1 check failed.\n")
