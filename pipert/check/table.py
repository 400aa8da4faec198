"""Formats the report: Markdown to paste, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipert.check.finding import NOT_CHECKED, Findings, Measurement
from pipert.check.ways import Devices

__all__: list[str] = []


def markdown(
    findings: Findings, devices: Devices, versions: dict[str, str], remarks: Sequence[str]
) -> str:
    """Formats the whole report."""
    lines = ["## pipert check", ""]
    lines += [f"* {name}: {version}" for name, version in versions.items()]
    lines += [f"* partitions on: {', '.join(map(str, devices.partitions))}"]
    lines += [f"* {remark}" for remark in remarks]
    rows = tuple((row.check, row.outcome, row.seen) for row in findings.rows)
    lines += ["", *_table(Measurement("Checks", ("check", "result", "seen"), rows))]
    for measurement in findings.tables:
        lines += ["", *_table(measurement)]
    return "\n".join([*lines, "", *verdict(findings)])


def verdict(findings: Findings) -> list[str]:
    """Formats the last lines: what does not hold, and what it means."""
    lines = [f"**DOES NOT HOLD** {r.check}: {r.seen}. {r.means}." for r in findings.broken]
    left_out = sum(row.outcome == NOT_CHECKED for row in findings.rows)
    rest = f" Not checked: {left_out} of {len(findings.rows)}." if left_out else ""
    if not lines:
        return [f"Everything that was checked holds.{rest}"]
    return [*lines, "", f"{len(lines)} of {len(findings.rows)} checks do not hold.{rest}"]


def as_json(
    findings: Findings, devices: Devices, versions: dict[str, str], remarks: Sequence[str]
) -> dict[str, Any]:
    """Returns the report as plain data."""
    return {
        "versions": versions,
        "devices": [str(device) for device in devices.partitions],
        "remarks": list(remarks),
        "holds": not findings.broken,
        "checks": [asdict(row) for row in findings.rows],
        "tables": [
            {
                "title": table.title,
                "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
            }
            for table in findings.tables
        ],
    }


def _table(measurement: Measurement) -> Iterator[str]:
    """Formats a title and an aligned table."""
    cells = [measurement.columns, *measurement.rows]
    cells = [tuple(cell.replace("|", "/") for cell in row) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield f"### {measurement.title}"
    yield ""
    for row in (cells[0], tuple("-" * width for width in widths), *cells[1:]):
        padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(padded)} |"
