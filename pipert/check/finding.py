"""The findings of checks: data for the report and the exit status."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """One of the four above. ``'reported'`` is for figures that cannot be right or wrong."""
    seen: str
    """What was observed, in a sentence or a figure."""
    means: str = ""
    """If it does not hold: what that means for users of pipert on this machine."""


@dataclass(frozen=True)
class Measurement:
    """Figures of a check, shown in a separate table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Findings:
    """The findings so far."""

    rows: list[Finding] = field(default_factory=list)
    tables: list[Measurement] = field(default_factory=list)

    @property
    def broken(self) -> list[Finding]:
        """The findings that do not hold."""
        return [row for row in self.rows if row.outcome == BROKEN]


def judged(check: str, faults: list[str], seen: str, means: str) -> Finding:
    """Makes a finding that holds if there are no ``faults``, and names the first few of them."""
    if not faults:
        return Finding(check, HOLDS, seen)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Finding(check, BROKEN, "; ".join(faults[:3]) + more, means)
