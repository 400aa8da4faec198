"""Adds ``--any-model``, with which each ``Pipe`` of a test is replaced by a pipe of any model.

The model is cut where the partitions begin. So the tests show that what holds for an
``nn.Sequential``, whose layers are called one by one, also holds for a model with its own
``forward``.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.helpers import scripts

__all__ = [
    "pytest_addoption", "pytest_collection_modifyitems", "pytest_configure",
    "pytest_pyfunc_call", "replace_pipes",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--any-model", action="store_true", help="run each pipe as one of any model")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.any_model:
        # Layers of tests note on themselves what they see, which would raise this warning.
        config.addinivalue_line("filterwarnings", "ignore::pipert.SharedStateWarning")
        replace_pipes()
        scripts.first = f"from {__name__} import replace_pipes; replace_pipes()\n"


def replace_pipes() -> None:
    """Replaces ``pipert.Pipe``, for the rest of the process."""
    import pipert.pipe  # not earlier: simulated GPUs must be created before torch is imported
    from tests.any_model.any_model_pipe import AnyModelPipe

    pipert.Pipe = pipert.pipe.Pipe = AnyModelPipe  # type: ignore[misc,assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests about calling layers one by one, or about the names of threads."""
    if config.option.any_model:
        layered = [item for item in items if item.get_closest_marker("layered")]
        config.hook.pytest_deselected(items=layered)
        items[:] = [item for item in items if not item.get_closest_marker("layered")]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skips a test whose layer changes its argument in place.

    Each call of a layer is recomputed separately, so such layers are refused.
    """
    try:
        return (yield)
    except RuntimeError as error:
        refused = "a layer changes its argument in place"
        if pyfuncitem.config.option.any_model and str(error).startswith(refused):
            pytest.skip(str(error))
        raise
