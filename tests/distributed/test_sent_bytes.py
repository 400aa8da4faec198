"""Tests that ranks send as many bytes as ``crossing_sizes`` predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from pipert import distributed
from pipert.balance import Arguments, crossing_sizes
from pipert.distributed.boundary import Boundary
from tests.distributed.launcher import run
from tests.distributed.test_features import Case, trees, u_net


def bytes_sent(rank: int, case: Case, balance: list[int]) -> int:
    """Returns the bytes that this rank sends in a micro-batch's forward."""
    sent = []
    pack = Boundary.pack

    def packing(boundary: Boundary, i: int, value: Any) -> Any:
        tensors = pack(boundary, i, value)
        sent.append(sum(tensor.nbytes for tensor in tensors))
        return tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Boundary, "pack", packing)
        distributed.Pipe(case.model, balance).forward_backward(
            *case.args, **case.kwargs, target=case.target, loss_fn=F.mse_loss
        )
    return sum(sent)


@pytest.mark.parametrize(("make", "balance"), [(u_net, [2, 1, 1, 2]), (trees, [1, 1, 1, 1])])
def test_each_rank_sends_the_predicted_bytes(make: Any, balance: list[int]) -> None:
    case = make()
    sizes = crossing_sizes(case.model, Arguments(case.args, case.kwargs))
    cuts = [sum(balance[:j]) for j in range(1, len(balance))]
    found = run(len(balance), bytes_sent, case, balance)
    assert found == [*(sizes[cut] for cut in cuts), 0]
