"""``python -m pytest --driven``: each ``Pipe`` of a test is one of any model, cut where its
partitions begin.

So what holds for the layers of an ``nn.Sequential`` that are called one by one is seen to hold for
a ``forward`` of its own as well.
"""

from __future__ import annotations

import pytest

from tests import scripts

__all__ = [
    "pytest_addoption", "pytest_collection_modifyitems", "pytest_configure", "replace_pipes",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driven", action="store_true", help="run each pipe as one of any model")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.driven:
        replace_pipes()
        scripts.first = f"from {__name__} import replace_pipes; replace_pipes()\n"


def replace_pipes() -> None:
    """From now on, in this process."""
    import pipert.pipe  # now: simulated GPUs come before torch
    from tests.any_model.driven_pipe import DrivenPipe

    pipert.Pipe = pipert.pipe.Pipe = DrivenPipe  # type: ignore[misc,assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about pipert's own way through layers, or the names of its threads."""
    if config.option.driven:
        layered = [item for item in items if item.get_closest_marker("layered")]
        config.hook.pytest_deselected(items=layered)
        items[:] = [item for item in items if not item.get_closest_marker("layered")]
