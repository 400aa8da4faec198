"""``python -m pytest --driven``: each ``Pipe`` of a test is one of any model, cut where its
partitions begin.

So what holds for the layers of an ``nn.Sequential`` that are called one by one is seen to hold for
a ``forward`` of its own as well.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests import scripts

__all__ = [
    "pytest_addoption", "pytest_collection_modifyitems", "pytest_configure",
    "pytest_pyfunc_call", "replace_pipes",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driven", action="store_true", help="run each pipe as one of any model")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.driven:
        # Layers of tests note what they see.
        config.addinivalue_line("filterwarnings", "ignore::pipert.SharedStateWarning")
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


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A call of a layer is recomputed by itself, so it may not change what it gets."""
    try:
        return (yield)
    except RuntimeError as error:
        refused = "a layer changes its argument in place"
        if pyfuncitem.config.option.driven and str(error).startswith(refused):
            pytest.skip(str(error))
        raise
