"""``python -m pytest --driven``: each ``Pipe`` of a test is one of any model, cut where its
partitions begin.

So what holds for the layers of an ``nn.Sequential`` that are called one by one is seen to hold for
a ``forward`` of its own as well.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driven", action="store_true", help="run each pipe as one of any model")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.driven:
        import pipert.pipe  # now: simulated GPUs come before torch
        from tests.any_model.driven_pipe import DrivenPipe

        pipert.Pipe = pipert.pipe.Pipe = DrivenPipe  # type: ignore[misc,assignment]
