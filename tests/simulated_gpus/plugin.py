"""``python -m pytest --simulated-gpus``: CUDA is simulated, and a report fails its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import simulated_gpus


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated-gpus",
        action="store_true",
        help="run the tests marked cuda and multi_gpu on eight simulated GPUs (needs g++)",
    )
    parser.addoption(
        "--simulated-stacks", action="store_true", help="with it: reports have Python stacks"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest imports torch."""
    options = early_config.known_args_namespace
    if options.simulated_gpus:
        gpus = simulated_gpus.start()
        gpus.detect(stacks=options.simulated_stacks)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    gpus = simulated_gpus.running()
    if gpus is None:
        return (yield)
    gpus.clear()
    result = yield
    reports = gpus.reports()
    if reports:
        pytest.fail(
            f"simulated GPUs report {len(reports)}:\n" + "\n".join(map(str, reports[:6])),
            pytrace=False,
        )
    return result
