"""Collects the findings of checks and formats the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from pipert.check.ways import Devices

__all__: list[str] = []

HOLDS = "holds"
BROKEN = "does not hold"
REPORTED = "reported"
NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """A row of the table of checks."""

    check: str
    """What was checked."""
    outcome: str
    """One of the four constants above. ``'reported'``: figures that are neither right nor wrong."""
    seen: str
    """What was observed, in a sentence or a figure."""
    means: str = ""
    """If it does not hold: what that means for users of pipert on this machine."""


@dataclass(frozen=True)
class Measurement:
    """The figures of a check, shown in a separate table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Found: TypeAlias = Finding | Measurement
"""What a check yields."""


@dataclass
class Findings:
    """The findings of all checks so far."""

    rows: list[Finding] = field(default_factory=list)
    tables: list[Measurement] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Appends a row or a table."""
        if isinstance(found, Measurement):
            self.tables.append(found)
        else:
            self.rows.append(found)

    @property
    def broken(self) -> list[Finding]:
        """The findings that do not hold."""
        return [row for row in self.rows if row.outcome == BROKEN]

    def markdown(self, devices: Devices, versions: dict[str, str], remarks: list[str]) -> str:
        """Formats the whole report."""
        lines = ["## pipert check", ""]
        lines += [f"* {name}: {version}" for name, version in versions.items()]
        lines += [f"* partitions on: {', '.join(map(str, devices.partitions))}"]
        lines += [f"* {remark}" for remark in remarks]
        rows = tuple((row.check, row.outcome, row.seen) for row in self.rows)
        lines += ["", *_table(Measurement("Checks", ("check", "result", "seen"), rows))]
        for measurement in self.tables:
            lines += ["", *_table(measurement)]
        return "\n".join([*lines, "", *self.verdict()])

    def verdict(self) -> list[str]:
        """Formats the last lines: what does not hold, and what that means."""
        lines = [f"**DOES NOT HOLD** {r.check}: {r.seen}. {r.means}." for r in self.broken]
        unchecked = sum(row.outcome == NOT_CHECKED for row in self.rows)
        rest = f" Not checked: {unchecked} of {len(self.rows)}." if unchecked else ""
        if not lines:
            return [f"Everything that was checked holds.{rest}"]
        return [*lines, "", f"{len(lines)} of {len(self.rows)} checks do not hold.{rest}"]

    def as_json(self, devices: Devices, versions: dict[str, str], remarks: list[str]) -> Any:
        """Returns the report as plain data."""
        return {
            "versions": versions,
            "devices": [str(device) for device in devices.partitions],
            "remarks": remarks,
            "holds": not self.broken,
            "checks": [asdict(row) for row in self.rows],
            "tables": [
                {"title": t.title, "rows": [dict(zip(t.columns, r, strict=True)) for r in t.rows]}
                for t in self.tables
            ],
        }


def judged(check: str, faults: list[str], seen: str, means: str) -> Finding:
    """Makes a finding that holds if there are no ``faults``; it names the first few of them."""
    if not faults:
        return Finding(check, HOLDS, seen)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Finding(check, BROKEN, "; ".join(faults[:3]) + more, means)


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
