"""Formats the table as Markdown: what was removed, and which test noticed."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants.mutant import Mutant
from tests.mutants.trial import Verdict

__all__ = ["HEADER", "row", "summary"]

HEADER = """\
| mutant | taken out | in | noticed by | by | in words |
|---|---|---|---|---|---|"""


def row(mutant: Mutant, verdict: Verdict) -> str:
    """Formats what was removed, which test noticed, and how."""
    kind = verdict.by if verdict else ""
    return (
        f"| {mutant.name} | {mutant.what} | {mutant.file.removeprefix('pipert/')} "
        f"| {_noticed_by(verdict)} | {kind} | {_escaped(verdict.how)} |"
    )


def summary(verdicts: Sequence[Verdict]) -> str:
    """Describes how many were noticed."""
    reports = sum(verdict.by == "report" for verdict in verdicts)
    survivors = sum(not verdict for verdict in verdicts)
    of_reports = f", {reports} of them by a report of the simulation" if reports else ""
    return (
        f"{len(verdicts)} mutants, {len(verdicts) - survivors} noticed{of_reports}; {survivors} "
        f"survive. {sum(verdict.seconds for verdict in verdicts) / 60:.0f} minutes."
    )


def _noticed_by(verdict: Verdict) -> str:
    if "::" in verdict.failed:
        return f"`{verdict.failed.removeprefix('tests/').partition('[')[0]}`"
    return verdict.failed or "**nobody**"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
