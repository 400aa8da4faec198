"""``python -m pytest --sweep`` runs the cases, too, that take minutes and seldom fail alone.

Two marks say which they are:

``sweep``
    This test or case is left out without ``--sweep``.
``pairwise``
    Of the cases of this test all are left out but some in which each two values of its parameters
    meet (``tests/pairwise.py``). A named tuple or a dataclass counts as its fields.
    ``pairwise(keep=...)`` has a function from the parameters to whether a case is always there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.pairwise import pairwise

__all__ = ["pytest_addoption", "pytest_collection_modifyitems"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sweep", action="store_true", help="run the cases, too, that only a long run has time for"
    )


@pytest.hookimpl(tryfirst=True)  # before -k and -m, so that these see the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = [item for item in items if isinstance(item, pytest.Function)]
    tests.sort(key=_name)  # in the order of a module's fixtures the cases of a test are apart
    for _, cases in groupby(tests, key=_name):
        _mark_what_pairs_do_without(list(cases))
    if not config.option.sweep:
        left_out = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


def _name(item: pytest.Function) -> str:
    """The test that this is a case of."""
    return item.nodeid.partition("[")[0]


def _mark_what_pairs_do_without(cases: list[pytest.Function]) -> None:
    cases = [case for case in cases if not case.get_closest_marker("sweep")]
    marked = cases and cases[0].get_closest_marker("pairwise")
    if not marked or len(cases) == 1:
        return
    wanted = marked.kwargs.get("keep", lambda **parameters: False)
    keep = [k for k, case in enumerate(cases) if wanted(**case.callspec.params)]
    chosen = set(pairwise([tuple(_values(case)) for case in cases], keep))
    for k, case in enumerate(cases):
        if k not in chosen:
            case.add_marker(pytest.mark.sweep)


def _values(case: pytest.Function) -> Iterator[Hashable]:
    for _, value in sorted(case.callspec.params.items()):
        yield from map(_key, _fields(value))


def _fields(value: Any) -> list[Any]:
    """A record's fields; another value alone."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value) if isinstance(value, tuple) and hasattr(value, "_fields") else [value]


def _key(value: Any) -> Hashable:
    """What tells a value from others: 1 from True, and a list by how it looks."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
