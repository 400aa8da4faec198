"""The tables of mutants fit the package: none is out of date, no place of a wait is without one.

Whether the tests notice them is shown by ``python -m tests.mutants``.
"""

from __future__ import annotations

import ast

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.printed import row, summary
from tests.mutants.sites import REASONS, sites, without_mutant
from tests.mutants.trial import Verdict

each = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@each
def test_a_mutant_s_text_occurs_once_and_what_is_left_compiles(mutant: Mutant) -> None:
    mutated = mutant.mutated()
    assert mutated != mutant.source()
    ast.parse(mutated)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_each_use_of_streams_has_a_mutant_or_a_reason() -> None:
    """Write a mutant for what is new in tests/mutants/of_....py, or say in ``REASONS`` why not."""
    left = without_mutant(MUTANTS)
    assert [str(site) for site in left if (site.file, site.call) not in REASONS] == []


def test_each_reason_names_an_existing_place() -> None:
    there = {(site.file, site.call) for site in without_mutant(MUTANTS)}
    assert set(REASONS) - there == set()


def test_places_are_found() -> None:
    found = {(site.file, site.call) for site in sites()}
    assert ("pipert/autograd/streams.py", "waiter.wait_stream(awaited)") in found


def test_an_outdated_mutant_is_reported_with_its_text() -> None:
    mutant = Mutant("old", "pipert/autograd/streams.py", "what", "no such text", "pass")
    with pytest.raises(ValueError, match="(?s)mutant old: .* 0 times.*no such text"):
        mutant.mutated()


def test_the_changed_span_is_exactly_the_difference() -> None:
    text = "waiter.wait_stream(awaited)"
    mutant = Mutant("short", "pipert/autograd/streams.py", "what", text, "waiter.wait_stream(None)")
    begin, end = mutant.changed()
    assert mutant.source()[begin:end] == "awaited"


def test_reports_are_distinguished_from_wrong_values() -> None:
    mutant = Mutant("easy", "pipert/autograd/streams.py", "all", "a", "b")
    by_report = Verdict("tests/cuda/test_waits.py::test_it[case]", "RACE: read after write", 1.0)
    by_value = by_report._replace(how="assert 1 == 2")
    assert row(mutant, by_report).endswith(
        "| `cuda/test_waits.py::test_it` | report | RACE: read after write |"
    )
    assert row(mutant, by_value).endswith("| value | assert 1 == 2 |")
    assert row(mutant, by_value._replace(how="KeyError: 0")).endswith("| error | KeyError: 0 |")
    assert "2 noticed, 1 of them by a report" in summary([by_report, by_value])
