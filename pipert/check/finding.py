"""Defines what a check finds: a line of the report."""

from __future__ import annotations

from dataclasses import dataclass

__all__: list[str] = []

HOLDS = "holds"
BROKEN = "DOES NOT HOLD"
REPORTED = "reported"
NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    check: str
    """What was checked."""
    outcome: str
    """One of the four constants above. ``'reported'``: figures that are neither right nor wrong."""
    seen: str
    """What was observed, in a sentence or a figure."""
    means: str = ""
    """If it does not hold: what that means for users of pipert on this machine."""

    def __str__(self) -> str:
        means = f". That means: {self.means}" if self.outcome == BROKEN else ""
        return f"* **{self.outcome}** {self.check}: {self.seen}{means}"


def judged(check: str, faults: list[str], seen: str, means: str) -> Finding:
    """Makes a finding that holds if there are no ``faults``; it names the first few of them."""
    if not faults:
        return Finding(check, HOLDS, seen)
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Finding(check, BROKEN, "; ".join(faults[:3]) + more, means)
