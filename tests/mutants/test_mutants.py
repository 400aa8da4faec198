"""Each use of streams has a mutant; ``python -m tests.mutants`` shows which test notices it."""

from __future__ import annotations

import ast

from tests.mutants.places import NOT_NOTICED, ROOT, mutants


def test_each_mutant_changes_its_file_to_another_program() -> None:
    for mutant in mutants():
        before, after = (ROOT / mutant.file).read_text(), mutant.mutated()
        assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after)), mutant


def test_waits_copies_and_streams_are_found() -> None:
    """If this fails, the package calls them by another name: teach it to places.py."""
    found = {mutant.call.partition("(")[0].rpartition(".")[2] for mutant in mutants()}
    expected = {"wait", "wait_stream", "wait_event", "record_stream", "copy", "get", "stream"}
    assert expected - found == set() and len(mutants()) > 50


def test_an_exception_is_made_for_existing_places_only() -> None:
    """If this fails: the package no longer has that place, so delete its line in places.py."""
    gone = set(NOT_NOTICED) - {mutant.name for mutant in mutants()}
    assert gone == set(), f"no such place: {sorted(gone)}"
