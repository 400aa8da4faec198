"""Adds ``--sweep``, with which pytest also runs cases that take minutes and seldom fail alone.

Two marks say which cases run only with ``--sweep``:

``sweep``
    This test or case.
``pairwise``
    All cases of this test except some that contain each pair of values of its parameters
    (``tests/helpers/pairwise.py``). A named tuple or a dataclass counts as its fields.
    ``pairwise(keep=...)`` takes a function from the parameters to whether a case always runs.

A line at the end of each run says what was left out, and with which option it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import Any
from zlib import crc32

import pytest

from tests.helpers.pairwise import pairwise

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_terminal_summary"]

_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sweep", action="store_true", help="also run the cases that only a long run has time for"
    )
    parser.addoption("--every", type=int, default=1, help="of these, run one in so many")


@pytest.hookimpl(tryfirst=True)  # before -k and -m, so that these see the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = [item for item in items if isinstance(item, pytest.Function)]
    tests.sort(key=_name)  # fixtures of a module can separate the cases of a test
    for _, cases in groupby(tests, key=_name):
        _mark_redundant(list(cases))
    swept = [item for item in items if item.get_closest_marker("sweep")]
    every = config.option.every if config.option.sweep else 0
    left_out = [item for item in swept if not every or crc32(item.nodeid.encode()) % every]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = len(left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says what was left out, and how to run it."""
    skips = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    for_gpus = sum(reason.endswith((" CUDA device", " CUDA devices")) for reason in skips)
    left_out = [
        (config.stash.get(_LEFT_OUT, 0), "(--sweep runs them)"),
        (for_gpus, "that need GPUs (--simulated-gpus runs them)"),
        (len(skips) - for_gpus, "others (-rs names them)"),
    ]
    shown = [f"{count} {what}" for count, what in left_out if count]
    if shown:
        terminalreporter.write_line("left out: " + ", ".join(shown))


def _name(item: pytest.Function) -> str:
    """Returns the name of the test that this is a case of."""
    return item.nodeid.partition("[")[0]


def _mark_redundant(cases: list[pytest.Function]) -> None:
    """Marks as ``sweep`` the cases of a pairwise test that add no pair of values."""
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
    """Returns the fields of a record, or the value itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(value) if isinstance(value, tuple) and hasattr(value, "_fields") else [value]


def _key(value: Any) -> Hashable:
    """Returns a key that distinguishes 1 from True, and unhashable values by their repr."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
