"""Provides a pipe of any model with the interface of ``Pipe``, for the tests of ``Pipe``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from pipert.model.split import check_balance, check_module, sequential
from pipert.pipes.module_pipe import ModulePipe
from pipert.skip.declarations import keys_of

__all__ = ["AnyModelPipe"]


class Chain(nn.Sequential):
    """A model whose own ``forward`` calls layers in order; the first one gets all arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value


class AnyModelPipe(ModulePipe):
    """A pipe of any model with the interface of ``Pipe``."""

    def __init__(self, module: Any, balance: Iterable[int] | None = None, **options: Any) -> None:
        check_module(module)
        if keys_of(module):
            import pytest  # not at the top: scripts do without it

            pytest.skip("stashes and pops skips, which are for the layers of an nn.Sequential")
        self.__dict__["balance"] = numbers = check_balance(module, balance)
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
