"""``python -m pytest --driven``: each ``Pipe`` of a test is one of any model, cut at its partitions.

So what holds for the layers of an ``nn.Sequential`` that are called one by one is seen to hold for
a ``forward`` of its own as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch import nn

import pipert
import pipert.pipe
from pipert.model.split import check_balance, check_module, require_balance, sequential
from pipert.pipeline import ModulePipe
from pipert.skip.verify import declarations

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driven", action="store_true", help="run each pipe as one of any model")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.driven:
        pipert.Pipe = pipert.pipe.Pipe = DrivenPipe  # type: ignore[misc,assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about pipert's own way through layers, or the names of its threads."""
    if config.option.driven:
        layered = [item for item in items if item.get_closest_marker("layered")]
        config.hook.pytest_deselected(items=layered)
        items[:] = [item for item in items if not item.get_closest_marker("layered")]


class Chain(nn.Sequential):
    """Layers in a ``forward`` of its own; the first one gets all arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value


class DrivenPipe(ModulePipe):
    """Has the interface of ``Pipe``."""

    def __init__(self, module: Any, balance: Iterable[int] | None = None, **options: Any) -> None:
        check_module(module)
        if any(declarations(module)):
            pytest.skip("stashes and pops skips, which are for the layers of an nn.Sequential")
        self.__dict__["balance"] = numbers = list(require_balance(balance))
        check_balance(module, numbers, 1 << 10)
        names = list(module._modules)
        starts = [sum(numbers[:k]) for k in range(1, len(numbers))]
        defaults: dict[str, Any] = {
            "devices": None, "chunks": 1, "checkpoint": None, "deferred_batch_norm": None,
            "timeout": None,
        }  # fmt: skip
        chain = sequential(module._modules, module.training, Chain)
        super().__init__(chain, [names[k] for k in starts], **(defaults | options))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]  # type: ignore[return-value]
