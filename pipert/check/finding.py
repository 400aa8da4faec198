"""What a check has found: data, which the report and the exit status are made of."""

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
    """What was looked at."""
    outcome: str
    """One of the four above. ``'reported'`` is for figures that cannot be right or wrong."""
    seen: str
    """What there was to see, in a sentence or a figure."""
    means: str = ""
    """Of what does not hold: what that means for who uses pipert here."""


@dataclass(frozen=True)
class Measurement:
    """Figures of a check, for a table of their own."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Findings:
    """What there is so far."""

    rows: list[Finding] = field(default_factory=list)
    tables: list[Measurement] = field(default_factory=list)

    @property
    def broken(self) -> list[Finding]:
        """What does not hold."""
        return [row for row in self.rows if row.outcome == BROKEN]


def judged(check: str, faults: list[str], seen: str, means: str) -> Finding:
    """A finding that holds if there are no ``faults``; the first few of them are named."""
    if not faults:
        return Finding(check, HOLDS, seen)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Finding(check, BROKEN, "; ".join(faults[:3]) + more, means)
