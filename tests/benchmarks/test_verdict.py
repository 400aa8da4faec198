"""Tests a benchmark's one verdict: it comes last, covers all tables, and is the exit status."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

pytest.importorskip("torchgpipe", reason="the benchmarks run torchgpipe beside pipert")

from _measure import Row, verdict  # noqa: E402

HELD, MISSED = Row(("held",)), Row(("missed",), ("this one: 2, the bar is 1",))

Shown = pytest.CaptureFixture[str]


@pytest.mark.parametrize("check", [True, False])
def test_a_missing_wait_is_always_a_failure(check: bool, capsys: Shown) -> None:
    assert verdict([], check=check, reports=["no wait here"]) == 1
    assert "Missing waits: 1 reports.\nno wait here\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("benchmark", "tables"),
    [
        ("overhead", {"host_cost": 5, "live_activations": 6}),
        ("balance", {"optimum": 3, "large": 2}),
    ],
)
@pytest.mark.parametrize("missing", [0, 1, None])
def test_no_table_hides_what_another_missed(
    benchmark: str,
    tables: dict[str, int],
    missing: int | None,
    capsys: Shown,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def table(row: Row, columns: int) -> Callable[..., list[Row]]:
        return lambda *_: [Row(("x",) * columns, row.missed)]

    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # for all tests that follow
    program = importlib.import_module(benchmark)
    for k, (name, columns) in enumerate(tables.items()):
        monkeypatch.setattr(program, name, table(MISSED if missing == k else HELD, columns))
    if benchmark == "overhead":
        monkeypatch.setattr(program, "check_counter", lambda _: "")
        monkeypatch.setattr(program, "cost_of_check", table(HELD, 5))
    else:
        monkeypatch.setattr(program, "steadiness", table(HELD, 4))
    assert program.main(["--check"]) == (missing is not None)
    last = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    assert set(last) == {"Every bar held." if missing is None else f"MISSED: {MISSED.missed[0]}"}
