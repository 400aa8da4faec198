"""pipert's refusals also hold while another thread compiles something."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipert import NestedCheckpointError, Pipe

WAIT = 30.0  # s


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.norm, x, use_reentrant=False)
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of dynamo
def test_a_checkpoint_around_a_deferred_norm_is_refused_while_another_thread_compiles() -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        compiling.set()
        assert go_on.wait(WAIT)
        return graph.forward

    compiled: Any = torch.compile(nn.Linear(3, 3), backend=backend)
    other = threading.Thread(target=compiled, args=(torch.ones(2, 3),))
    layers = nn.Sequential(nn.Linear(3, 3), Nested())
    options: Any = {"devices": ["cpu"] * 2, "deferred_batch_norm": True}
    with Pipe(layers, [1, 1], checkpoint="never", timeout=WAIT, **options) as pipe:
        other.start()
        try:
            assert compiling.wait(WAIT)
            with pytest.raises(NestedCheckpointError):
                pipe(torch.randn(4, 3))
        finally:
            go_on.set()
            other.join()
